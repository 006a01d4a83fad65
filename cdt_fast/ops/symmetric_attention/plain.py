"""Symmetric attention in plain torch, a panel of scores at a time; on a CPU much padding is cut off, not masked."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cdt_fast.ops.shared.attention_scores import (
    attention_matrix,
    grad_of_attention,
    grad_of_both_factors,
    softmax_backward_,
)
from cdt_fast.ops.shared.checks import padding_mask, without_padding

# Plain torch forms this many bytes of scores at a time: memory then grows with T and not with T². A quarter of it would
# leave products of so few rows (256 of 4,096 tokens) that they take a fifth to a third longer.
PANEL_BYTES = 16 * 2**20
# On a GPU without a kernel many small products would leave it idle.
PANEL_BYTES_ON_GPU = 64 * 2**20
# On a CPU: what the two dozen calls of torch cost that the sequences of one length take by themselves, and what a score
# costs besides its products, both in numbers of z a score is multiplied with. In 16 bits the calls cost twice as much
# beside the products. Measured with 4 to 1,000 sequences of up to 20 to 1,024 tokens of width 64 to 1,024.
COST_OF_A_LENGTH = 3 * 2**20
COST_OF_A_SCORE = 200


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


def forward_in_torch(
    z: Tensor, values: Tensor | None, lengths: Tensor | None, scale: float, energy: bool, kept: Tensor
) -> Tensor:
    """The output; fills `kept` with the attention if it has room for it.

    Args:
        z: `[B, T, d]`, contiguous.
        values: `[B, T, k]`, contiguous, or None: `z`.
        lengths: `[B]`.
        scale, energy: as in `symmetric_attention`.
        kept: `[B, T, T]` or empty, in the dtype of the softmax. Where sequences are computed by their lengths,
            their attention lies in it as the backward reads it: length after length.
    """
    if lengths is None or not _pays_by_length(z, values, lengths):
        padding = padding_mask(lengths, z)
        z = without_padding(z, padding)
        values = z if values is None else without_padding(values, padding)
        output = torch.empty_like(values)
        _fill(z, values, padding, scale, energy, kept if kept.dim() > 1 else None, kept.dtype, output)
        return output
    output = torch.zeros_like(z if values is None else values)
    for length, which, room in _groups(lengths, z.shape[1], kept):
        part = _part(z, length, which)
        of_part = part if values is None else _part(values, length, which)
        if isinstance(which, int):
            _fill(part, of_part, None, scale, energy, room, kept.dtype, output[which : which + 1, :length])
            continue
        found = torch.empty_like(of_part)
        _fill(part, of_part, None, scale, energy, room, kept.dtype, found)
        output[:, :length].index_copy_(0, which, found)
    return output


def backward_in_torch(
    z: Tensor,
    values: Tensor | None,
    lengths: Tensor | None,
    output: Tensor,
    kept: Tensor,
    grad_output: Tensor,
    scale: float,
    energy: bool,
    needs_z: bool,
    needs_values: bool,
) -> list[Tensor]:
    """The gradients that are needed, of `z` first; with `values` None all of it is in that of `z`.

    Args:
        z, values, lengths, scale, energy: as in the forward.
        output: what the forward has returned.
        kept: what it has filled, or empty.
        grad_output: as the output.
        needs_z, needs_values: which gradients are needed.
    """
    options = (scale, energy, needs_z, needs_values)
    if lengths is None or not _pays_by_length(z, values, lengths):
        padding = padding_mask(lengths, z)
        z, grad_output = without_padding(z, padding), without_padding(grad_output, padding)
        values = None if values is None else without_padding(values, padding)
        room = kept if kept.dim() > 1 else None
        return _gradients(z, values, padding, output, room, kept.dtype, grad_output, *options)
    shapes = [z] * needs_z + ([values] if needs_values and values is not None else [])
    found = [torch.zeros_like(tensor) for tensor in shapes]
    for length, which, room in _groups(lengths, z.shape[1], kept):
        part, result, given = (_part(tensor, length, which) for tensor in (z, output, grad_output))
        of_values = None if values is None else _part(values, length, which)
        of_part = _gradients(part, of_values, None, result, room, kept.dtype, given, *options)
        for total, gradient in zip(found, of_part, strict=True):
            if isinstance(which, int):
                total[which, :length] = gradient[0]
            else:
                total[:, :length].index_copy_(0, which, gradient)
    return found


def _pays_by_length(z: Tensor, values: Tensor | None, lengths: Tensor) -> bool:
    """Whether what padding costs is more than the calls that it takes to leave it out; on a GPU that is not known."""
    if z.device.type != "cpu":
        return False
    tokens, width = z.shape[1:]
    cut = lengths.clamp(0, tokens).long()
    wasted_scores = int((tokens**2 - cut.square()).sum())
    of_a_score = COST_OF_A_SCORE + (width + (width if values is None else values.shape[2])) // 2
    of_a_length = COST_OF_A_LENGTH * (2 if z.element_size() < 4 else 1)
    return wasted_scores * of_a_score > len(set(cut.tolist())) * of_a_length


def _groups(lengths: Tensor, tokens: int, kept: Tensor) -> Iterator[tuple[int, int | Tensor, Tensor | None]]:
    """The sequences of each length: it, their numbers (or that of the only one), and the room for their attention.

    Padding then costs nothing, and needs no masks. The numbers are known without waiting only on a CPU.
    """
    of_length: dict[int, list[int]] = {}
    for number, length in enumerate(lengths.clamp(0, tokens).tolist()):
        of_length.setdefault(length, []).append(number)
    start, rooms = 0, kept.view(-1)
    for length, numbers in sorted(of_length.items()):
        if not length:
            continue
        size = len(numbers) * length**2
        room = rooms[start : start + size].view(-1, length, length) if kept.dim() > 1 else None
        yield length, numbers[0] if len(numbers) == 1 else torch.tensor(numbers), room
        start += size


def _part(tensor: Tensor, length: int, which: int | Tensor) -> Tensor:
    """The first tokens of some sequences, `[sequences, length, width]`."""
    if isinstance(which, int):
        return tensor[which : which + 1, :length]
    return tensor[:, :length].index_select(0, which)


def _fill(
    z: Tensor,
    values: Tensor,
    padding: Tensor | None,
    scale: float,
    energy: bool,
    kept: Tensor | None,
    dtype: torch.dtype,
    output: Tensor,
) -> None:
    """Write the output, and the attention where there is room for it; scores and softmax are in `dtype`."""
    for batch, rows in _panels(z, dtype):
        room = None if kept is None else _panel(kept, batch, rows)
        masked = None if padding is None else padding[batch]
        attention = attention_matrix(z[batch], scale, masked, dtype, rows=rows, energy=energy, out=room)
        torch.bmm(attention.to(values.dtype), values[batch], out=_panel(output, batch, rows))


def _gradients(
    z: Tensor,
    values: Tensor | None,
    padding: Tensor | None,
    output: Tensor,
    kept: Tensor | None,
    dtype: torch.dtype,
    grad_output: Tensor,
    scale: float,
    energy: bool,
    needs_z: bool,
    needs_values: bool,
) -> list[Tensor]:
    """A panel at a time: `dZ_r += β dS_r z`, `dZ += β dS_rᵀ z_r`, `dV += A_rᵀ dO_r`; with the scores five products in
    all, where the first two are one."""
    tied, values = values is None, z if values is None else values
    # Sums over the panels of a sequence in at least float32; where a panel holds whole sequences there is no sum.
    whole = all(rows.stop >= z.shape[1] for _, rows in _panels(z, dtype))
    sums = z.dtype if whole else torch.promote_types(z.dtype, torch.float32)
    make = torch.empty_like if whole else torch.zeros_like
    grad_z = make(z, dtype=sums, memory_format=torch.contiguous_format) if needs_z else None
    grad_values = None
    if needs_values and not tied:
        grad_values = make(values, dtype=sums, memory_format=torch.contiguous_format)
    # `bmm` and not `@`, which would copy a transposed factor in 16 bits first: at four times the cost of the product.
    for batch, rows in _panels(z, dtype):
        here, given = z[batch], _panel(grad_output, batch, rows)
        if kept is not None:
            attention = _panel(kept, batch, rows)
        else:
            masked = None if padding is None else padding[batch]
            attention = attention_matrix(here, scale, masked, dtype, rows=rows, energy=energy)
        mixed = attention.to(values.dtype).mT
        if grad_z is not None:
            grad_attention = grad_of_attention(given, values[batch], _panel(output, batch, rows))
            grad_scores = softmax_backward_(grad_attention, attention)
            of_here = grad_z[batch]
            if whole:
                grad_of_both_factors(grad_scores, here, scale, out=of_here)
                if tied:
                    of_here.baddbmm_(mixed, given)
            else:
                narrow = grad_scores.to(z.dtype)
                grad_z[batch, rows].add_(torch.bmm(narrow, here), alpha=scale)
                of_here.add_(torch.bmm(narrow.mT, here[:, rows]), alpha=scale)
                if tied:
                    of_here += torch.bmm(mixed, given)
            if energy:
                of_here -= (scale * grad_scores.sum(-2).unsqueeze(-1) * here).to(sums)
        if grad_values is not None:
            if whole:
                torch.bmm(mixed, given, out=grad_values[batch])
            else:
                grad_values[batch] += torch.bmm(mixed, given)
    return [gradient.to(z.dtype) for gradient in (grad_z, grad_values) if gradient is not None]
