"""The chunk loop of the layerwise cross-entropy: rows of all depths against one head, never `[depths, tokens, V]`.

A pass goes over the rows that take part, depth after depth, in chunks whose logits fit a budget of bytes. A chunk
costs one product for its losses and two more for its gradients; between them lies one sweep over its logits, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cdt_fast.ops.layerwise_cross_entropy.chunks import Head, Piece, Rows, plan
from cdt_fast.ops.layerwise_cross_entropy.gradients import HeadGradients, HiddenGradients
from cdt_fast.ops.layerwise_cross_entropy.sweep import RowSweep
from cdt_fast.ops.shared.products import product

# Tensor cores want rows that start at multiples of 16 bytes: an odd vocabulary such as 50,257 would lose half the rate.
COLUMN_MULTIPLE = 64


@dataclass(frozen=True)
class Pass:
    """What a pass leaves.

    Attributes:
        sums: `[depths]`, the losses summed over the tokens; None where the log-sum-exps were given.
        log_sums: `[rows]`, the log-sum-exps of the rows that took part in a pass without gradients, depth after depth
            in the order of their `Rows`.
        hidden: the gradients of the hidden states, None at those not asked for.
        weight, bias: the gradients of the head `[V, d]` and `[V]`, or with one a depth before these, in at least
            float32; None where not asked for.
    """

    sums: Tensor | None
    log_sums: Tensor
    hidden: list[Tensor | None]
    weight: Tensor | None
    bias: Tensor | None


def one_pass(
    hidden: Sequence[Tensor],
    head: Head,
    rows: Sequence[Rows],
    sweep: RowSweep,
    *,
    most: int,
    log_sums: Tensor | None = None,
    scales: Tensor | None = None,
    switched_off: Sequence[bool] | None = None,
    wants_hidden: Sequence[bool],
    wants_weight: bool,
    wants_bias: bool,
    apart: bool = False,
    of_head: HeadGradients | None = None,
) -> Pass:
    """Losses of every depth, or gradients, or both at once.

    Args:
        hidden: `[tokens, d]` each, of any float dtype and strides.
        head: the head, whose dtype is that of the products.
        rows: the tokens that take part at each depth.
        sweep: what turns a chunk of logits into losses and gradients.
        most: rows of a chunk.
        log_sums: those of a pass before: then no losses are computed.
        scales: `[depths]`, what the gradients of a depth's rows are multiplied by; None for no gradients.
        switched_off: the depths without a gradient.
        wants_hidden, wants_weight, wants_bias: the gradients to compute; zeros where no depth has one.
        apart: keep the head's gradients of the depths apart instead of adding them up.
        of_head: what the head's gradients are added to; None: to nothing.
    """
    differentiated = [
        scales is not None and not (switched_off and switched_off[depth]) and (want or wants_weight or wants_bias)
        for depth, want in enumerate(wants_hidden)
    ]
    counts = [depth.targets.shape[0] for depth in rows]
    taken = counts if log_sums is None else [n if one else 0 for n, one in zip(counts, differentiated, strict=True)]
    kinds = [(one, one and want) for one, want in zip(differentiated, wants_hidden, strict=True)]
    order, chunks = plan(taken, kinds, most)
    targets = joined([rows[depth].targets for depth in order if taken[depth]] or [rows[0].targets])
    row_scales = None if scales is None else _repeated(scales, order, taken)
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    if log_sums is None:
        losses = head.weight.new_empty(targets.shape[0], dtype=wide)
        of_rows = torch.empty_like(losses)
    else:
        losses, parts = None, log_sums.split(counts)
        of_rows = joined([parts[depth] for depth in order if taken[depth]] or [log_sums])
    gradients = HiddenGradients(hidden, rows, wants_hidden, differentiated)
    of_head = of_head or HeadGradients(head.weight, wants_weight, wants_bias, len(hidden) if apart else None)
    multiply = _Logits(head, max((chunk.stop - chunk.start for chunk in chunks), default=0))
    for chunk in chunks:
        x = joined([rows_of(hidden[piece.depth], rows[piece.depth], piece) for piece in chunk.pieces])
        x = x.to(head.weight.dtype)
        logits = multiply(x)
        with_gradient = differentiated[chunk.pieces[0].depth]
        sweep(
            head,
            logits,
            chunk.of(targets),
            None if losses is None else chunk.of(losses),
            chunk.of(of_rows),
            chunk.of(row_scales) if row_scales is not None and with_gradient else None,
        )
        if with_gradient:
            of_head.add(chunk.pieces, logits, x)
            if wants_hidden[chunk.pieces[0].depth]:
                gradients.write(chunk.pieces, logits, head.weight)
    sums = None if losses is None else _sums_of_depths(losses, order, counts)
    return Pass(sums, of_rows, gradients.found, *of_head.result())


class _Logits:
    """The logits of a chunk, in memory that all chunks share: fresh memory of that size costs a CPU a sweep over it."""

    def __init__(self, head: Head, rows: int) -> None:
        self._head = head
        self._rows = rows
        self._buffer: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`x Wᵀ + b`, `[rows, V]`, until the next call."""
        weight, bias = self._head.weight, self._head.bias
        # Brings memory of its own, and even so is the faster: by two fifths for a vocabulary of 50,257.
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            logits = product(x, weight.mT)
            return logits if bias is None else logits.add_(bias)
        if self._buffer is None:
            columns = len(weight)
            padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE if weight.is_cuda else columns
            self._buffer = weight.new_empty(self._rows, padded)[:, :columns]
        logits = self._buffer if x.shape[0] == self._rows else self._buffer[: x.shape[0]]
        if bias is None:
            return torch.mm(x, weight.mT, out=logits)
        return torch.addmm(bias, x, weight.mT, out=logits)


def _sums_of_depths(losses: Tensor, order: Sequence[int], counts: Sequence[int]) -> Tensor:
    """`[depths]` from the losses of all rows, which lie in `order`."""
    if len(set(counts)) == 1 and list(order) == sorted(order):
        return losses.view(len(counts), counts[0]).sum(1)
    parts = dict(zip(order, losses.split([counts[depth] for depth in order]), strict=True))
    return torch.stack([parts[depth].sum() for depth in range(len(counts))])


def rows_of(hidden: Tensor, rows: Rows, piece: Piece | None = None) -> Tensor:
    """The rows of a depth's hidden states `[tokens, d]` that take part, or a piece of them."""
    if rows.index is not None:
        return hidden.index_select(0, rows.index if piece is None else piece.of(rows.index))
    return hidden if piece is None else piece.of(hidden)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _repeated(scales: Tensor, order: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Each depth's scale as often as it has rows, in the order given."""
    if len(set(counts)) == 1 and list(order) == sorted(order):
        return scales.repeat_interleave(counts[0])
    of_depths = scales.unbind()
    return torch.cat([of_depths[depth].expand(counts[depth]) for depth in order])
