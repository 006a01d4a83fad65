"""The models' losses in eager torch: as everyone would write them first, and by the identity `D (A H) = A Z`."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.models import DUST, TextUT
from cdt_fast.ops.common import LayerNonlinearity, shrink_reference
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference


def written_out_losses(model: DUST, noisy: Tensor, clean: Tensor) -> Tensor:
    """The losses `[L+1]` of a model with analysis codes and "own" or "next" readouts, each layer from its codes alone:
    four large products a layer."""
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


def identity_losses(model: DUST, noisy: Tensor, clean: Tensor) -> Tensor:
    """The losses `[L+1]` of the same models, a layer reusing the projection that reads the depth before it: two large
    products a layer, what torch alone can do once the identity is known."""
    dictionaries, readouts = dictionaries_of(model)
    codes = model.step * noisy @ dictionaries[0]
    reconstructions = [codes @ readouts[0].mT]
    options = {"step": model.step, "threshold": model.threshold, "scale": model.scale}
    for level, dictionary in enumerate(dictionaries, 1):
        # An untied model that reads with its own dictionary has read the depth before with another one.
        known = readouts[level - 1] is dictionary
        projection = reconstructions[-1] if known else codes @ dictionary.mT
        codes = identity_step(codes, projection, noisy, dictionary, **options, nonlinearity=model.nonlinearity)
        reconstructions.append(codes @ readouts[level].mT)
    return layerwise_reconstruction_loss_reference(reconstructions, clean)


def identity_step(
    codes: Tensor,
    projection: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float = 1.0,
    nonlinearity: LayerNonlinearity = "soft_threshold",
) -> Tensor:
    """The next codes `[B, T, m]` of a layer from its codes, their projection `[B, T, n]` and the signal: one product
    with the dictionary fewer than written out."""
    attention = torch.softmax(scale * projection @ projection.mT, -1)
    update = attention @ codes + step * (signal - attention @ projection) @ dictionary
    return shrink_reference(update, threshold, nonlinearity)


def dictionaries_of(model: DUST) -> tuple[list[Tensor], list[Tensor]]:
    """The dictionary of every layer 1..L, and the one that reads every depth 0..L."""
    whole = model.dictionary
    dictionaries: list[Tensor] = [whole for _ in range(model.layers)] if model.tied else list(whole.unbind())
    if model.readout == "next":
        return dictionaries, [*dictionaries, dictionaries[-1]]
    return dictionaries, [dictionaries[0], *dictionaries]


def written_out_text_losses(model: TextUT, tokens: Tensor, labels: Tensor) -> Tensor:
    """The losses `[L+1]` of an untied model whose residual is a layer's own input, for ids `[B, T]` without padding."""
    states = model.embedding(tokens)
    pooled = [states.mean(-2)]
    for attention_weight, feedforward in zip(model.attention_weight, model.feedforward_weight, strict=True):
        projection = states @ attention_weight.mT
        attention = torch.softmax(model.scale * projection @ projection.mT, -1)
        states = torch.relu(attention @ states @ (-0.5 * (feedforward + feedforward.mT)) + states)
        pooled.append(states.mean(-2))
    return torch.stack([torch.nn.functional.cross_entropy(model.head(mean), labels) for mean in pooled])
