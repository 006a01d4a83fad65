"""Which rows of the layerwise cross-entropy take part, and in which chunks: decided before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cdt_fast.errors import InputError

# Bytes of a chunk's logits: rows enough for the products to run at their rate (on a GPU thousands, also for a
# vocabulary of 128,256), and few beside the gradients.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}


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
        return tensor[self.start : self.stop]


def count_rows(targets: Tensor, vocabulary: int, ignore_index: int, mean: bool) -> Tensor:
    """How many tokens count, as a tensor on the device of the targets.

    Raises:
        InputError: the targets are on the CPU and one is out of range, or none counts and a mean is asked for. On a
            GPU looking would mean to wait.
    """
    counted = targets != ignore_index
    count = counted.sum()
    if targets.device.type == "cpu":
        wrong = counted & ((targets < 0) | (targets >= vocabulary))
        if wrong.any():
            raise InputError(
                f"targets must be in [0, {vocabulary}) or {ignore_index} (ignore_index), got {targets[wrong][0].item()}"
            )
        if mean and not count:
            raise InputError(f"targets must hold at least one token that is not {ignore_index} (ignore_index)")
    return count


def rows_of_depths(
    targets: Tensor, ignore_index: int, sample: Tensor | None, depths: int, device: torch.device
) -> list[Rows]:
    """Which tokens take part at each depth: `sample` at the inner ones, all at the last.

    Ignored tokens are left out where the targets are on the CPU. On a GPU their number is not known without waiting
    for it; there they stay in, the row kernel does not read them, and they cost their share of the products.
    """

    def rows(index: Tensor | None, factor: float) -> Rows:
        if targets.device.type == "cpu":
            among = targets if index is None else targets[index]
            counted = (among != ignore_index).nonzero().squeeze(1)
            if len(counted) < len(among):
                index = counted if index is None else index[counted]
        if index is None:
            return Rows(None, targets.to(device, non_blocking=True), factor)
        return Rows(index.to(device, non_blocking=True), targets[index].to(device, non_blocking=True), factor)

    last = rows(None, 1.0)
    if sample is None or depths == 1:
        return [last] * depths
    inner = rows(sample.to(targets.device), len(targets) / max(1, len(sample)))
    return [inner] * (depths - 1) + [last]


def plan(counts: Sequence[int], kinds: Sequence[object], most: int) -> list[list[Piece]]:
    """Chunks of at most `most` rows: parts of one depth, or whole depths of the same kind side by side.

    A depth with more rows than fit is cut into equal parts, so that no product is left with a few rows.
    """
    chunks: list[list[Piece]] = []
    room: dict[object, tuple[list[Piece], int]] = {}
    for depth, (count, kind) in enumerate(zip(counts, kinds, strict=True)):
        parts = -(-count // most)
        if parts > 1:
            size = -(-count // parts)
            chunks += [[Piece(depth, start, min(start + size, count))] for start in range(0, count, size)]
        elif parts:
            chunk, left = room.get(kind, ([], 0))
            if left < count:
                chunk, left = [], most
                chunks.append(chunk)
            chunk.append(Piece(depth, 0, count))
            room[kind] = chunk, left - count
    return chunks


def chunk_rows(chunk_tokens: int | None, vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a chunk: `chunk_tokens`, or as many as the budget of bytes holds."""
    if chunk_tokens is not None:
        return chunk_tokens
    rows = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (vocabulary * dtype.itemsize)
    return max(128, rows // 128 * 128)
