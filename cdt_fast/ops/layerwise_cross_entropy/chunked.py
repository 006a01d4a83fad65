"""The chunks of the layerwise cross-entropy: rows of all depths against one head, never `[depths, tokens, V]`.

The tokens that take part go through the head, depth after depth, in chunks whose logits fit a budget of bytes. A chunk
costs one product for its losses and two more for its gradients; between them lies one sweep over its logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import Backend
from cdt_fast.ops.shared.products import budget

# Bytes of a chunk's logits: rows enough for the products to run at their rate (on a GPU thousands, also for a
# vocabulary of 128,256), and few beside the gradients.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
# Depths of no more rows than this share a chunk, or of no more than the vocabulary.
FEW_ROWS = 512
# Bytes of the gradients of logits that are kept until the backward where the weights of the depths follow from the
# losses, and so are not computed a second time. However many depths and rows there are, memory grows by no more.
KEPT_BYTES = 128 * 2**20
# Bytes of the gradients of the hidden states up to which to scale them takes less than a second pass of small steps.
SCALED_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class CrossEntropyArguments:
    """The losses of all depths, decided in every respect; what is not said here is as in `layerwise_cross_entropy`."""

    hidden: list[Tensor]  # h_l, [..., d] each
    weight: Tensor
    bias: Tensor | None
    targets: list[Tensor]  # one tensor, or one a depth
    sample: Tensor | None  # the numbers of the tokens that stand for all at the inner depths
    depth_weights: Tensor | None  # [depths]
    dtype: torch.dtype  # of the products; what they multiply is cast chunk by chunk, and gradients are rounded once
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    chunk_tokens: int | None
    mean: bool
    backend: Backend  # of the sweep over the logits of a chunk
    fused: bool  # whether the forward computes the gradients too: all that it does not know is factors of them
    kept_rows: int  # else of so many rows, from the first on, the gradients of logits are kept until the backward
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
    """The tokens that take part at some depths."""

    depths: range
    index: Tensor | None  # their numbers, [count]; None: all tokens, in order
    targets: Tensor  # [count]
    factor: float | Tensor  # of their sum: to stand for that of all tokens, or of as many as count at this depth
    first: int  # the number of the first of these rows, len(depths) · count, among those of all depths

    @property
    def stop(self) -> int:
        return self.first + len(self.depths) * self.targets.shape[0]

    def of(self, tensor: Tensor) -> Tensor:
        """`[depths, count]`, from a number for each row of all depths."""
        return tensor[self.first : self.stop].view(len(self.depths), self.targets.shape[0])


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
        start = self.rows.first + first * self.rows.targets.shape[0] + self.start
        return slice(start, start + len(self))

    @property
    def index(self) -> Tensor | None:
        """The numbers of its tokens; None: from `start` to `stop`."""
        return None if self.rows.index is None else self.rows.index[self.start : self.stop]

    @property
    def targets(self) -> Tensor:
        targets = self.rows.targets[self.start : self.stop]
        return targets if len(self.depths) == 1 else targets.expand(len(self.depths), -1).contiguous().view(-1)

    def states(self, loss: CrossEntropyArguments) -> Tensor:
        """`[rows, d]` of the hidden states `[tokens, d]` of all depths."""
        rows, index = slice(self.start, self.stop), self.index
        hidden = loss.hidden[self.depths.start : self.depths.stop]
        parts = [depth[rows] if index is None else depth.index_select(0, index) for depth in hidden]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(loss.dtype)

    def of_depths(self, numbers: Tensor) -> Tensor:
        """Those of its depths, of one for each depth."""
        return numbers[self.depths.start : self.depths.stop]

    def of_rows(self, numbers: Tensor) -> Tensor:
        """One for each row, of one for each depth."""
        return self.of_depths(numbers).unsqueeze(1).expand(-1, self.stop - self.start).contiguous().view(-1)

    def apart(self) -> list[Chunk]:
        """The same rows, a chunk a depth."""
        return [replace(self, depths=range(depth, depth + 1)) for depth in self.depths]


def tokens_of_depths(loss: CrossEntropyArguments) -> list[tuple[range, int]]:
    """Depths, and of how many tokens each is computed, those included that do not count: a sample at the inner ones."""
    depths, tokens = len(loss.hidden), loss.targets[0].numel()
    inner = tokens if loss.sample is None else loss.sample.numel()
    if len(loss.targets) > 1:
        return [(range(depth, depth + 1), inner if depth < depths - 1 else tokens) for depth in range(depths)]
    if loss.sample is None:
        return [(range(depths), tokens)]
    return [(range(depths - 1), inner), (range(depths - 1, depths), tokens)]


def number_of_rows(loss: CrossEntropyArguments) -> int:
    """Of all depths, if every token counted: the number of those that do is known to the values."""
    return sum(len(depths) * tokens for depths, tokens in tokens_of_depths(loss))


def rows_of_depths(loss: CrossEntropyArguments) -> tuple[Tensor | int, list[Rows]]:
    """What the sums of the depths are divided by for their means, and the tokens that take part at each depth.

    Ignored targets on the CPU are left out, and the count is a number. On a GPU it is not known without waiting for it:
    there they stay in, are not read, and cost their share of the products.
    """
    device, apart = loss.weight.device, len(loss.targets) > 1
    targets = [each.reshape(-1).contiguous() for each in loss.targets]  # may be a column of a table
    counts = [_count(loss, each, f"targets[{n}]" if apart else "targets") for n, each in enumerate(targets)]
    whole = targets[0].shape[0]
    rows: list[Rows] = []
    first = 0
    for depths, tokens in tokens_of_depths(loss):
        own, count = (targets[depths.start], counts[depths.start]) if apart else (targets[0], counts[0])
        index = None if loss.sample is None or depths.stop == len(loss.hidden) else loss.sample.to(own.device)
        factor: float | Tensor = 1.0 if index is None else whole / max(1, tokens)
        if apart and loss.mean:
            # Beside the number of all tokens, which divides every sum: what is rounded in between is not small.
            if isinstance(count, Tensor):
                factor = factor * whole / count.to(device, loss.wide, non_blocking=True)
            else:
                factor = factor * whole / count
        if isinstance(count, int) and count < whole:
            counted = ((own if index is None else own[index]) != loss.ignore_index).nonzero().squeeze(1)
            index = counted if index is None else index[counted]
        chosen = (own if index is None else own[index]).to(device, non_blocking=True)
        index = None if index is None else index.to(device, non_blocking=True)
        rows.append(Rows(depths, index, chosen, factor, first))
        first = rows[-1].stop
    return whole if apart else counts[0], rows


def _count(loss: CrossEntropyArguments, targets: Tensor, name: str) -> Tensor | int:
    vocabulary, ignored = loss.weight.shape[0], loss.ignore_index
    if targets.device.type != "cpu":
        return (targets != ignored).sum()
    count = targets.numel()
    if count:
        lowest, highest = (int(end) for end in torch.aminmax(targets))
        if lowest < 0 or highest >= vocabulary or lowest <= ignored <= highest:
            counted = targets != ignored
            wrong = counted & ((targets < 0) | (targets >= vocabulary))
            if wrong.any():
                raise InputError(
                    f"{name} must be in [0, {vocabulary}) or {ignored} (ignore_index), got {targets[wrong][0].item()}"
                )
            count = int(counted.sum())
    if loss.mean and not count:
        raise InputError(f"{name} must hold at least one token that is not {ignored} (ignore_index)")
    return count


def times_factors(of_depths: Tensor, rows: Sequence[Rows]) -> Tensor:
    """A number for each depth times the factor of the rows of that depth."""
    if len(rows) == 1:
        return of_depths
    parts = of_depths.split([len(some.depths) for some in rows])
    return torch.cat([part * some.factor for part, some in zip(parts, rows, strict=True)])


def plan(loss: CrossEntropyArguments, depths: range, tokens: int, kinds: Sequence[bool]) -> Iterator[tuple[range, int]]:
    """Depths that share chunks, and how many rows of each a chunk takes.

    A depth with more rows than a chunk is cut into equal parts: no product is left with a few rows. The depths of one
    chunk have the same of `kinds`.
    """
    most = _chunk_rows(loss)
    while depths and tokens:
        # To copy the states of a few rows costs less than calls of their own, or than all of dW read and written.
        some = depths[: max(1, most // tokens) if tokens <= max(FEW_ROWS, loss.weight.shape[0]) else 1]
        same = next((n for n, depth in enumerate(some) if kinds[depth] != kinds[some[0]]), len(some))
        yield some[:same], -(-tokens // -(-tokens // most))
        depths = depths[same:]


def chunks_of(loss: CrossEntropyArguments, rows: Sequence[Rows], kinds: Sequence[bool]) -> Iterator[Chunk]:
    for some in rows:
        count = some.targets.shape[0]
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
    return [(size, loss.weight.shape[0]) for size, total in zip(sizes, totals, strict=True) if total <= loss.kept_rows]


def with_room(chunks: Iterator[Chunk], kept: Sequence[Tensor]) -> Iterator[tuple[Chunk, Tensor | None]]:
    """The chunks, and the rows of the tensors of `kept_shapes` that keep the gradients of their logits, or None."""
    for chunk, room in zip(chunks, itertools.chain(kept, itertools.repeat(None)), strict=False):
        size = len(chunk)
        yield chunk, room[:size] if room is not None and size <= room.shape[0] else None


def _chunk_rows(loss: CrossEntropyArguments) -> int:
    """Rows of a chunk: `chunk_tokens`, or as many as the budget of bytes holds."""
    if loss.chunk_tokens is not None:
        return loss.chunk_tokens
    (vocabulary, width), size, device = loss.weight.shape, loss.dtype.itemsize, loss.weight.device.type
    rows = budget(CHUNK_BYTES, loss.weight) // (vocabulary * size)
    # Each chunk reads and writes all of dW: on a GPU its logits have at least as many bytes. On a CPU that takes half
    # as long as the product of 128 rows in bfloat16, so there they may have a third.
    least = width * max(size, 4) // (size if device != "cpu" else 3 * size)
    return max(128, rows // 128 * 128, least // 128 * 128)


def strategy(loss: CrossEntropyArguments) -> tuple[bool, int]:
    """`fused` and `kept_rows`, which are what is fastest within the budget of bytes."""
    # Whether each gradient is a factor of what the forward can find, which holds one of all depths or of one alone.
    shared = loss.needs_weight or loss.needs_bias
    scalable = loss.depth_weights is not None or len(loss.hidden) == 1 or not shared
    # While it is compiled the sizes may have no values yet.
    if not loss.needs_any or torch.compiler.is_compiling():
        return loss.needs_any and scalable, 0
    (vocabulary, width), rows = loss.weight.shape, number_of_rows(loss)
    most = loss.chunk_tokens or KEPT_BYTES // (vocabulary * loss.dtype.itemsize)
    # The gradients of a classifier's logits are smaller than those of its hidden states; few of these cost little.
    small = rows * width * loss.dtype.itemsize <= SCALED_BYTES
    if scalable and (vocabulary > width or rows > most or small):
        return True, 0
    # On a GPU of all or none: the few of a language model that fit would save little there.
    return False, min(rows, most) if rows <= most or loss.weight.device.type == "cpu" else 0
