"""Symmetric softmax attention: one projection serves queries, keys and, unless given, values (docs/maths.md §5)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cdt_fast.ops.shared.attention_scores import softmax_dtype
from cdt_fast.ops.shared.backend import runs_on_triton
from cdt_fast.ops.shared.checks import (
    check_factor,
    check_lengths,
    check_shape,
    check_tensor,
    check_together,
    compute_dtype,
    length_of_each,
    padding_mask,
    sequences,
    without_padding,
)
from cdt_fast.ops.shared.registration import once_differentiable
from cdt_fast.ops.symmetric_attention.plain import backward_in_torch, forward_in_torch

# On a CPU the attention of a call is kept for its backward if it has no more bytes: computing it again takes longer.
KEPT_BYTES = 64 * 2**20


def symmetric_attention(
    z: Tensor,
    values: Tensor | None = None,
    *,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    energy: bool = False,
) -> Tensor:
    """Attention whose queries and keys are the same projection: `softmax_rows(scale · z zᵀ) · values`.

    The scores are symmetric, so that the backward needs five products where attention with separate queries, keys
    and values needs seven. Scores and softmax are computed in at least float32.

    Args:
        z: `[..., T, d]`, one projection of the tokens; any float dtype, any strides.
        values: `[..., T, k]`, default `z` itself.
        scale: β, the factor of the scores.
        lengths: `[...]` integers, the number of tokens that count in each sequence. Padding takes part in no row, its
            own rows are zero, and no gradient reaches it.
        energy: use the scores `scale · (z_iᵀ z_j − ½‖z_j‖²)`. With them a step never raises the energy
            `−Σ_{i<j} exp(−½‖z_i − z_j‖²) + ½ Σ‖z_i‖²` (for scale 1), whatever the norms of the tokens.

    Returns:
        `[..., T, k]` in the dtype of `values` (under autocast: autocast's dtype).

    Raises:
        InputError: an argument has the wrong rank, shape, dtype or device.

    Source: "A Constrained Optimization Perspective of Unrolled Transformers", the attention half-step.
    """
    check_tensor("z", z, 2, "[..., T, d]")
    if values is not None:
        check_tensor("values", values, 2, "[..., T, k]")
        check_shape("values", values, (*z.shape[:-1], values.shape[-1]), "the tokens of z by any width")
    check_together(z=z, values=values)
    check_lengths(lengths, z)
    scale = check_factor("scale", scale)
    if values is z:
        values = None  # one gradient for the tied projection, not two to be added
    dtype = compute_dtype(z)
    output, *_ = _forward(
        sequences(z, dtype),
        None if values is None else sequences(values, dtype),
        length_of_each(lengths),
        scale,
        bool(energy),
        torch.is_grad_enabled() and (z.requires_grad or (values is not None and values.requires_grad)),
    )
    return output.view(*z.shape[:-1], output.shape[-1])


def symmetric_attention_reference(
    z: Tensor,
    values: Tensor | None = None,
    *,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    energy: bool = False,
) -> Tensor:
    """The formula of `symmetric_attention`, in any dtype, differentiated by torch."""
    padding = padding_mask(lengths, z)
    z = without_padding(z, padding)
    values = z if values is None else without_padding(values, padding)
    scores = z @ z.mT
    if energy:
        scores = scores - 0.5 * z.square().sum(-1).unsqueeze(-2)
    scores = scale * scores
    if padding is not None:
        scores = scores.masked_fill(padding.unsqueeze(-2), float("-inf"))
    attention = torch.softmax(scores, -1)
    if padding is not None:
        attention = attention.masked_fill(padding.unsqueeze(-1), 0.0)
    return attention @ values


@torch.library.custom_op("cdt_fast::symmetric_attention", mutates_args=())
def _forward(
    z: Tensor, values: Tensor | None, lengths: Tensor | None, scale: float, energy: bool, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous `z` `[B, T, d]`, `values` `[B, T, k]`, `lengths` `[B]` → output, the rows' log-sum-exp `[B, T]`, which
    the kernels' backward starts from (else empty), and what else is kept for a backward, if `keeps` says that one may
    come: in plain torch the attention, of a kernel the remainder of the output (else empty)."""
    kept = _room_to_keep(z, values, lengths, energy, keeps)
    remainder = kept if kept.dim() > 1 else None
    if runs_on_triton("symmetric_attention", z, multiplies=True):
        from cdt_fast.kernels.symmetric_attention_packed import longest, packed_forward
        from cdt_fast.kernels.symmetric_attention_streaming import WIDEST, streaming_forward
        from cdt_fast.kernels.symmetric_attention_wide import wide_forward

        if z.shape[1] <= longest(z):
            return *packed_forward(z, z if values is None else values, lengths, scale, energy), kept
        forward = streaming_forward if _widest(z, values) <= WIDEST else wide_forward
        return *forward(z, values, lengths, scale, energy, remainder=remainder), kept
    with torch.autocast(z.device.type, enabled=False):
        output = forward_in_torch(z, values, lengths, scale, energy, kept)
    return output, z.new_empty(0, dtype=torch.promote_types(z.dtype, torch.float32)), kept


@_forward.register_fake
def _(
    z: Tensor, values: Tensor | None, lengths: Tensor | None, scale: float, energy: bool, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    output = torch.empty_like(z if values is None else values)
    log_sums = z.shape[:-1] if runs_on_triton("symmetric_attention", z, multiplies=True) else (0,)
    log_sum_exp = z.new_empty(log_sums, dtype=torch.promote_types(z.dtype, torch.float32))
    return output, log_sum_exp, _room_to_keep(z, values, lengths, energy, keeps)


@torch.library.custom_op("cdt_fast::symmetric_attention_backward", mutates_args=())
def _backward(
    z: Tensor,
    values: Tensor | None,
    lengths: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    kept: Tensor,
    grad_output: Tensor,
    scale: float,
    energy: bool,
    needs_z: bool,
    needs_values: bool,
) -> list[Tensor]:
    """The gradients that are needed, of `z` first; with `values` None all of it is in that of `z`."""
    # What runs forward runs backward: the backend may have been changed in between.
    if log_sum_exp.dim() > 1:
        from cdt_fast.kernels.symmetric_attention_packed import longest, packed_backward
        from cdt_fast.kernels.symmetric_attention_streaming import WIDEST, streaming_backward
        from cdt_fast.kernels.symmetric_attention_wide import wide_backward

        if z.shape[1] <= longest(z):
            found = packed_backward(z, values, grad_output, lengths, scale, energy, needs_z, needs_values)
        else:
            backward = streaming_backward if _widest(z, values) <= WIDEST else wide_backward
            inputs = (z, values, output, log_sum_exp, grad_output, lengths, scale, energy, needs_z, needs_values)
            found = backward(*inputs, remainder=kept if kept.dim() > 1 else None)
        return [gradient for gradient in found if gradient is not None]
    with torch.autocast(z.device.type, enabled=False):
        return backward_in_torch(z, values, lengths, output, kept, grad_output, scale, energy, needs_z, needs_values)


@_backward.register_fake
def _(z: Tensor, values: Tensor | None, *others: Any) -> list[Tensor]:
    needs_z, needs_values = others[-2:]
    found = [torch.empty_like(z)] if needs_z else []
    return [*found, torch.empty_like(values)] if needs_values and values is not None else found


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, values, lengths, ctx.scale, ctx.energy, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(z, values, lengths, *output)


def _differentiate(ctx: Any, grad_output: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 6
    needs_z, needs_values = ctx.needs_input_grad[:2]
    found = iter(_backward(*ctx.saved_tensors, grad_output.contiguous(), ctx.scale, ctx.energy, needs_z, needs_values))
    return next(found) if needs_z else None, next(found) if needs_values else None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
once_differentiable(_backward, "symmetric_attention")


def _widest(z: Tensor, values: Tensor | None) -> int:
    return max(z.shape[-1], 0 if values is None else values.shape[-1])


def _room_to_keep(z: Tensor, values: Tensor | None, lengths: Tensor | None, energy: bool, keeps: bool) -> Tensor:
    """Room for what the forward keeps, empty for nothing.

    Of a kernel: the remainder of the output, in 16 bits, of sequences that do not fit a tile. In plain torch: the
    attention `[B, T, T]`, on a CPU, if it fits `KEPT_BYTES` or is no larger than input and output.
    """
    output = z if values is None else values
    if runs_on_triton("symmetric_attention", z, multiplies=True):
        from cdt_fast.kernels.symmetric_attention_packed import longest

        keeps = keeps and z.element_size() == 2 and z.shape[1] > longest(z)
        return output.new_empty(output.shape if keeps else (0,))
    shape, dtype = (*z.shape[:-1], z.shape[1]), softmax_dtype(z, energy)
    of_tokens = z.shape[0] * z.shape[1] * (z.shape[-1] + output.shape[-1]) * z.element_size()
    keeps = keeps and z.device.type == "cpu" and math.prod(shape) * dtype.itemsize <= max(KEPT_BYTES, of_tokens)
    # Zeros where the sequences' lengths leave some of it unwritten.
    make = z.new_empty if lengths is None else z.new_zeros
    return make(shape if keeps else (0,), dtype=dtype)
