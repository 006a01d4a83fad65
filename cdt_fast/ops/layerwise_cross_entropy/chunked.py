"""The chunk loop of the layerwise cross-entropy: rows of all depths against one head, never `[depths, tokens, V]`.

The tokens that take part go through the head, depth after depth, in chunks whose logits fit a budget of bytes. A chunk
costs one product for its losses and two more for its gradients; between them lies one sweep over its logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import Backend
from cdt_fast.ops.shared.products import product

# Bytes of a chunk's logits: rows enough for the products to run at their rate (on a GPU thousands, also for a
# vocabulary of 128,256), and few beside the gradients.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
# Depths of no more rows than this share a chunk, or of no more than the vocabulary.
FEW_ROWS = 512
# Bytes of the gradients of logits that are kept until the backward where the weights of the depths follow from the
# losses, and so are not computed a second time. However many depths and rows there are, memory grows by no more.
KEPT_BYTES = 128 * 2**20
# Bytes, in float32, of the rows that the sweep in torch takes together: its dozen steps stay in a CPU's cache.
SWEEP_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
# Bytes of the float32 product that is added to dW where the operands are narrower: all of it at once would double dW.
PRODUCT_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Tensor cores want rows that start at multiples of 16 bytes: an odd vocabulary such as 50,257 would lose half the rate.
COLUMN_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class CrossEntropyArguments:
    """The losses of all depths, decided in every respect.

    Attributes:
        hidden: h_l, `[..., d]` each.
        weight, bias, targets, ignore_index, label_smoothing, softcap, chunk_tokens: as in `layerwise_cross_entropy`.
        sample: the numbers of the tokens that stand for all at the inner depths.
        depth_weights: `[depths]`.
        dtype: that of the products. What they multiply is cast to it chunk by chunk, so that the gradients are rounded
            once, and to the dtype of the arguments.
        mean: whether the losses are means.
        backend: what sweeps over the logits of a chunk.
        fused: whether the forward computes the gradients, too: all that it does not know is factors of them.
        kept_rows: else of so many rows, from the first on, the gradients of the logits are kept until the backward,
            and those logits are not computed again.
        needs_hidden, needs_weight, needs_bias: the gradients that are needed.
    """

    hidden: list[Tensor]
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    sample: Tensor | None
    depth_weights: Tensor | None
    dtype: torch.dtype
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    chunk_tokens: int | None
    mean: bool
    backend: Backend
    fused: bool
    kept_rows: int
    needs_hidden: list[bool]
    needs_weight: bool
    needs_bias: bool

    @property
    def needs_any(self) -> bool:
        return self.needs_weight or self.needs_bias or any(self.needs_hidden)

    @property
    def wide(self) -> torch.dtype:
        """Of losses and sums: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True)
class Rows:
    """The tokens that take part at some depths.

    Attributes:
        depths: at which.
        index: their numbers, `[count]`; None: all tokens, in order.
        targets: `[count]`.
        factor: what their sum is multiplied by to stand for the sum over all tokens.
        first: the number of the first of these rows, `len(depths) · count`, among those of all depths.
    """

    depths: range
    index: Tensor | None
    targets: Tensor
    factor: float
    first: int

    @property
    def stop(self) -> int:
        """The number of the first row of what follows."""
        return self.first + len(self.depths) * len(self.targets)

    def of(self, tensor: Tensor) -> Tensor:
        """`[depths, count]`, from a number for each row of all depths."""
        return tensor[self.first : self.stop].view(len(self.depths), len(self.targets))


