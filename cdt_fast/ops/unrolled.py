"""The unrolled layer: attention, LISTA residual, shrinkage and the next projection (MATH: section 5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdt_fast.ops.attention import attention_matrix, attention_matrix_backward, symmetric_attention_reference
from cdt_fast.ops.checks import (
    check_factor,
    check_shape,
    check_tensor,
    check_together,
    compute_dtype,
    padding_mask,
    without_padding,
)
from cdt_fast.ops.lista import check_lista_arguments, shrink_, shrink_backward_, shrink_reference


def unrolled_layer(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float = 1.0,
    nonlinearity: str = "soft_threshold",
    projection: Tensor | None = None,
    lengths: Tensor | None = None,
    next_dictionary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One layer of DUST (or of UT for video), and the projection of its codes that the next layer starts from.

        Z = H Dᵀ,   A = softmax_rows(β Z Zᵀ),   H⁺ = S_θ(A H + (1/c)(X − A Z) D),   Z⁺ = H⁺ D⁺ᵀ

    The identity `D (A H) = A Z` makes one projection serve as attention feature, as ingredient of the residual and,
    at the same time, as the reconstruction `x̂ = Z` that the loss reads. Hand `Z⁺` to the next layer as `projection`,
    and a layer costs two large products forward and four backward, where the written-out layer costs four and eight.

    Args:
        codes: H, `[..., T, m]`.
        signal: X, `[..., T, n]`.
        dictionary: D, `[n, m]`.
        step: 1/c ≥ 0; with `c ≥ ‖D‖₂²` the LISTA half-step never raises its objective.
        threshold: θ = λ₁/c ≥ 0; "relu" does not use it.
        scale: β, the factor of the attention scores.
        nonlinearity: "soft_threshold", or "relu" for `max(v, 0)` in its place.
        projection: Z = `codes @ dictionary.T`, `[..., T, n]`, where the caller has it already; it is not checked. Its
            gradient flows to the tensor given.
        lengths: `[...]` integers, the number of tokens that count in each sequence; results are zero at padding.
        next_dictionary: D⁺, `[k, m]`, default `dictionary`.

    Returns:
        The next codes `[..., T, m]` and their projection `[..., T, k]`, in the dtype of the arguments (under autocast:
        autocast's dtype).

    Raises:
        InputError: an argument has the wrong rank, shape, dtype, device or value. A second derivative raises torch's
            error for functions that are differentiable once.
    """
    check_lista_arguments(codes, signal, dictionary, nonlinearity, rank=2)
    if projection is not None:
        check_tensor("projection", projection, 2, "[..., T, n]")
        check_shape("projection", projection, tuple(signal.shape), "as signal")
    if next_dictionary is not None:
        check_tensor("next_dictionary", next_dictionary, 2, "[k, m]")
        check_shape("next_dictionary", next_dictionary, (next_dictionary.shape[0], codes.shape[-1]), "any by m")
    check_together(codes=codes, projection=projection, next_dictionary=next_dictionary)
    step = check_factor("step", step, non_negative=True)
    threshold = check_factor("threshold", threshold, non_negative=True)
    scale = check_factor("scale", scale)
    if next_dictionary is dictionary:
        next_dictionary = None  # one gradient for the tied dictionary, not two to be added
    padding = padding_mask(lengths, codes)
    next_codes, next_projection = _UnrolledLayer.apply(  # type: ignore[misc]
        _sequences(codes, padding),
        _sequences(signal, padding),
        dictionary,
        None if projection is None else _sequences(projection, padding),
        next_dictionary,
        None if padding is None else padding.flatten(0, -2) if padding.dim() > 1 else padding.unsqueeze(0),
        step,
        threshold,
        scale,
        nonlinearity,
    )
    return next_codes.view(codes.shape), next_projection.view(*codes.shape[:-1], next_projection.shape[-1])


def _sequences(tokens: Tensor, padding: Tensor | None) -> Tensor:
    """`[..., T, width]` → contiguous `[B, T, width]` in the dtype of the products, with zeros at the padding."""
    tokens = without_padding(tokens, padding).to(compute_dtype(tokens))
    return (tokens.unsqueeze(0) if tokens.dim() == 2 else tokens.flatten(0, -3)).contiguous()


