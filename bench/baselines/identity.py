"""DUST in eager torch by the identity `D (A H) = A Z`: a layer reuses the projection that reads the depth before it.

Two large products a layer where the written-out one has four; what torch alone can do once the identity is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.bench.baselines.written_out import dictionaries_of
from cdt_fast.models import DUST
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.soft_threshold.reference import shrink_reference


def identity_losses(model: DUST, noisy: Tensor, clean: Tensor) -> Tensor:
    """The losses `[L+1]` of a model with analysis codes and "own" or "next" readouts."""
    dictionaries, readouts = dictionaries_of(model)
    codes = model.step * noisy @ dictionaries[0]
    reconstructions = [codes @ readouts[0].mT]
    for level, dictionary in enumerate(dictionaries, 1):
        # An untied model that reads with its own dictionary has read the depth before with another one.
        known = readouts[level - 1] is dictionary
        projection = reconstructions[-1] if known else codes @ dictionary.mT
        attention = torch.softmax(model.scale * projection @ projection.mT, -1)
        residual = noisy - attention @ projection
        codes = attention @ codes + model.step * residual @ dictionary
        codes = shrink_reference(codes, model.threshold, model.nonlinearity)
        reconstructions.append(codes @ readouts[level].mT)
    return layerwise_reconstruction_loss_reference(reconstructions, clean)
