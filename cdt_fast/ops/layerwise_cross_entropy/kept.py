"""The layerwise cross-entropy where the gradients of the logits are kept until the backward: one product, then two.

No depth's weight has to be known before: it joins in as a factor of the two products of the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdt_fast.ops.layerwise_cross_entropy.chunk_pass import joined, rows_of
from cdt_fast.ops.layerwise_cross_entropy.chunks import CHUNK_BYTES, Head, Piece, Rows
from cdt_fast.ops.layerwise_cross_entropy.gradients import HeadGradients, HiddenGradients
from cdt_fast.ops.layerwise_cross_entropy.sweep import TorchSweep
from cdt_fast.ops.shared.products import product

# Depths of no more rows than this share their products: each of their own would take longer to call than to compute.
FEW_ROWS = 128


def grouped(counts: Sequence[int], bytes_of_row: int) -> list[range]:
    """The depths, as many side by side as fit a chunk's budget of bytes; the logits of a group lie in one tensor.

    Args:
        counts: the rows of each depth.
        bytes_of_row: of the logits of one row.
    """
    groups: list[range] = []
    bytes_of_group = 0
    for depth, count in enumerate(counts):
        more = count * bytes_of_row
        if groups and bytes_of_group + more <= CHUNK_BYTES["cpu"]:
            groups[-1] = range(groups[-1].start, depth + 1)
            bytes_of_group += more
        else:
            groups.append(range(depth, depth + 1))
            bytes_of_group = more
    return groups


def _share_products(counts: Sequence[int], vocabulary: int) -> bool:
    """Whether to copy the states of a group into one tensor costs less than a product a depth does, which reads the
    head and, for its gradient, reads and writes as much again."""
    return len(counts) > 1 and (max(counts) <= FEW_ROWS or max(counts) < vocabulary)


def keep_logits(
    hidden: Sequence[Tensor], head: Head, rows: Sequence[Rows], groups: Sequence[range], sweep: TorchSweep
) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of the depths of all groups, each summed over its rows, and the gradients of each group's logits."""
    sums: list[Tensor] = []
    kept: list[Tensor] = []
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    for group in groups:
        counts = [rows[depth].targets.shape[0] for depth in group]
        logits = _logits(head, [rows_of(hidden[depth], rows[depth]) for depth in group], counts)
        losses = logits.new_empty(logits.shape[0], dtype=wide)
        targets = joined([rows[depth].targets for depth in group])
        sweep(head, logits, targets, losses, None, None, unscaled=True)
        kept.append(logits)
        if len(set(counts)) == 1:
            sums.append(losses.view(len(counts), counts[0]).sum(1))
        else:
            sums.append(torch.stack([part.sum() for part in losses.split(counts)]))
    return sums, kept


def add_kept(
    hidden: Sequence[Tensor],
    head: Head,
    rows: Sequence[Rows],
    groups: Sequence[range],
    kept: Sequence[Tensor],
    factors: Tensor,
    wants_hidden: Sequence[bool],
    of_head: HeadGradients,
) -> list[Tensor | None]:
    """The gradients of the hidden states of the groups' depths, None where they are not wanted; adds to the head's.

    Args:
        kept: from `keep_logits`, each with room to spare.
        factors: `[depths]` on the CPU, what the gradients of each depth are multiplied by. One that is zero gives
            zeros even where the depth's gradients are NaN.
    """
    numbers = factors.tolist()
    weight = head.weight
    gradients = HiddenGradients(hidden, rows, wants_hidden, [number != 0 for number in numbers])
    for group, of_logits in zip(groups, kept, strict=True):
        pieces = [Piece(depth, 0, rows[depth].targets.shape[0]) for depth in group]
        counts = [piece.stop for piece in pieces]
        of_rows = of_logits if of_logits.shape[0] == sum(counts) else of_logits[: sum(counts)]
        wanted = [wants_hidden[depth] for depth in group]
        if _share_products(counts, len(weight)) and len(set(wanted)) == 1 and all(numbers[depth] for depth in group):
            x = joined([rows_of(hidden[depth], rows[depth]) for depth in group]).to(weight.dtype)
            scales = _repeated(factors, group, counts)
            # The scales join in where there are fewer numbers: before both products, or at what stands beside.
            before = weight.shape[0] <= weight.shape[1]
            if before:
                of_rows = _times(of_rows, scales)
                of_head.add(pieces, of_rows, x)
            else:
                of_head.add_weight(of_rows, _times(x, scales))
                for depth, part in zip(group, of_rows.split(counts), strict=True):
                    of_head.add_bias(part, numbers[depth])
            if wanted[0]:
                gradients.write(pieces, of_rows, weight, scales=None if before else scales)
            continue
        for piece, part in zip(pieces, of_rows.split(counts), strict=True):
            number = numbers[piece.depth]
            if piece.stop and number:
                x = rows_of(hidden[piece.depth], rows[piece.depth]).to(weight.dtype)
                of_head.add([piece], part, x, number)
                if wants_hidden[piece.depth]:
                    gradients.write([piece], part, weight, number)
    return gradients.found


def _times(tensor: Tensor, scales: Tensor) -> Tensor:
    """The product, rounded once, in the dtype of the tensor."""
    return tensor * scales if tensor.dtype == scales.dtype else torch.mul(tensor, scales, out=torch.empty_like(tensor))


def _logits(head: Head, states: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """`[rows, V]` of several depths, one after the other."""
    weight, bias = head.weight, head.bias
    if len(states) == 1 or _share_products(counts, len(weight)):
        logits = product(joined(states).to(weight.dtype), weight.mT)
    else:
        logits = weight.new_empty(sum(counts), len(weight))
        for part, x in zip(logits.split(list(counts)), states, strict=True):
            torch.mm(x.to(weight.dtype), weight.mT, out=part)
    return logits if bias is None else logits.add_(bias)


def _repeated(factors: Tensor, group: range, counts: Sequence[int]) -> Tensor:
    """Each depth's factor as often as it has rows, `[rows, 1]`."""
    if len(set(counts)) == 1:
        return factors[group.start : group.stop].repeat_interleave(counts[0]).unsqueeze(1)
    return torch.cat([factors[depth].expand(count, 1) for depth, count in zip(group, counts, strict=True)])