def unrolled_layer_reference(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float = 1.0,
    nonlinearity: str = "soft_threshold",
    lengths: Tensor | None = None,
    next_dictionary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The layer written out, without the identity: four large products, in any dtype, differentiated by torch."""
    padding = padding_mask(lengths, codes)
    codes, signal = without_padding(codes, padding), without_padding(signal, padding)
    mixed = symmetric_attention_reference(codes @ dictionary.mT, codes, scale=scale, lengths=lengths)
    residual = signal - mixed @ dictionary.mT
    next_codes = shrink_reference(mixed + step * residual @ dictionary, threshold, nonlinearity)
    return next_codes, next_codes @ (dictionary if next_dictionary is None else next_dictionary).mT


class _UnrolledLayer(torch.autograd.Function):
    """Saves codes, signal, projection and next codes: all of them tensors that the network holds anyway.

    The attention matrix and the residual are computed again in the backward (products of width T and n, not m), and
    the gradient mask is `next codes ≠ 0`. Sums into `[tokens, m]` run in place, inside the products where possible:
    on a CPU a fresh tensor of that size can cost as much as a product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        codes: Tensor,
        signal: Tensor,
        dictionary: Tensor,
        projection: Tensor | None,
        next_dictionary: Tensor | None,
        padding: Tensor | None,
        step: float,
        threshold: float,
        scale: float,
        nonlinearity: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        atoms = dictionary.to(codes.dtype)
        next_atoms = atoms if next_dictionary is None else next_dictionary.to(codes.dtype)
        with torch.autocast(codes.device.type, enabled=False):
            projected = codes @ atoms.mT if projection is None else projection
            attention = attention_matrix(projected, scale, padding).to(codes.dtype)
            residual = torch.baddbmm(signal, attention, projected, alpha=-1)
            next_codes = residual @ atoms
            next_codes = shrink_(next_codes.baddbmm_(attention, codes, beta=step), threshold, nonlinearity)
            next_projection = next_codes @ next_atoms.mT
        ctx.save_for_backward(codes, signal, dictionary, projected, next_dictionary, padding, next_codes)
        ctx.projection_given = projection is not None
        ctx.step, ctx.threshold, ctx.scale, ctx.nonlinearity = step, threshold, scale, nonlinearity
        return next_codes, next_projection

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad_output is None for grad_output in grad_outputs):
            return (None,) * 10
        # A backward that is called inside autocast would have some of its products cast, and sums of two dtypes fail.
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return _backward(ctx, *grad_outputs)


def _backward(
    ctx: Any, grad_next_codes: Tensor | None, grad_next_projection: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of `_UnrolledLayer`, of which at least one of the two outputs has one."""
    codes, signal, dictionary, projected, next_dictionary, padding, next_codes = ctx.saved_tensors
    needs_codes, needs_signal, needs_dictionary, needs_projection, needs_next_dictionary, *_ = ctx.needs_input_grad
    grad_codes = grad_signal = grad_projection = grad_dictionary = grad_next_dictionary = None
    atoms = dictionary.to(codes.dtype)
    tied = next_dictionary is None

    if grad_next_projection is not None:
        grad_next_projection = grad_next_projection.contiguous()
        if needs_dictionary if tied else needs_next_dictionary:
            grad_next_dictionary = _rows(grad_next_projection).mT @ _rows(next_codes)
        next_atoms = atoms if tied else next_dictionary.to(codes.dtype)
        if grad_next_codes is None:
            grad_update = grad_next_projection @ next_atoms
        else:
            grad_update = torch.addmm(_rows(grad_next_codes.contiguous()), _rows(grad_next_projection), next_atoms)
    else:
        assert grad_next_codes is not None  # with neither there is nothing to do, and the caller knows
        grad_update = grad_next_codes.clone(memory_format=torch.contiguous_format)
    grad_update = grad_update.view(codes.shape)
    grad_update = shrink_backward_(grad_update, next_codes, ctx.threshold, ctx.nonlinearity)

    attention = attention_matrix(projected, ctx.scale, padding)
    attention_low = attention.to(codes.dtype)
    grad_residual = (grad_update @ atoms.mT).mul_(ctx.step)
    if needs_signal:
        grad_signal = grad_residual
    if needs_dictionary:
        residual = torch.baddbmm(signal, attention_low, projected, alpha=-1)
        grad_dictionary = (_rows(residual).mT @ _rows(grad_update)).mul_(ctx.step)
        if tied and grad_next_dictionary is not None:
            grad_dictionary += grad_next_dictionary
            grad_next_dictionary = None
    if needs_codes:
        grad_codes = attention_low.mT @ grad_update
    if needs_projection or (not ctx.projection_given and (needs_codes or needs_dictionary)):
        grad_attention = torch.baddbmm(grad_update @ codes.mT, grad_residual, projected.mT, alpha=-1)
        grad_projection = attention_matrix_backward(projected, attention, grad_attention, ctx.scale)
        grad_projection.baddbmm_(attention_low.mT, grad_residual, alpha=-1)
        if not ctx.projection_given:
            if grad_codes is not None:
                _rows(grad_codes).addmm_(_rows(grad_projection), atoms)
            if grad_dictionary is not None:
                grad_dictionary.addmm_(_rows(grad_projection).mT, _rows(codes))
            grad_projection = None
    if grad_dictionary is not None:
        grad_dictionary = grad_dictionary.to(dictionary.dtype)
    if grad_next_dictionary is not None:
        grad_next_dictionary = grad_next_dictionary.to(next_dictionary.dtype)
    return grad_codes, grad_signal, grad_dictionary, grad_projection, grad_next_dictionary, *(None,) * 5


def _rows(tokens: Tensor) -> Tensor:
    return tokens.view(tokens.shape[:-1].numel(), tokens.shape[-1])
