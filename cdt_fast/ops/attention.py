"""Symmetric softmax attention: one projection serves queries, keys and, unless given, values (MATH: section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cdt_fast.ops.backend import runs_on_triton
from cdt_fast.ops.checks import (
    check_factor,
    check_lengths,
    check_shape,
    check_tensor,
    check_together,
    compute_dtype,
    padding_mask,
    sequences,
    without_padding,
)
from cdt_fast.ops.registration import differentiable_once

# Plain torch forms this many bytes of scores at a time: the passes over them then stay in a processor's caches, and
# memory grows with T and not with T².
PANEL_BYTES = 4 * 2**20
# On a GPU without a kernel many small products would leave it idle.
PANEL_BYTES_ON_GPU = 64 * 2**20


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
        None if lengths is None else lengths.reshape(-1),
        scale,
        bool(energy),
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
    z: Tensor, values: Tensor | None, lengths: Tensor | None, scale: float, energy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous `z` `[B, T, d]`, `values` `[B, T, k]`, `lengths` `[B]` → output, the rows' log-sum-exp `[B, T]`, which
    the kernels' backward starts from, and the attention `[B, T, T]` where plain torch keeps it (else empty)."""
    attention = z.new_empty(_kept_shape(z, values), dtype=torch.promote_types(z.dtype, torch.float32))
    if runs_on_triton("symmetric_attention", z):
        from cdt_fast.kernels.packed_attention import longest, packed_forward
        from cdt_fast.kernels.streaming_attention import WIDEST, streaming_forward
        from cdt_fast.kernels.wide_attention import wide_forward

        if z.shape[1] <= longest(z):
            return *packed_forward(z, z if values is None else values, lengths, scale, energy), attention
        forward = streaming_forward if _widest(z, values) <= WIDEST else wide_forward
        return *forward(z, values, lengths, scale, energy), attention
    with torch.autocast(z.device.type, enabled=False):
        return *_forward_in_torch(z, values, lengths, scale, energy, attention), attention


