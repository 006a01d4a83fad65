"""Scores and softmax of symmetric attention in plain torch, and the gradient of both."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.ops.shared.products import cpu_has_bf16_products, wide_product

# A score this far above its row's reference is rounded, in bfloat16, by up to 1/128.
FAR = 4.0
# Of fewer tokens the scores cost little in float32 too.
SHORTEST_IN_BFLOAT16 = 96
# Tokens of fewer bytes are multiplied twice faster than a matrix and its transpose are added.
BYTES_OF_A_SUM = 256


def softmax_dtype(z: Tensor, energy: bool = False) -> torch.dtype:
    """Of scores and softmax of `z` `[B, T, d]`: at least float32; bfloat16 where the processor has products of it, and
    the scores have no terms of their columns."""
    if z.dtype == torch.bfloat16 and z.device.type == "cpu" and z.shape[1] >= SHORTEST_IN_BFLOAT16 and not energy:
        return torch.bfloat16 if cpu_has_bf16_products() else torch.float32
    return torch.promote_types(z.dtype, torch.float32)


def attention_matrix(
    z: Tensor,
    scale: float,
    padding: Tensor | None,
    dtype: torch.dtype,
    *,
    rows: slice = slice(None),
    energy: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`softmax_rows(scale · z zᵀ)`, `[B, rows, T]`, in `out` if it is given; zero in the rows and columns of padding.

    `z` is `[B, T, d]`, finite at the padding, `[B, T]`; the dtype is `softmax_dtype(z, energy)`. With `energy` the
    scores are `scale · (z_iᵀ z_j − ½‖z_j‖²)`.
    """
    out = z.new_empty((z.shape[0], z[:, rows].shape[1], z.shape[1]), dtype=dtype) if out is None else out
    if dtype == torch.bfloat16:
        _relative_scores_into(out, z, scale, padding, rows)
    else:
        _scores_into(out, z, scale, padding, rows, energy)
    # Over the scores: what is read again must not leave the caches for memory that is written once.
    attention = torch.softmax(out, -1, out=out)
    return attention if padding is None else attention.masked_fill_(padding[..., rows].unsqueeze(-1), 0.0)


def _scores_into(out: Tensor, z: Tensor, scale: float, padding: Tensor | None, rows: slice, energy: bool) -> None:
    if z.device.type == "cpu":
        z = z.to(out.dtype)
    # A factor of the tokens costs less than one of the scores; but 16 bits would round it.
    early = scale if z.dtype == out.dtype else 1.0
    some = z[:, rows]
    wide_product(some if early == 1.0 else some * early, z.mT, out.dtype, out=out)
    if scale != early:
        out *= scale
    if energy:
        out -= (0.5 * scale) * z.to(out.dtype).square().sum(-1).unsqueeze(-2)
    _mask_(out, padding)


def _relative_scores_into(out: Tensor, z: Tensor, scale: float, padding: Tensor | None, rows: slice) -> None:
    """The scores less about the largest of their row, which to a softmax are the same.

    The scores of image patches (‖z‖² around 100) bfloat16 would round by up to a whole unit. But a product of bfloat16
    is summed in float32, from a number that may be given, and rounded at the end. From −‖z_i‖² on, what is rounded is
    `z_iᵀ z_j − ‖z_i‖²`, and by least where the attention is largest.
    """
    some = z[:, rows]
    reference = (some * some).sum(-1, keepdim=True).mul_(scale)
    torch.baddbmm(reference, some, z.mT, beta=-1, alpha=scale, out=out)
    _mask_(out, padding)
    highest = out.amax(-1, keepdim=True)
    far = highest > FAR  # above that of a token with itself is a score with a token of larger norm
    if far.any():
        reference += highest.where(far, 0.0)  # of those rows alone: no row depends on what else is in the batch
        torch.baddbmm(reference, some, z.mT, beta=-1, alpha=scale, out=out)
        _mask_(out, padding)


def _mask_(scores: Tensor, padding: Tensor | None) -> None:
    if padding is not None:
        scores.masked_fill_(padding.unsqueeze(-2), float("-inf"))


def grad_of_attention(given: Tensor, values: Tensor, output: Tensor, dtype: torch.dtype) -> Tensor:
    """`dO Vᵀ`, `[B, rows, T]`, less any number a row, to which `softmax_backward_` is blind: from dO, V and O.

    In bfloat16 on a CPU the number is about `dOᵀ O`, the mean that the softmax's gradient subtracts: the product would
    lose in rounding what remains of it where the values of a sequence are much alike.
    """
    if given.dtype != torch.bfloat16 or given.device.type != "cpu":
        return wide_product(given, values.mT, dtype)
    mean = (given * output).sum(-1, keepdim=True)
    return torch.baddbmm(mean, given, values.mT, beta=-1)


def softmax_backward_(grad_attention: Tensor, attention: Tensor) -> Tensor:
    """The gradient of the scores, from that of `softmax_rows(scores)`: `A ∘ (dA − rowsum(A ∘ dA))`.

    In the dtype of the attention; where that is `grad_attention`'s, it is written over it.
    """
    found = grad_attention.to(attention.dtype)
    return torch.ops.aten._softmax_backward_data.out(found, attention, -1, attention.dtype, grad_input=found)


def grad_of_both_factors(grad_scores: Tensor, z: Tensor, scale: float, out: Tensor) -> None:
    """`β (dS + dSᵀ) z`, as one product where that costs more than the sum of a matrix and its transpose."""
    alpha = scale or 1.0  # torch's product of bfloat16 returns before it writes where alpha is zero
    if z.shape[-1] * z.element_size() >= BYTES_OF_A_SUM:
        both = (grad_scores + grad_scores.mT).to(z.dtype)
        torch.baddbmm(out, both, z, beta=0, alpha=alpha, out=out)
    else:
        narrow = grad_scores.to(z.dtype)
        torch.baddbmm(out, narrow, z, beta=0, alpha=alpha, out=out)
        out.baddbmm_(narrow.mT, z, alpha=alpha)
    if not scale:
        out.mul_(scale)
