"""Where the gradients of the layerwise cross-entropy are put, a chunk at a time: of the states, and of the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdt_fast.ops.layerwise_cross_entropy.chunks import Piece, Rows

# Bytes of the float32 product that is added to dW where the operands are narrower: all of it at once would double dW.
PRODUCT_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


class HiddenGradients:
    """The gradients of the hidden states, `G W`, put where their rows belong.

    Attributes:
        found: one a depth, None where it is not wanted.
    """

    def __init__(
        self, hidden: Sequence[Tensor], rows: Sequence[Rows], wanted: Sequence[bool], differentiated: Sequence[bool]
    ) -> None:
        self._hidden = hidden
        self._rows = rows
        # Zeros where the chunks will not write every row; other memory is taken when its first chunk comes.
        self.found: list[Tensor | None] = [
            torch.zeros_like(states, memory_format=torch.contiguous_format)
            if want and not (one and depth.index is None and depth.targets.shape[0])
            else None
            for states, depth, want, one in zip(hidden, rows, wanted, differentiated, strict=True)
        ]

    def write(
        self,
        pieces: Sequence[Piece],
        gradient: Tensor,
        weight: Tensor,
        factor: float = 1.0,
        scales: Tensor | None = None,
    ) -> None:
        """The rows of a chunk, from the gradient of its logits `[rows, V]`.

        Args:
            pieces: what the chunk holds.
            gradient: of its logits.
            weight: W, in the same dtype.
            factor: of all rows, which joins in before the rounding.
            scales: `[rows, 1]`, factors of several pieces; they join in after it.
        """
        first = pieces[0]
        if (
            len(pieces) == 1
            and scales is None
            and self._hidden[first.depth].dtype == weight.dtype
            and self._rows[first.depth].index is None
        ):
            _product(gradient, weight, first.of(self._room(first.depth)), factor)
            return
        product = _product(gradient, weight, None, factor)
        if scales is not None:
            product.mul_(scales)
        parts = product.split_with_sizes([piece.stop - piece.start for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            index, states = self._rows[piece.depth].index, self._hidden[piece.depth]
            part = part if part.dtype == states.dtype else part.to(states.dtype)
            if index is not None:
                self._room(piece.depth).index_copy_(0, piece.of(index), part)
            elif part.shape[0] == states.shape[0]:
                self.found[piece.depth] = part
            else:
                piece.of(self._room(piece.depth)).copy_(part)

    def _room(self, depth: int) -> Tensor:
        room = self.found[depth]
        if room is None:
            room = torch.empty_like(self._hidden[depth], memory_format=torch.contiguous_format)
            self.found[depth] = room
        return room


class HeadGradients:
    """`dW += Gᵀ x` and `db += Σ G` over the chunks, in at least float32: in bfloat16 a long sum stops growing.

    Args:
        weight: `[V, d]`, in the dtype of the products.
        wants_weight, wants_bias: which of the two are computed.
        depths: how many sums there are, one a depth; None: one for all depths.
    """

    def __init__(self, weight: Tensor, wants_weight: bool, wants_bias: bool, depths: int | None) -> None:
        self._weight, self._wants_weight, self._apart = weight, wants_weight, depths is not None
        self._dtype, groups = torch.promote_types(weight.dtype, torch.float32), depths or 1
        # Sums of one group each. Memory for those of several is taken at once, as they are returned in one tensor.
        self._sums: list[Tensor | None] = [None] * groups
        self._rooms = (
            weight.new_empty(groups, *weight.shape, dtype=self._dtype) if self._apart and wants_weight else None
        )
        self._bias = weight.new_zeros(groups, len(weight), dtype=self._dtype) if wants_bias else None

    def add(self, pieces: Sequence[Piece], gradient: Tensor, x: Tensor, factor: float = 1.0) -> None:
        """Add a chunk: the gradient of its logits `[rows, V]`, its hidden states `[rows, d]`, and a factor of both."""
        if not self._apart:
            self.add_weight(gradient, x, factor)
            self.add_bias(gradient, factor)
            return
        sizes = [piece.stop - piece.start for piece in pieces]
        for piece, part, states in zip(
            pieces, gradient.split_with_sizes(sizes), x.split_with_sizes(sizes), strict=True
        ):
            self.add_weight(part, states, factor, piece.depth)
            self.add_bias(part, factor, piece.depth)

    def add_bias(self, gradient: Tensor, factor: float = 1.0, group: int = 0) -> None:
        """Add to the bias's alone, as `add` does."""
        if self._bias is not None:
            self._bias[group].add_(gradient.sum(0, dtype=self._bias.dtype), alpha=factor)

    def add_weight(self, gradient: Tensor, x: Tensor, factor: float = 1.0, group: int = 0) -> None:
        """Add to the weight's alone, as `add` does."""
        if not self._wants_weight:
            return
        total = self._sums[group]
        room = None if self._rooms is None else self._rooms[group]
        if self._dtype == x.dtype:
            if total is None:
                self._sums[group] = _product(gradient.mT, x, room, factor)
            else:
                torch.addmm(total, gradient.mT, x, alpha=factor, out=total)
            return
        first = total is None
        if total is None:
            total = self._weight.new_empty(self._weight.shape, dtype=self._dtype) if room is None else room
            self._sums[group] = total
        size = max(1, PRODUCT_BYTES[x.device.type] // (x.shape[1] * total.dtype.itemsize))
        for part, columns in zip(total.split(size), gradient.split(size, 1), strict=True):
            # A CPU has no product of narrow factors with a float32 result: there a chunk's part is rounded once.
            found = torch.mm(columns.mT, x, out_dtype=total.dtype) if x.is_cuda else torch.mm(columns.mT, x)
            if not first:
                part.add_(found, alpha=factor)
            elif factor == 1.0:
                part.copy_(found)
            else:
                torch.mul(found, factor, out=part)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, None where they are not wanted; with one a depth before their dimensions
        where there are several sums."""
        weight, bias = self._rooms, self._bias
        if self._rooms is not None:
            for total, room in zip(self._sums, self._rooms.unbind(), strict=True):
                if total is None:
                    room.zero_()
        elif self._wants_weight:
            weight = self._sums[0]
            if weight is None:
                weight = self._weight.new_zeros(self._weight.shape, dtype=self._dtype)
        return weight, bias if bias is None or self._apart else bias.squeeze(0)


def _product(left: Tensor, right: Tensor, out: Tensor | None, factor: float) -> Tensor:
    """`factor · left right`, rounded once."""
    if factor == 1.0:
        return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
    # What is added is not read: its factor is 0.
    return torch.addmm(right[:1] if out is None else out, left, right, beta=0, alpha=factor, out=out)
