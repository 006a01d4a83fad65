"""What is done with a chunk: its logits, the sweep over them by a kernel or by torch, what it adds to the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import SweepArguments
from cdt_fast.ops.layerwise_cross_entropy.chunked import Chunk, CrossEntropyArguments, Rows
from cdt_fast.ops.shared.products import add_product, budget

# Bytes, in float32, of the rows that the sweep in torch takes together: its dozen steps stay in a CPU's cache.
SWEEP_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
# Rows of fewer columns than this are swept with the classes first: torch's loops over so few take several times longer.
FEW_COLUMNS = 32
# Fewer numbers than this are not worth turning.
FEW_NUMBERS = 2**13
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
        if out is None:
            if self._buffer is None or self._buffer.shape[0] < x.shape[0]:
                self._buffer = self.room(x.shape[0], weight.dtype)
            out = self._buffer[: x.shape[0]]
        return torch.mm(x, weight.mT, out=out) if bias is None else torch.addmm(bias, x, weight.mT, out=out)

    def room(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Memory for as many logits, `[rows, V]`, in rows that tensor cores and wide loads like."""
        columns = self._weight.shape[0]
        padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE if self._weight.device.type != "cpu" else columns
        return self._weight.new_empty(rows, padded, dtype=dtype)[:, :columns]


def sweep(loss: CrossEntropyArguments, rows: SweepArguments) -> None:
    """From logits, which are overwritten, to losses, log-sum-exps and the gradient, as far as `rows` asks."""
    if loss.backend == "triton":
        from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_

        cross_entropy_(
            rows,
            ignore_index=loss.ignore_index,
            softcap=loss.softcap,
            smoothing=loss.label_smoothing,
        )
        if rows.out is not None and rows.out.data_ptr() != rows.logits.data_ptr():
            rows.out.copy_(rows.logits)
        return
    number, vocabulary = rows.logits.shape
    count = max(1, budget(SWEEP_BYTES, rows.logits) // (4 * vocabulary))
    parts: Iterable[SweepArguments] = [rows]
    if number > count:
        parts = map(SweepArguments, *([None] * -(-number // count) if t is None else t.split(count) for t in rows))
    for part in parts:
        _sweep_rows(loss, part)


def _sweep_rows(loss: CrossEntropyArguments, rows: SweepArguments) -> None:
    logits, targets, log_sums, losses, scales, out = rows
    smoothing, vocabulary = loss.label_smoothing, logits.shape[1]
    ignored, outside, places = _places(loss, targets, vocabulary)
    v = 0 if vocabulary < FEW_COLUMNS and logits.numel() >= FEW_NUMBERS else 1  # the dimension of the vocabulary
    places = places.unsqueeze(v)
    # In at least float32; what is written over the logits is written over `out` where it has room for that.
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x if v else x.mT.contiguous()
    room = out if v and out is not None and out.dtype == x.dtype else x
    slope = None
    if loss.softcap is not None:
        x.div_(loss.softcap).tanh_()
        slope = None if out is None else 1.0 - x.square()
        x.mul_(loss.softcap)
    if losses is None:
        probabilities = torch.exp(x.sub_(log_sums.unsqueeze(v)), out=room)
    else:
        highest = x.amax(v)
        below = highest - x.gather(v, places).squeeze(v)
        if smoothing:
            below.mul_(1.0 - smoothing).add_(highest - x.mean(v), alpha=smoothing)
        probabilities = torch.softmax(x, v, out=room)
        # The largest is exp(highest − log_sum): this saves a sum of exponentials of its own.
        above = probabilities.amax(v).log_().neg_()
        torch.add(highest, above, out=log_sums)
        torch.add(below, above, out=losses)
        if ignored is not None and outside is not None:
            losses.masked_fill_(ignored, 0.0).masked_fill_(outside, float("nan"))
    if out is None:
        return
    if smoothing:
        probabilities.sub_(smoothing / vocabulary)
    # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
    probabilities.scatter_(v, places, smoothing - 1.0, reduce="add")
    if slope is not None:
        probabilities.mul_(slope)
    if ignored is not None and outside is not None:
        scales = torch.ones_like(log_sums) if scales is None else scales
        scales = scales.masked_fill(outside, float("nan"))
        probabilities.mul_(scales.unsqueeze(v)).masked_fill_((ignored | (scales == 0)).unsqueeze(v), 0.0)
    elif scales is not None:
        probabilities.mul_(scales.unsqueeze(v))
    if probabilities is not out:
        out.copy_(probabilities if v else probabilities.mT)


def _places(
    loss: CrossEntropyArguments, targets: Tensor, vocabulary: int
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Which targets are ignored and which are out of range, and the columns of the others.

    None and None on a CPU, where neither gets this far.
    """
    if targets.device.type == "cpu":
        return None, None, targets
    ignored = targets == loss.ignore_index
    outside = ~ignored & ((targets < 0) | (targets >= vocabulary))
    return ignored, outside, targets.masked_fill(ignored | outside, 0)


class Gradients:
    """The gradients that are needed, which chunks are added to; zero at the depths that are not `on`.

    `G W` of the hidden states of each depth; `Gᵀ x` and `Σ G` of the head, in at least float32: in bfloat16 a long sum
    stops growing. `Σ G` is added up over the chunks, which may be many, in float64.
    """

    def __init__(self, loss: CrossEntropyArguments, rows: Sequence[Rows], on: Sequence[bool]) -> None:
        self._weight = weight = loss.weight
        complete = all(some.index is None and some.targets.shape[0] for some in rows)
        self.hidden: list[Tensor | None] = [
            (depth.new_empty if complete and one else depth.new_zeros)(depth.shape) if need else None
            for depth, need, one in zip(loss.hidden, loss.needs_hidden, on, strict=True)
        ]
        self.weight = weight.new_zeros(weight.shape, dtype=loss.wide) if loss.needs_weight else None
        summed = loss.wide if weight.device.type == "mps" else torch.float64  # which mps does not have
        self.bias = weight.new_zeros(weight.shape[0], dtype=summed) if loss.needs_bias else None
        self._wide = loss.wide

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
            self.bias.add_(gradient.sum(0, dtype=self._wide), alpha=factor)
        elif self.bias is not None and factors is not None:
            of_depths = gradient.view(len(chunk.depths), -1, gradient.shape[1]).sum(1, dtype=self._wide)
            self.bias.add_(of_depths.mT @ factors)
        rooms, index = [self.hidden[depth] for depth in chunk.depths], chunk.index
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
                room.index_copy_(0, index, of_depth.to(room.dtype))

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
