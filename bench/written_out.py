"""The baseline that everyone would write first: DUST's formulas in eager torch, four large products a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.models import DUST
from cdt_fast.ops.reconstruction import layerwise_reconstruction_loss_reference
from cdt_fast.ops.unrolled import unrolled_layer_reference


def written_out_losses(model: DUST, noisy: Tensor, clean: Tensor) -> Tensor:
    """The losses `[L+1]` of a model with analysis codes and its own readouts, each layer from its codes alone."""
    dictionaries = [model.dictionary] * model.layers if model.tied else list(model.dictionary.unbind())
    codes = model.step * noisy @ dictionaries[0]
    reconstructions = [codes @ dictionaries[0].mT]
    for dictionary in dictionaries:
        codes, reconstruction = unrolled_layer_reference(
            codes,
            noisy,
            dictionary,
            step=model.step,
            threshold=model.threshold,
            scale=model.scale,
            nonlinearity=model.nonlinearity,
        )
        reconstructions.append(reconstruction)
    return layerwise_reconstruction_loss_reference(reconstructions, clean)


def written_out_step(model: DUST, noisy: Tensor, clean: Tensor, layer_weights: Tensor) -> Tensor:
    """Forward and backward of the weighted loss; gradients are added to the parameters."""
    losses = written_out_losses(model, noisy, clean)
    torch.dot(layer_weights.to(losses), losses).backward()
    return losses.detach()