@dataclass(frozen=True)
class Chunk:
    """Rows that go through the head together: of one depth, or whole depths side by side."""

    rows: Rows
    depths: range
    start: int
    stop: int

    def __len__(self) -> int:
        return len(self.depths) * (self.stop - self.start)

    @property
    def place(self) -> slice:
        """Where they lie among the rows of all depths."""
        first = self.depths.start - self.rows.depths.start
        start = self.rows.first + first * len(self.rows.targets) + self.start
        return slice(start, start + len(self))

    @property
    def targets(self) -> Tensor:
        targets = self.rows.targets[self.start : self.stop]
        return targets if len(self.depths) == 1 else targets.repeat(len(self.depths))

    def states(self, loss: CrossEntropyArguments) -> Tensor:
        """`[rows, d]` of the hidden states `[tokens, d]` of all depths."""
        index = None if self.rows.index is None else self.rows.index[self.start : self.stop]
        hidden = loss.hidden[self.depths.start : self.depths.stop]
        parts = [depth[self.start : self.stop] if index is None else depth.index_select(0, index) for depth in hidden]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(loss.dtype)

    def of_depths(self, numbers: Tensor) -> Tensor:
        """Those of its depths, of one for each depth."""
        return numbers[self.depths.start : self.depths.stop]

    def of_rows(self, numbers: Tensor) -> Tensor:
        """One for each row, of one for each depth."""
        return self.of_depths(numbers).repeat_interleave(self.stop - self.start)

    def apart(self) -> list[Chunk]:
        """The same rows, a chunk a depth."""
        return [replace(self, depths=range(depth, depth + 1)) for depth in self.depths]


def tokens_of_depths(loss: CrossEntropyArguments) -> list[tuple[range, int]]:
    """Depths, and of how many tokens each is computed, those included that do not count: a sample at the inner ones."""
    depths, tokens = len(loss.hidden), loss.targets.numel()
    if loss.sample is None:
        return [(range(depths), tokens)]
    return [(range(depths - 1), loss.sample.numel()), (range(depths - 1, depths), tokens)]


def number_of_rows(loss: CrossEntropyArguments) -> int:
    """Of all depths, if every token counted: the number of those that do is known to the values."""
    return sum(len(depths) * tokens for depths, tokens in tokens_of_depths(loss))