@_forward.register_fake
def _(z: Tensor, values: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    output = torch.empty_like(z if values is None else values)
    wide = torch.promote_types(z.dtype, torch.float32)
    return output, z.new_empty(z.shape[:-1], dtype=wide), z.new_empty(_kept_shape(z, values), dtype=wide)


@torch.library.custom_op("cdt_fast::symmetric_attention_backward", mutates_args=())
def _backward(
    z: Tensor,
    values: Tensor | None,
    lengths: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    attention: Tensor,
    grad_output: Tensor,
    scale: float,
    energy: bool,
    needs_z: bool,
    needs_values: bool,
) -> list[Tensor]:
    """The gradients that are needed, of `z` first; with `values` None all of it is in that of `z`."""
    if runs_on_triton("symmetric_attention", z):
        from cdt_fast.kernels.packed_attention import longest, packed_backward
        from cdt_fast.kernels.streaming_attention import WIDEST, streaming_backward
        from cdt_fast.kernels.wide_attention import wide_backward

        if z.shape[1] <= longest(z):
            found = packed_backward(z, values, grad_output, lengths, scale, energy, needs_z, needs_values)
        else:
            backward = streaming_backward if _widest(z, values) <= WIDEST else wide_backward
            found = backward(z, values, output, log_sum_exp, grad_output, lengths, scale, energy, needs_z, needs_values)
        return [gradient for gradient in found if gradient is not None]
    with torch.autocast(z.device.type, enabled=False):
        return _backward_in_torch(z, values, lengths, attention, grad_output, scale, energy, needs_z, needs_values)


@_backward.register_fake
def _(z: Tensor, values: Tensor | None, *others: Any) -> list[Tensor]:
    needs_z, needs_values = others[-2:]
    found = [torch.empty_like(z)] if needs_z else []
    return [*found, torch.empty_like(values)] if needs_values and values is not None else found


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, values, lengths, ctx.scale, ctx.energy = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(z, values, lengths, *output)


def _differentiate(ctx: Any, grad_output: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 5
    needs_z, needs_values = ctx.needs_input_grad[:2]
    found = iter(_backward(*ctx.saved_tensors, grad_output.contiguous(), ctx.scale, ctx.energy, needs_z, needs_values))
    return next(found) if needs_z else None, next(found) if needs_values else None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
differentiable_once(_backward, "symmetric_attention")


def _widest(z: Tensor, values: Tensor | None) -> int:
    return max(z.shape[-1], 0 if values is None else values.shape[-1])


def _kept_shape(z: Tensor, values: Tensor | None) -> tuple[int, ...]:
    """`[B, T, T]` where the attention is kept for the backward: on a CPU, if it is no larger than input and output."""
    width = z.shape[-1] + (z if values is None else values).shape[-1]
    keeps = z.device.type == "cpu" and z.shape[1] * max(4, z.element_size()) <= width * z.element_size()
    return (*z.shape[:-1], z.shape[1]) if keeps else (0,)


def score_bytes(z: Tensor) -> int:
    """Bytes of all scores of `z` `[B, T, d]`, in at least float32."""
    return z.shape[0] * z.shape[1] ** 2 * max(4, z.element_size())


def _panels(z: Tensor) -> Iterator[tuple[slice, slice]]:
    """Sequences, and rows of them, whose scores fit a panel: several whole sequences, or rows of a single one."""
    batch, tokens = z.shape[:2]
    of_a_row = max(1, tokens * max(4, z.element_size()))
    most = PANEL_BYTES if z.device.type == "cpu" else PANEL_BYTES_ON_GPU
    rows = max(1, min(tokens, most // of_a_row))
    sequences_a_panel = max(1, most // (of_a_row * tokens)) if rows == tokens else 1
    for first in range(0, batch, sequences_a_panel):
        for start in range(0, tokens, rows):
            yield slice(first, first + sequences_a_panel), slice(start, start + rows)


def _scores(z: Tensor, rows: slice, scale: float, padding: Tensor | None, energy: bool) -> Tensor:
    """`scale · z zᵀ` of some rows, `[..., rows, T]`, in at least float32; −∞ in the columns of padding.

    bfloat16 scores would be off by up to a whole unit at the norms of image patches (‖z‖² around 100), hence float32.
    """
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    scores = (z[..., rows, :] * scale) @ z.mT
    if energy:
        scores -= (0.5 * scale) * z.square().sum(-1).unsqueeze(-2)
    return scores if padding is None else scores.masked_fill_(padding.unsqueeze(-2), float("-inf"))


def _softmax(scores: Tensor, rows: slice, padding: Tensor | None) -> Tensor:
    attention = torch.softmax(scores, -1)
    return attention if padding is None else attention.masked_fill_(padding[..., rows].unsqueeze(-1), 0.0)


def attention_matrix(z: Tensor, scale: float, padding: Tensor | None) -> Tensor:
    """`softmax_rows(scale · z zᵀ)`, `[..., T, T]`, in at least float32; zero in the rows and columns of padding."""
    everything = slice(None)
    return _softmax(_scores(z, everything, scale, padding, False), everything, padding)


def softmax_backward(attention: Tensor, grad_attention: Tensor) -> Tensor:
    """The gradient of the scores, from that of `softmax_rows(scores)`: `A ∘ (dA − rowsum(A ∘ dA))`."""
    return torch.ops.aten._softmax_backward_data(grad_attention.to(attention.dtype), attention, -1, attention.dtype)


def attention_matrix_backward(z: Tensor, attention: Tensor, grad_attention: Tensor, scale: float) -> Tensor:
    """Gradient with respect to `z` `[..., T, d]` of `attention_matrix`: `β (dS + dSᵀ) z` with the softmax's `dS`."""
    grad_scores = softmax_backward(attention, grad_attention)
    return (grad_scores + grad_scores.mT).mul_(scale).to(z.dtype) @ z


def _forward_in_torch(
    z: Tensor, values: Tensor | None, lengths: Tensor | None, scale: float, energy: bool, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; fills `kept` with the attention if it has room for it."""
    padding = padding_mask(lengths, z)
    z = without_padding(z, padding)
    values = z if values is None else without_padding(values, padding)
    output = torch.empty_like(values)
    z = z.to(kept.dtype)
    log_sum_exp = z.new_empty(z.shape[:-1])
    for batch, rows in _panels(z):
        masked = None if padding is None else padding[batch]
        scores = _scores(z[batch], rows, scale, masked, energy)
        attention = torch.softmax(scores, -1)
        # Of the largest score s and its share a of the row, s − log a; a is at least 1 / T.
        torch.sub(scores.amax(-1), attention.amax(-1).log_(), out=log_sum_exp[batch, rows])
        if masked is not None:
            attention.masked_fill_(masked[:, rows].unsqueeze(-1), 0.0)
        if kept.dim() > 1:
            kept[batch, rows] = attention
        torch.bmm(attention.to(values.dtype), values[batch], out=output[batch, rows])
    return output, log_sum_exp if padding is None else log_sum_exp.masked_fill_(padding, float("inf"))


def _backward_in_torch(
    z: Tensor,
    values: Tensor | None,
    lengths: Tensor | None,
    kept: Tensor,
    grad_output: Tensor,
    scale: float,
    energy: bool,
    needs_z: bool,
    needs_values: bool,
) -> list[Tensor]:
    """A panel at a time: `dZ_r += β dS_r z`, `dZ += β dS_rᵀ z_r`, `dV += A_rᵀ dO_r`; five products in all."""
    padding = padding_mask(lengths, z)
    z, grad_output = without_padding(z, padding), without_padding(grad_output, padding)
    tied, values = values is None, z if values is None else without_padding(values, padding)
    wide = z if kept.dim() > 1 else z.to(kept.dtype)
    # Sums over the panels of a sequence in at least float32; where a panel holds whole sequences there is no sum.
    whole = all(rows.stop >= z.shape[1] for _, rows in _panels(z))
    dtype = z.dtype if whole else kept.dtype
    grad_z = torch.zeros_like(z, dtype=dtype) if needs_z else None
    grad_values = torch.zeros_like(values, dtype=dtype) if needs_values and not tied else None
    of_all_values = grad_z if tied else grad_values
    for batch, rows in _panels(z):
        here, given = z[batch], grad_output[batch, rows]
        if kept.dim() > 1:
            attention = kept[batch, rows]
        else:
            masked = None if padding is None else padding[batch]
            attention = _softmax(_scores(wide[batch], rows, scale, masked, energy), rows, masked)
        if grad_z is not None:
            grad_scores = softmax_backward(attention, given @ values[batch].mT)
            if energy:
                grad_z[batch] -= (scale * grad_scores.sum(-2).unsqueeze(-1) * here).to(dtype)
            if whole:
                grad_z[batch].baddbmm_((grad_scores + grad_scores.mT).to(z.dtype), here, alpha=scale)
            else:
                grad_scores = grad_scores.to(z.dtype)
                grad_z[batch, rows].add_(grad_scores @ here, alpha=scale)
                grad_z[batch].add_(grad_scores.mT @ here[:, rows], alpha=scale)
        if of_all_values is not None:
            mixed = attention.to(values.dtype).mT
            if whole:
                of_all_values[batch].baddbmm_(mixed, given)
            else:
                of_all_values[batch] += mixed @ given
    return [gradient.to(z.dtype) for gradient in (grad_z, grad_values) if gradient is not None]
