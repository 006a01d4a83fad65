"""Symmetric softmax attention: one projection serves queries, keys and, unless given, values (MATH: section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdt_fast.ops.checks import (
    check_factor,
    check_shape,
    check_tensor,
    check_together,
    compute_dtype,
    padding_mask,
    without_padding,
)


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
    scale = check_factor("scale", scale)
    padding = padding_mask(lengths, z)
    dtype = compute_dtype(z)
    z = without_padding(z, padding).to(dtype)
    values = z if values is None else without_padding(values, padding).to(dtype)
    output: Tensor = _SymmetricAttention.apply(z, values, scale, padding, energy)  # type: ignore[assignment]
    return output


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


def attention_matrix(z: Tensor, scale: float, padding: Tensor | None, energy: bool = False) -> Tensor:
    """`softmax_rows(scale · z zᵀ)`, `[..., T, T]`, in at least float32; zero in the rows and columns of padding.

    bfloat16 scores would be off by up to a whole unit at the norms of image patches (‖z‖² around 100), hence float32.
    """
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    with torch.autocast(z.device.type, enabled=False):
        scores = z @ z.mT
    if energy:
        scores -= 0.5 * z.square().sum(-1).unsqueeze(-2)
    scores *= scale
    if padding is None:
        return torch.softmax(scores, -1)
    scores.masked_fill_(padding.unsqueeze(-2), float("-inf"))
    return torch.softmax(scores, -1).masked_fill_(padding.unsqueeze(-1), 0.0)


def attention_matrix_backward(
    z: Tensor, attention: Tensor, grad_attention: Tensor, scale: float, energy: bool = False
) -> Tensor:
    """Gradient with respect to `z` `[..., T, d]` of `attention_matrix`: `β (dS + dSᵀ) z` with the softmax's `dS`."""
    grad_scores = attention * (grad_attention - (attention * grad_attention).sum(-1, keepdim=True))
    symmetric = (grad_scores + grad_scores.mT).mul_(scale)
    if energy:
        symmetric.diagonal(dim1=-2, dim2=-1).sub_(grad_scores.sum(-2), alpha=scale)
    return _multiply(symmetric.to(z.dtype), z)


class _SymmetricAttention(torch.autograd.Function):
    """Saves the projection and the values alone; the attention matrix is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, values: Tensor, scale: float, padding: Tensor | None, energy: bool) -> Tensor:
        ctx.save_for_backward(z, values, padding)
        ctx.scale, ctx.energy = scale, energy
        return _multiply(attention_matrix(z, scale, padding, energy), values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        z, values, padding = ctx.saved_tensors
        attention = attention_matrix(z, ctx.scale, padding, ctx.energy)
        grad_z = grad_values = None
        if ctx.needs_input_grad[0]:
            grad_attention = _multiply(grad_output, values.mT).to(attention.dtype)
            grad_z = attention_matrix_backward(z, attention, grad_attention, ctx.scale, ctx.energy)
        if ctx.needs_input_grad[1]:
            grad_values = _multiply(attention.mT, grad_output)
        return grad_z, grad_values, None, None, None


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in the dtype of the narrower of the two, whatever autocast says."""
    dtype = left.dtype if left.dtype.itemsize < right.dtype.itemsize else right.dtype
    with torch.autocast(left.device.type, enabled=False):
        return left.to(dtype) @ right.to(dtype)
