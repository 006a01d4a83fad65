"""Which rows of the layerwise cross-entropy take part, and in which chunks: decided before anything is computed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cdt_fast.errors import InputError

# Bytes of a chunk's logits: rows enough for the products to run at their rate (on a GPU thousands, also for a
# vocabulary of 128,256), and few beside the gradients.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
# Bytes of the logits that are kept until the backward where the weights of the depths follow from the losses: what is
# kept is not computed a second time. However many depths and rows there are, memory grows by no more than this.
KEPT_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Head:
    """What turns a hidden state into a loss.

    Attributes:
        weight: `[V, d]`, in the dtype of the products.
        bias: `[V]` or None, likewise.
        ignore_index, softcap, smoothing: as in `layerwise_cross_entropy`.
    """

    weight: Tensor
    bias: Tensor | None
    ignore_index: int
    softcap: float | None
    smoothing: float


@dataclass(frozen=True)
class Rows:
    """The tokens of one depth that take part.

    Attributes:
        index: their numbers, `[count]`; None: all of them.
        targets: `[count]` int64.
        factor: what their sum is multiplied by to stand for the sum over all tokens.
    """

    index: Tensor | None
    targets: Tensor
    factor: float


@dataclass(frozen=True)
class Piece:
    """The rows `start … stop` of those of one depth that take part."""

    depth: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        return _slice(tensor, self.start, self.stop)


@dataclass(frozen=True)
class Chunk:
    """Rows that go through the head together.

    Attributes:
        pieces: one a depth, of depths that follow one another in the order of the plan.
        start, stop: where they lie among the rows of all depths, in that order.
    """

    pieces: list[Piece]
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        return _slice(tensor, self.start, self.stop)


def _slice(tensor: Tensor, start: int, stop: int) -> Tensor:
    # A view of everything takes as long to make as a small tensor to compute.
    return tensor if stop - start == tensor.shape[0] else tensor[start:stop]


def count_rows(targets: Tensor, vocabulary: int, ignore_index: int, mean: bool) -> Tensor | int:
    """How many tokens count: a number where the targets are on the CPU, else a tensor on their device.

    Raises:
        InputError: the targets are on the CPU and one is out of range, or none counts and a mean is asked for. On a
            GPU looking would mean to wait.
    """
    if targets.device.type != "cpu":
        return (targets != ignore_index).sum()
    count = targets.numel()
    if count:
        least, most = torch.aminmax(targets)
        lowest, highest = int(least), int(most)
        if lowest < 0 or highest >= vocabulary or lowest <= ignore_index <= highest:
            counted = targets != ignore_index
            wrong = counted & ((targets < 0) | (targets >= vocabulary))
            if wrong.any():
                raise InputError(
                    f"targets must be in [0, {vocabulary}) or {ignore_index} (ignore_index), "
                    f"got {targets[wrong][0].item()}"
                )
            count = int(counted.sum())
    if mean and not count:
        raise InputError(f"targets must hold at least one token that is not {ignore_index} (ignore_index)")
    return count


def rows_of_depths(
    targets: Tensor, count: Tensor | int, ignore_index: int, sample: Tensor | None, depths: int, device: torch.device
) -> list[Rows]:
    """Which tokens take part at each depth: `sample` at the inner ones, all at the last.

    Ignored tokens are left out where the targets are on the CPU. On a GPU their number is not known without waiting
    for it; there they stay in, the row kernel does not read them, and they cost their share of the products.

    Args:
        targets: `[tokens]`.
        count: how many of them count, from `count_rows`.
    """

    def rows(index: Tensor | None, factor: float) -> Rows:
        if isinstance(count, int) and count < targets.shape[0]:
            among = targets if index is None else targets[index]
            counted = (among != ignore_index).nonzero().squeeze(1)
            index = counted if index is None else index[counted]
        if index is None:
            there = targets if targets.device == device else targets.to(device, non_blocking=True)
            return Rows(None, there, factor)
        return Rows(index.to(device, non_blocking=True), targets[index].to(device, non_blocking=True), factor)

    last = rows(None, 1.0)
    if sample is None or depths == 1:
        return [last] * depths
    inner = rows(sample.to(targets.device), len(targets) / max(1, len(sample)))
    return [inner] * (depths - 1) + [last]


def plan(counts: Sequence[int], kinds: Sequence[tuple[bool, bool]], most: int) -> tuple[list[int], list[Chunk]]:
    """An order of the depths, those of a kind side by side, and chunks of at most `most` of their rows in that order.

    A chunk holds parts of one depth, or whole depths of one kind. A depth with more rows than fit is cut into equal
    parts, so that no product is left with a few rows.
    """
    order = sorted(range(len(counts)), key=lambda depth: kinds[depth])
    chunks: list[Chunk] = []
    place = 0
    for depth in order:
        count = counts[depth]
        size = -(-count // -(-count // most)) if count else 1
        for start in range(0, count, size):
            piece = Piece(depth, start, min(start + size, count))
            rows = piece.stop - piece.start
            last = chunks[-1] if chunks else None
            if last and kinds[last.pieces[0].depth] == kinds[depth] and place + rows - last.start <= most:
                chunks[-1] = Chunk([*last.pieces, piece], last.start, place + rows)
            else:
                chunks.append(Chunk([piece], place, place + rows))
            place += rows
    return order, chunks


def gradients_fit(entries: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether as many numbers, in at least float32, are no more than the logits of a chunk may be."""
    wide = torch.promote_types(dtype, torch.float32)
    return entries * wide.itemsize <= CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])


def depths_kept(
    counts: Sequence[int], chunk_tokens: int | None, vocabulary: int, dtype: torch.dtype, weights_known: bool
) -> int:
    """Of how many depths, from the first on, the gradients of the logits are kept on a CPU until the backward.

    Of all, where their logits are no more than those of a chunk may be. Otherwise of none where the weights of the
    depths are known, as nothing is computed twice there; else of as many as fit `KEPT_BYTES`.

    Args:
        counts: the rows of each depth.
        chunk_tokens: rows of a chunk, if they were given.
    """
    of_row, rows = vocabulary * dtype.itemsize, sum(counts)
    if rows <= chunk_tokens if chunk_tokens is not None else rows * of_row <= CHUNK_BYTES["cpu"]:
        return len(counts)
    if weights_known or chunk_tokens is not None:
        return 0
    return sum(rows * of_row <= KEPT_BYTES for rows in itertools.accumulate(counts))


def chunk_rows(chunk_tokens: int | None, weight: Tensor) -> int:
    """Rows of a chunk: `chunk_tokens`, or as many as the budget of bytes holds.

    Args:
        weight: `[V, d]`, in the dtype of the products.
    """
    if chunk_tokens is not None:
        return chunk_tokens
    (vocabulary, width), size = weight.shape, weight.dtype.itemsize
    rows = CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES["cuda"]) // (vocabulary * size)
    # Each chunk reads and writes all of dW. On a CPU that takes half as long as the product of 128 rows in bfloat16,
    # so the logits of a chunk may have a third of dW's bytes.
    least = width * max(size, 4) // (3 * size) if weight.device.type == "cpu" else 0
    return max(128, rows // 128 * 128, least // 128 * 128)