def plan(loss: CrossEntropyArguments, depths: range, tokens: int, kinds: Sequence[bool]) -> Iterator[tuple[range, int]]:
    """Depths that share chunks, and how many rows of each a chunk takes.

    A depth with more rows than a chunk is cut into equal parts: no product is left with a few rows.

    Args:
        kinds: what the depths of one chunk must have in common.
    """
    most = _chunk_rows(loss)
    while depths and tokens:
        # To copy the states of a few rows costs less than calls of their own, or than all of dW read and written.
        some = depths[: max(1, most // tokens) if tokens <= max(FEW_ROWS, len(loss.weight)) else 1]
        same = next((n for n, depth in enumerate(some) if kinds[depth] != kinds[some[0]]), len(some))
        yield some[:same], -(-tokens // -(-tokens // most))
        depths = depths[same:]


def chunks_of(loss: CrossEntropyArguments, rows: Sequence[Rows], kinds: Sequence[bool]) -> Iterator[Chunk]:
    """The chunks of all rows, by `plan`."""
    for some in rows:
        count = len(some.targets)
        for depths, size in plan(loss, some.depths, count, kinds):
            for start in range(0, count, size):
                yield Chunk(some, depths, start, min(start + size, count))


def kept_shapes(loss: CrossEntropyArguments) -> list[tuple[int, int]]:
    """Of the logits of the first chunks, if every token counts, up to `kept_rows` in all.

    A tensor a chunk: memory for all of them a CPU would take anew from its system each time, at the cost of a product.
    """
    if not loss.kept_rows:
        return []
    sizes: list[int] = []
    for depths, tokens in tokens_of_depths(loss):
        for some, size in plan(loss, depths, tokens, [False] * depths.stop):
            sizes += [len(some) * min(size, tokens - start) for start in range(0, tokens, size)]
    totals = itertools.accumulate(sizes)
    return [(size, len(loss.weight)) for size, total in zip(sizes, totals, strict=True) if total <= loss.kept_rows]


def with_room(chunks: Iterator[Chunk], kept: Sequence[Tensor]) -> Iterator[tuple[Chunk, Tensor | None]]:
    """The chunks, and the rows of the tensors of `kept_shapes` that keep the gradients of their logits, or None."""
    for chunk, room in zip(chunks, itertools.chain(kept, itertools.repeat(None)), strict=False):
        yield chunk, room[: len(chunk)] if room is not None and len(chunk) <= len(room) else None


def _chunk_rows(loss: CrossEntropyArguments) -> int:
    """Rows of a chunk: `chunk_tokens`, or as many as the budget of bytes holds."""
    if loss.chunk_tokens is not None:
        return loss.chunk_tokens
    (vocabulary, width), size, device = loss.weight.shape, loss.dtype.itemsize, loss.weight.device.type
    rows = _budget(CHUNK_BYTES, loss.weight) // (vocabulary * size)
    # Each chunk reads and writes all of dW. On a CPU that takes half as long as the product of 128 rows in bfloat16,
    # so the logits of a chunk may have a third of dW's bytes.
    least = width * max(size, 4) // (3 * size) if device == "cpu" else 0
    return max(128, rows // 128 * 128, least // 128 * 128)


def strategy(loss: CrossEntropyArguments) -> tuple[bool, int]:
    """`fused` and `kept_rows`, which are what is fastest within the budget of bytes."""
    scalable = loss.depth_weights is not None or len(loss.hidden) == 1 or not (loss.needs_weight or loss.needs_bias)
    if not loss.needs_any or torch.compiler.is_compiling():  # then the sizes may have no values yet
        return loss.needs_any and scalable, 0
    (vocabulary, width), rows = loss.weight.shape, number_of_rows(loss)
    most = loss.chunk_tokens or KEPT_BYTES // (vocabulary * loss.dtype.itemsize)
    # The gradients of a classifier's logits are smaller than those of its hidden states.
    if scalable and (vocabulary > width or rows > most):
        return True, 0
    # On a GPU of all or none: the few of a language model that fit would save little there.
    return False, min(rows, most) if rows <= most or loss.weight.device.type == "cpu" else 0


def _budget(of_bytes: dict[str, int], tensor: Tensor) -> int:
    """The bytes for the device of the tensor."""
    return of_bytes["cpu" if tensor.device.type == "cpu" else "cuda"]


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
            if self._buffer is None or len(self._buffer) < len(x):
                columns = len(weight)
                padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE if weight.device.type != "cpu" else columns
                self._buffer = weight.new_empty(len(x), padded)[:, :columns]
            out = self._buffer[: len(x)]
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
        complete = all(some.index is None and len(some.targets) for some in rows)
        self.hidden: list[Tensor | None] = [
            (depth.new_empty if complete and one else depth.new_zeros)(depth.shape) if need else None
            for depth, need, one in zip(loss.hidden, loss.needs_hidden, on, strict=True)
        ]
        self.weight = weight.new_zeros(weight.shape, dtype=loss.wide) if loss.needs_weight else None
        self.bias = weight.new_zeros(len(weight), dtype=loss.wide) if loss.needs_bias else None

    def add(self, chunk: Chunk, gradient: Tensor, x: Tensor, factors: Tensor | None = None) -> None:
        """Add a chunk: the gradient of its logits `[rows, V]`, its states `[rows, d]`, and a factor of each depth."""
        rows, factor, column = slice(chunk.start, chunk.stop), 1.0, None
        if factors is not None and len(factors) == 1 and factors.device.type == "cpu":
            factor = factors.item()
        elif factors is not None:
            column = factors.repeat_interleave(rows.stop - rows.start).unsqueeze(1)
            x = torch.mul(x, column, out=torch.empty_like(x))  # rounded once
        if self.weight is not None:
            _add_product(self.weight, gradient, x, factor)
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


def _add_product(total: Tensor, gradient: Tensor, x: Tensor, factor: float) -> None:
    """`total += factor · gradientᵀ x`, a total of at least float32."""
    if total.dtype == x.dtype:
        torch.addmm(total, gradient.mT, x, alpha=factor, out=total)
        return
    size = max(1, _budget(PRODUCT_BYTES, x) // max(1, x.shape[1] * total.dtype.itemsize))
    for part, columns in zip(total.split(size), gradient.split(size, 1), strict=True):
        # A CPU has no product of narrow factors with a float32 result: there a chunk's part is rounded once.
        found = torch.mm(columns.mT, x, out_dtype=total.dtype) if x.device.type != "cpu" else torch.mm(columns.mT, x)
        part.add_(found, alpha=factor)


def sweep(
    loss: CrossEntropyArguments,
    logits: Tensor,
    targets: Tensor,
    losses: Tensor | None,
    log_sums: Tensor,
    scales: Tensor | None,
    out: Tensor | None,
) -> None:
    """From logits `[rows, V]`, which are overwritten, to losses and the gradient over the logits.

    Args:
        targets, losses, log_sums: `[rows]`. Where losses are given they and the log-sum-exps are written, else the
            latter are read.
        scales: `[rows]`, what the gradients are multiplied by; None: by one.
        out: where the gradient goes, which may be `logits`; None: nowhere.
    """
    if loss.backend == "triton":
        from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_

        if out is not None and scales is None:
            scales = torch.ones_like(log_sums)
        cross_entropy_(
            logits,
            targets,
            losses,
            log_sums,
            scales,
            ignore_index=loss.ignore_index,
            softcap=loss.softcap,
            smoothing=loss.label_smoothing,
        )
        if out is not None and out.data_ptr() != logits.data_ptr():
            out.copy_(logits)
        return
    count = max(1, _budget(SWEEP_BYTES, logits) // (4 * logits.shape[1]))
    optional = [[None] * -(-len(logits) // count) if t is None else t.split(count) for t in (losses, scales, out)]
    for part in zip(logits.split(count), targets.split(count), log_sums.split(count), *optional, strict=True):
        _sweep_rows(loss, *part)


def _sweep_rows(
    loss: CrossEntropyArguments,
    logits: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    losses: Tensor | None,
    scales: Tensor | None,
    out: Tensor | None,
) -> None:
    smoothing, vocabulary = loss.label_smoothing, logits.shape[1]
    ignored = outside = None
    places = targets
    if logits.device.type != "cpu":  # where neither ignored tokens nor targets out of range get this far
        ignored = targets == loss.ignore_index
        outside = ~ignored & ((targets < 0) | (targets >= vocabulary))
        places = targets.masked_fill(ignored | outside, 0)
    places = places.unsqueeze(1)
    # In at least float32; what is written over the logits is written over `out` where it has room for that.
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    room = out if out is not None and out.dtype == x.dtype else x
    slope = None
    if loss.softcap is not None:
        x.div_(loss.softcap).tanh_()
        slope = None if out is None else 1.0 - x.square()
        x.mul_(loss.softcap)
    if losses is None:
        probabilities = torch.exp(x.sub_(log_sums.unsqueeze(1)), out=room)
    else:
        highest = x.amax(1)
        below = highest - x.gather(1, places).squeeze(1)
        if smoothing:
            below.mul_(1.0 - smoothing).add_(highest - x.mean(1), alpha=smoothing)
        probabilities = torch.softmax(x, 1, out=room)
        # The largest is exp(highest − log_sum): this saves a sum of exponentials of its own.
        above = probabilities.amax(1).log_().neg_()
        torch.add(highest, above, out=log_sums)
        torch.add(below, above, out=losses)
        if ignored is not None and outside is not None:
            losses.masked_fill_(ignored, 0.0).masked_fill_(outside, float("nan"))
    if out is None:
        return
    if smoothing:
        probabilities.sub_(smoothing / vocabulary)
    # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
    probabilities.scatter_(1, places, smoothing - 1.0, reduce="add")
    if slope is not None:
        probabilities.mul_(slope)
    if ignored is not None and outside is not None:
        scales = torch.ones_like(log_sums) if scales is None else scales
        scales = scales.masked_fill(outside, float("nan"))
        probabilities.mul_(scales.unsqueeze(1)).masked_fill_((ignored | (scales == 0)).unsqueeze(1), 0.0)
    elif scales is not None:
        probabilities.mul_(scales.unsqueeze(1))
    if probabilities is not out:
        out.copy_(probabilities)
