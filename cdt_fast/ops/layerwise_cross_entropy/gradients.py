"""The products of a chunk of the layerwise cross-entropy: its logits, and what it adds to the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdt_fast.ops.layerwise_cross_entropy.chunked import Chunk, CrossEntropyArguments, Rows
from cdt_fast.ops.shared.products import add_product, product

# Tensor cores want rows that start at multiples of 16 bytes: an odd vocabulary such as 50,257 would lose half the rate.
COLUMN_MULTIPLE = 64


class Logits:
    """The logits of a chunk, in memory that all chunks share: fresh memory of that size costs a CPU a sweep over it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._buffer: Tensor | None = None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """`x Wᵀ + b`, `[rows, V]`: in `out`, or in memory of its own until the next call."""
        weight, bias = self._weight, self._bias
        # Brings memory of its own, and even so is the faster: by two fifths for a vocabulary of 50,257.
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            logits = product(x, weight.mT)
            return logits if bias is None else logits.add_(bias)
        if out is None:
            if self._buffer is None or self._buffer.shape[0] < x.shape[0]:
                columns = weight.shape[0]
                padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE if weight.device.type != "cpu" else columns
                self._buffer = weight.new_empty(x.shape[0], padded)[:, :columns]
            out = self._buffer[: x.shape[0]]
        return torch.mm(x, weight.mT, out=out) if bias is None else torch.addmm(bias, x, weight.mT, out=out)


class Gradients:
    """The gradients that are needed, which chunks are added to.

    `G W` of the hidden states of each depth; `Gᵀ x` and `Σ G` of the head, in at least float32: in bfloat16 a long sum
    stops growing.

    Args:
        loss: with hidden states `[tokens, d]`, and the head in the dtype of the products.
        rows: that take part.
        on: the depths whose chunks will come; the gradients of the others are zero.
    """

    def __init__(self, loss: CrossEntropyArguments, rows: Sequence[Rows], on: Sequence[bool]) -> None:
        self._weight = weight = loss.weight
        complete = all(some.index is None and some.targets.shape[0] for some in rows)
        self.hidden: list[Tensor | None] = [
            (depth.new_empty if complete and one else depth.new_zeros)(depth.shape) if need else None
            for depth, need, one in zip(loss.hidden, loss.needs_hidden, on, strict=True)
        ]
        self.weight = weight.new_zeros(weight.shape, dtype=loss.wide) if loss.needs_weight else None
        self.bias = weight.new_zeros(weight.shape[0], dtype=loss.wide) if loss.needs_bias else None

    def add(self, chunk: Chunk, gradient: Tensor, x: Tensor, factors: Tensor | None = None) -> None:
        """Add a chunk: the gradient of its logits `[rows, V]`, its states `[rows, d]`, and a factor of each depth."""
        rows, factor, column = slice(chunk.start, chunk.stop), 1.0, None
        if factors is not None and factors.shape[0] == 1 and factors.device.type == "cpu":
            factor = factors.item()
        elif factors is not None:
            column = factors.unsqueeze(1).expand(-1, rows.stop - rows.start).reshape(-1, 1)
            x = torch.mul(x, column, out=torch.empty_like(x))  # rounded once
        if self.weight is not None:
            add_product(self.weight, gradient, x, factor)
        if self.bias is not None and (factors is None or column is None):
            self.bias.add_(gradient.sum(0, dtype=self.bias.dtype), alpha=factor)
        elif self.bias is not None and factors is not None:
            of_depths = gradient.view(len(chunk.depths), -1, gradient.shape[1]).sum(1, dtype=self.bias.dtype)
            self.bias.addmv_(of_depths.mT, factors)
        rooms, index = [self.hidden[depth] for depth in chunk.depths], chunk.rows.index
        if all(room is None for room in rooms):
            return
        # One product for all depths, which reads the weight once.
        first = rooms[0] if len(rooms) == 1 and index is None and column is None else None
        if first is not None and first.dtype == gradient.dtype:
            _product(gradient, self._weight, first[rows], factor)
            return
        product = _product(gradient, self._weight, None, factor)
        if column is not None:
            product.mul_(column)
        for room, of_depth in zip(rooms, product.split(rows.stop - rows.start), strict=True):
            if room is not None and index is None:
                room[rows] = of_depth
            elif room is not None and index is not None:
                room.index_copy_(0, index[rows], of_depth.to(room.dtype))

    def found(self, shape: torch.Size, dtype: torch.dtype) -> list[Tensor]:
        """Those that are needed: of the hidden states, in `shape`, then of the head, in `dtype`."""
        of_hidden = [gradient.view(shape) for gradient in self.hidden if gradient is not None]
        return of_hidden + [gradient.to(dtype) for gradient in (self.weight, self.bias) if gradient is not None]


def _product(left: Tensor, right: Tensor, out: Tensor | None, factor: float) -> Tensor:
    """`factor · left right`, rounded once."""
    if factor == 1.0:
        return torch.mm(left, right, out=out)
    # What is added is not read: its factor is 0.
    return torch.addmm(right[:1] if out is None else out, left, right, beta=0, alpha=factor, out=out)
