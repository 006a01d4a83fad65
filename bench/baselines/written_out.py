"""The baseline that everyone would write first: DUST's formulas in eager torch, four large products a layer."""

from __future__ import annotations

from torch import Tensor

from cdt_fast.models import DUST
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference


def written_out_losses(model: DUST, noisy: Tensor, clean: Tensor) -> Tensor:
    """The losses `[L+1]` of a model with analysis codes and "own" or "next" readouts, each layer from its codes
    alone."""
    dictionaries, readouts = dictionaries_of(model)
    codes = model.step * noisy @ dictionaries[0]
    reconstructions = [codes @ readouts[0].mT]
    for dictionary, readout in zip(dictionaries, readouts[1:], strict=True):
        codes, reconstruction = unrolled_layer_reference(
            codes,
            noisy,
            dictionary,
            step=model.step,
            threshold=model.threshold,
            scale=model.scale,
            nonlinearity=model.nonlinearity,
            next_dictionary=readout,
        )
        reconstructions.append(reconstruction)
    return layerwise_reconstruction_loss_reference(reconstructions, clean)


def dictionaries_of(model: DUST) -> tuple[list[Tensor], list[Tensor]]:
    """The dictionary of every layer 1..L, and the one that reads every depth 0..L."""
    whole = model.dictionary
    dictionaries: list[Tensor] = [whole for _ in range(model.layers)] if model.tied else list(whole.unbind())
    if model.readout == "next":
        return dictionaries, [*dictionaries, dictionaries[-1]]
    return dictionaries, [dictionaries[0], *dictionaries]


def written_out_step(model: DUST, noisy: Tensor, clean: Tensor, depth_weights: Tensor) -> Tensor:
    """Forward and backward of the weighted loss; gradients are added to the parameters."""
    losses = written_out_losses(model, noisy, clean)
    (depth_weights.to(losses) * losses).sum().backward()
    return losses.detach()
