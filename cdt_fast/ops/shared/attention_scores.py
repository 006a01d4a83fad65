"""Scores and softmax of symmetric attention in plain torch, and the gradient of both."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.ops.shared.products import wide_product

# Tokens of fewer bytes are multiplied twice faster than a matrix and its transpose are added.
BYTES_OF_A_SUM = 256


def attention_matrix(
    z: Tensor,
    scale: float,
    padding: Tensor | None,
    *,
    rows: slice = slice(None),
    energy: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`softmax_rows(scale · z zᵀ)`, `[B, rows, T]`, in `out` if it is given; zero in the rows and columns of padding.

    `z` is `[B, T, d]`, finite at the padding, `[B, T]`; scores and softmax are in at least float32. With `energy` the
    scores are `scale · (z_iᵀ z_j − ½‖z_j‖²)`.
    """
    if out is None:
        wide = torch.promote_types(z.dtype, torch.float32)
        out = z.new_empty((z.shape[0], z[:, rows].shape[1], z.shape[1]), dtype=wide)
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
    if padding is not None:
        out.masked_fill_(padding.unsqueeze(-2), float("-inf"))


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
