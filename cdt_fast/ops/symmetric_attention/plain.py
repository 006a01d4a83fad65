"""Symmetric attention in plain torch, a panel of scores at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import SymmetricAttentionArguments, SymmetricAttentionBackwardArguments
from cdt_fast.ops.shared.attention_scores import (
    attention_matrix,
    grad_of_attention,
    grad_of_both_factors,
    softmax_backward_,
)
from cdt_fast.ops.shared.checks import clear_padding_, padding_mask, without_padding

# On a CPU the attention of a call is kept for its backward if it has no more bytes: computing it again takes longer.
KEPT_BYTES = 64 * 2**20
# Plain torch forms this many bytes of scores at a time: memory then grows with T and not with T². A quarter of it would
# leave products of so few rows (256 of 4,096 tokens) that they take a fifth to a third longer.
PANEL_BYTES = 16 * 2**20
# On a GPU without a kernel many small products would leave it idle.
PANEL_BYTES_ON_GPU = 64 * 2**20


def _panels(z: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, slice]]:
    """Sequences, and rows of them, whose scores fit a panel: several whole sequences, or rows of a single one."""
    batch, tokens = z.shape[:2]
    of_a_row = max(1, tokens * dtype.itemsize)
    most = PANEL_BYTES if z.device.type == "cpu" else PANEL_BYTES_ON_GPU
    rows = max(1, min(tokens, most // of_a_row))
    sequences_a_panel = max(1, most // (of_a_row * tokens)) if rows == tokens else 1
    for first in range(0, batch, sequences_a_panel):
        for start in range(0, tokens, rows):
            yield slice(first, first + sequences_a_panel), slice(start, start + rows)


def _panel(tensor: Tensor, batch: slice, rows: slice) -> Tensor:
    """Rows of some sequences. Those of a single one have the strides of a tensor of their own: torch copies a factor
    whose batches lie farther apart than they are large, also where there is only one."""
    if tensor[batch].shape[0] == 1:
        return tensor[batch.start, rows].unsqueeze(0)
    return tensor[batch, rows]


def room_to_keep(attention: SymmetricAttentionArguments) -> Tensor:
    """Room for the attention `[B, T, T]` where a backward may come, on a CPU, and it fits `KEPT_BYTES` or is no larger
    than input and output; else empty."""
    z, values = attention.z, attention.values
    shape, dtype = (*z.shape[:-1], z.shape[1]), torch.promote_types(z.dtype, torch.float32)
    of_tokens = z.shape[0] * z.shape[1] * (z.shape[-1] + (z if values is None else values).shape[-1]) * z.element_size()
    fits = math.prod(shape) * dtype.itemsize <= max(KEPT_BYTES, of_tokens)
    return z.new_empty(shape if attention.keeps and z.device.type == "cpu" and fits else (0,), dtype=dtype)


def forward_in_torch(attention: SymmetricAttentionArguments, kept: Tensor) -> Tensor:
    """The output; fills `kept` with the attention if it has room for it."""
    padding = padding_mask(attention.lengths, attention.z)
    output = torch.empty_like(attention.z if attention.values is None else attention.values)
    attention = _without_padding(attention, padding)
    z, values = attention.z, attention.z if attention.values is None else attention.values
    for batch, rows in _panels(z, kept.dtype):
        weights = attention_matrix(
            z[batch],
            attention.scale,
            None if padding is None else padding[batch],
            rows=rows,
            energy=attention.energy,
            out=_panel(kept, batch, rows) if kept.dim() > 1 else None,
        )
        torch.bmm(weights.to(values.dtype), values[batch], out=_panel(output, batch, rows))
    return output


def backward_in_torch(attention: SymmetricAttentionBackwardArguments) -> list[Tensor]:
    """The gradients that are needed, of `z` first; with `values` None all of it is in that of `z`."""
    padding = padding_mask(attention.lengths, attention.z)
    grad_output = without_padding(attention.grad_output, padding)
    gradients = _gradients(replace(_without_padding(attention, padding), grad_output=grad_output), padding)
    return [clear_padding_(gradient, padding) for gradient in gradients]


Attention = TypeVar("Attention", bound=SymmetricAttentionArguments)


def _without_padding(attention: Attention, padding: Tensor | None) -> Attention:
    if padding is None:
        return attention
    values = None if attention.values is None else without_padding(attention.values, padding)
    return replace(attention, z=without_padding(attention.z, padding), values=values)


def _gradients(attention: SymmetricAttentionBackwardArguments, padding: Tensor | None) -> list[Tensor]:
    """A panel at a time: `dZ_r += β dS_r z`, `dZ += β dS_rᵀ z_r`, `dV += A_rᵀ dO_r`; with the scores five products in
    all, where the first two are one."""
    z, kept, scale, energy, dtype = attention.z, attention.kept, attention.scale, attention.energy, attention.kept.dtype
    tied, values = attention.values is None, z if attention.values is None else attention.values
    # Sums over the panels of a sequence in at least float32; where a panel holds whole sequences there is no sum.
    whole = all(rows.stop >= z.shape[1] for _, rows in _panels(z, dtype))
    sums = z.dtype if whole else torch.promote_types(z.dtype, torch.float32)
    make = torch.empty_like if whole else torch.zeros_like
    grad_z = make(z, dtype=sums, memory_format=torch.contiguous_format) if attention.needs_z else None
    grad_values = None
    if attention.needs_values and not tied:
        grad_values = make(values, dtype=sums, memory_format=torch.contiguous_format)
    # `bmm` and not `@`, which would copy a transposed factor in 16 bits first: at four times the cost of the product.
    for batch, rows in _panels(z, dtype):
        here, upstream = z[batch], _panel(attention.grad_output, batch, rows)
        if kept.dim() > 1:
            weights = _panel(kept, batch, rows)
        else:
            masked = None if padding is None else padding[batch]
            weights = attention_matrix(here, scale, masked, rows=rows, energy=energy)
        mixed = weights.to(values.dtype).mT
        if grad_z is not None:
            output = _panel(attention.output, batch, rows)
            grad_weights = grad_of_attention(upstream, values[batch], output, dtype)
            grad_scores = softmax_backward_(grad_weights, weights)
            of_here = grad_z[batch]
            if whole:
                grad_of_both_factors(grad_scores, here, scale, out=of_here)
                if tied:
                    of_here.baddbmm_(mixed, upstream)
            else:
                narrow = grad_scores.to(z.dtype)
                grad_z[batch, rows].add_(torch.bmm(narrow, here), alpha=scale)
                of_here.add_(torch.bmm(narrow.mT, here[:, rows]), alpha=scale)
                if tied:
                    of_here += torch.bmm(mixed, upstream)
            if energy:
                of_here -= (scale * grad_scores.sum(-2).unsqueeze(-1) * here).to(sums)
        if grad_values is not None:
            if whole:
                torch.bmm(mixed, upstream, out=grad_values[batch])
            else:
                grad_values[batch] += torch.bmm(mixed, upstream)
    return [gradient.to(z.dtype) for gradient in (grad_z, grad_values) if gradient is not None]
