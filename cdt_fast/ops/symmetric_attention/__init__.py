"""Symmetric softmax attention: one projection serves queries, keys and, unless given, values (docs/maths.md §5)."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import Backend, SymmetricAttentionArguments
from cdt_fast.kernels.blocks import LONGEST, WIDEST
from cdt_fast.ops.shared.backend import choose_backend
from cdt_fast.ops.shared.checks import (
    check_factor,
    check_flag,
    check_lengths,
    check_shape,
    check_tensor,
    check_together,
    compute_dtype,
    length_of_each,
    sequences,
)
from cdt_fast.ops.symmetric_attention.operator import symmetric_attention_forward
from cdt_fast.ops.symmetric_attention.reference import symmetric_attention_reference

__all__ = ["symmetric_attention", "symmetric_attention_reference"]


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
    if values is z:
        values = None  # one gradient for the tied projection, not two to be added
    dtype = compute_dtype(z)
    tokens = sequences(z, dtype)
    attention = SymmetricAttentionArguments(
        z=tokens,
        values=None if values is None else sequences(values, dtype),
        lengths=length_of_each(lengths),
        scale=check_factor("scale", scale, dtype=dtype),
        energy=check_flag("energy", energy),
        keeps=torch.is_grad_enabled() and (z.requires_grad or (values is not None and values.requires_grad)),
        backend=_backend(tokens, values),
    )
    output, *_ = symmetric_attention_forward(attention)
    return output.view(*z.shape[:-1], output.shape[-1])


def _backend(z: Tensor, values: Tensor | None) -> Backend:
    """The kernels, where they run and each product is made once.

    No tile holds the rows of a long sequence of wide tokens. A kernel forms their scores anew for each chunk of the
    result, in 2.8 to 5.2 times the FLOP: the library's products take its place, a panel of scores at a time.
    """
    chosen = choose_backend("symmetric_attention", z, multiplies=True)
    fits = z.shape[1] <= LONGEST or max(z.shape[2], 0 if values is None else values.shape[-1]) <= WIDEST
    return chosen if fits else "torch"
