"""The unrolled layer and its gradient in plain torch, with the scores of all sequences at once."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import UnrolledLayerArguments, UnrolledLayerBackwardArguments, UnrolledLayerGradients
from cdt_fast.ops.layerwise_reconstruction_loss.plain import errors_in_torch
from cdt_fast.ops.shared.attention_scores import (
    attention_matrix,
    grad_of_both_factors,
    softmax_backward_,
)
from cdt_fast.ops.shared.checks import clear_padding_, padding_mask, without_padding
from cdt_fast.ops.shared.products import rows_of
from cdt_fast.ops.soft_threshold.plain import shrink_, shrink_backward


def forward_in_torch(layer: UnrolledLayerArguments) -> tuple[Tensor, Tensor, Tensor | None]:
    """H⁺ `[B, T, m]`, Z⁺ `[B, T, k]` and, with a target, its squared error `[1]`; the dictionaries are of the codes'
    dtype, and the projection is there."""
    padding = padding_mask(layer.lengths, layer.signal)
    signal, projection, values = _signal_projection_values(layer, padding)
    codes = None if layer.codes is None else without_padding(layer.codes, padding)
    attention = None  # of one token, A is 1
    if signal.shape[1] > 1:
        attention = attention_matrix(projection, layer.scale, padding).to(signal.dtype)
    residual = _residual(signal, attention, values)
    if codes is None:
        next_codes = product_of_tokens(residual.mul_(layer.step), layer.dictionary)
    elif attention is None:
        next_codes = product_of_tokens(residual.mul_(layer.step), layer.dictionary, codes)
    else:
        next_codes = product_of_tokens(residual, layer.dictionary).baddbmm_(attention, codes, beta=layer.step)
    shrink_(next_codes, layer.threshold, layer.nonlinearity)
    next_dictionary = layer.dictionary if layer.next_dictionary is None else layer.next_dictionary
    next_projection = product_of_tokens(next_codes, next_dictionary.mT)
    errors = None if layer.target is None else errors_in_torch([next_projection], layer.target, padding)
    return next_codes, next_projection, errors


def backward_in_torch(layer: UnrolledLayerBackwardArguments) -> UnrolledLayerGradients:
    """The gradients; the dictionaries are of the codes' dtype, and the projection is there.

    The attention matrix and the residual are computed again (products of width T and n, not m), and the gradient mask
    is `next codes ≠ 0`. Sums into `[tokens, m]` run in place, inside the products where possible: on a CPU a fresh
    tensor of that size can cost as much as a product.
    """
    padding = padding_mask(layer.lengths, layer.signal)
    codes = None if layer.codes is None else without_padding(layer.codes, padding)
    signal, projection, values = _signal_projection_values(layer, padding)
    next_dictionary = layer.dictionary if layer.next_dictionary is None else layer.next_dictionary
    grad_next_codes, grad_next_projection = layer.grad_next_codes, _grad_next_projection(layer, padding)
    if grad_next_projection is None and grad_next_codes is None:
        grad_next_projection = signal.new_zeros((*signal.shape[:-1], next_dictionary.shape[0]))
    if grad_next_codes is not None:
        grad_next_codes = without_padding(grad_next_codes, padding)
    if grad_next_projection is not None:
        grad_update = product_of_tokens(grad_next_projection, next_dictionary, grad_next_codes)
    else:
        assert grad_next_codes is not None  # with neither the zeros above stand for both
        # In memory of its own, which what follows writes over.
        grad_update = grad_next_codes.clone() if padding is None else grad_next_codes
    shrink_backward(grad_update, layer.next_codes, layer.nonlinearity, out=grad_update)

    grad_residual = product_of_tokens(grad_update, layer.dictionary.mT).mul_(layer.step)
    if signal.shape[1] == 1:
        return UnrolledLayerGradients(
            update=grad_update,
            residual=_residual(signal, None, values).mul_(layer.step) if layer.needs_dictionary else None,
            next_projection=grad_next_projection,
            signal=2 * grad_residual if codes is None and layer.needs_signal else grad_residual,
            projection=-grad_residual if layer.needs_projection else None,
            codes=grad_update if layer.needs_codes else None,
        )
    attention = attention_matrix(projection, layer.scale, padding)
    attention_low = attention.to(signal.dtype)
    residual = grad_projection = None
    if layer.needs_dictionary:
        residual = _residual(signal, attention_low, values).mul_(layer.step)
    if layer.needs_projection:
        grad_projection = torch.zeros_like(projection, memory_format=torch.contiguous_format)
        if layer.scale:  # else nothing comes from the scores, whose gradient may overflow float16: 0 · ∞ = NaN
            if codes is None:
                grad_attention = (grad_residual @ values.mT).neg_()
            else:
                grad_attention = torch.baddbmm(grad_update @ codes.mT, grad_residual, values.mT, alpha=-1)
            grad_scores = softmax_backward_(grad_attention, attention)
            grad_of_both_factors(grad_scores, projection, layer.scale, out=grad_projection)
        clear_padding_(grad_projection.baddbmm_(attention_low.mT, grad_residual, alpha=-1), padding)
    grad_codes = clear_padding_(attention_low.mT @ grad_update, padding) if layer.needs_codes else None
    grad_signal = grad_residual
    if codes is None and layer.needs_signal:
        grad_signal = clear_padding_(torch.baddbmm(grad_residual, attention_low.mT, grad_residual), padding)
    return UnrolledLayerGradients(grad_update, residual, grad_next_projection, grad_signal, grad_projection, grad_codes)


def _residual(signal: Tensor, attention: Tensor | None, values: Tensor) -> Tensor:
    """X − A V, where no attention stands for A = 1."""
    return signal - values if attention is None else torch.baddbmm(signal, attention, values, alpha=-1)


def _signal_projection_values(layer: UnrolledLayerArguments, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """X, Z and what the attention weighs in the residual: Z, or without codes Z − X."""
    assert layer.projection is not None
    signal, projection = without_padding(layer.signal, padding), without_padding(layer.projection, padding)
    return signal, projection, projection if layer.codes is not None else projection - signal


def _grad_next_projection(layer: UnrolledLayerBackwardArguments, padding: Tensor | None) -> Tensor | None:
    """The whole dZ⁺ `[B, T, k]`: what has arrived, and the loss's part `2 dε (Z⁺ − S)`."""
    arrived, grad_error = layer.grad_next_projection, layer.grad_error
    if arrived is not None:
        arrived = without_padding(arrived, padding)
    # A loss that does not count gives no gradient, also where it is infinite: 0 · ∞ = NaN. On a GPU the host would have
    # to wait to look at its weight.
    on_cpu = grad_error is not None and grad_error.device.type == "cpu"
    if grad_error is None or layer.target is None or layer.next_projection is None or (on_cpu and grad_error == 0):
        return arrived
    error = layer.next_projection.to(grad_error.dtype, copy=True)
    error.sub_(without_padding(layer.target, padding)).mul_(2 * grad_error)
    if not on_cpu:
        error.masked_fill_(grad_error == 0, 0.0)
    if arrived is not None:
        error += arrived
    return error.to(layer.signal.dtype)


def product_of_tokens(tokens: Tensor, matrix: Tensor, added: Tensor | None = None) -> Tensor:
    """`tokens matrix`, or `tokens matrix + added`, for tokens `[B, T, width]`."""
    rows = rows_of(tokens)
    rows = torch.mm(rows, matrix) if added is None else torch.addmm(rows_of(added), rows, matrix)
    return rows.view(*tokens.shape[:-1], matrix.shape[1])
