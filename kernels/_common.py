"""Device functions that several kernels share: tiles of sequences, masked loads, softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
Blocks = Mapping[str, Any]  # a block's shape and launch options


def block_shapes(*names: str) -> Callable[..., dict[str, int]]:
    """Return a function of the sizes of these names, warps and stages, that makes launch options of them."""
    return lambda *sizes: dict(zip((*names, "num_warps", "num_stages"), sizes, strict=True))


def block_width(width: int) -> int:
    """Return the columns of a block that holds the width."""
    return max(16, triton.next_power_of_2(width))


def sizes_of(dictionary: Any) -> dict[str, int]:
    """Return a kernel's constants that are the sizes of a dictionary `[n, m]`."""
    width, code_width = dictionary.shape
    return {"CODE_WIDTH": code_width, "WIDTH": width, "BLOCK_WIDTH": block_width(width)}


def programs_of(sequences: int, tokens: int, processors: int, blocks: Blocks) -> int:
    """Return in how many programs every block gets as many whole sequences as any other, or one fewer, and the last
    wave is full: a multiprocessor holds one block of eight warps, by its registers."""
    if not tokens:
        return 0
    wave = processors * max(1, 8 // blocks["num_warps"])
    programs = triton.cdiv(sequences, blocks["ROWS"] // tokens)
    return min(triton.cdiv(programs, wave) * wave, sequences)


@triton.jit
def block_share(sequences, programs):
    """Return the first sequence of this block, one of `programs`, and of the next: as many as others, or one fewer."""
    program = tl.program_id(0).to(tl.int64)
    begin, end = program * sequences // programs, (program + 1) * sequences // programs
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def rows_of_sequences(start, end, tokens, lengths, BLOCK: tl.constexpr):
    """Find the rows of the sequences `start … end`: their offsets, which exist, which are no padding, who may see whom.
    Returns the tile's first row (int64), and within the tile: row (int32), exists and counts `[BLOCK]`, visible
    `[BLOCK, BLOCK]` (query, key)."""
    local = tl.arange(0, BLOCK)
    sequence = start + local // tokens
    exists = sequence < end
    counts = exists
    if lengths is not None:
        counts = exists & (local % tokens < tl.load(lengths + sequence, mask=exists, other=0))
    first = start.to(tl.int64) * tokens
    visible = (sequence[:, None] == sequence[None, :]) & counts[:, None] & counts[None, :]
    return first, local, exists, counts, visible


@triton.jit
def load_rows(pointer, row, mask, start, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Load columns `start … start + BLOCK_WIDTH` of the rows `row` of a contiguous `[rows, WIDTH]`; zero elsewhere."""
    column = start + tl.arange(0, BLOCK_WIDTH)
    inside = mask[:, None] & (column < WIDTH)[None, :]
    return tl.load(pointer + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)


@triton.jit
def load_atoms(
    dictionary, start, CODE_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ATOMS: tl.constexpr
):
    """Load `ATOMS` columns of a contiguous `[WIDTH, CODE_WIDTH]`, as `[BLOCK_WIDTH, ATOMS]`; zero elsewhere."""
    row = tl.arange(0, BLOCK_WIDTH)
    return load_rows(dictionary, row, row < WIDTH, start, CODE_WIDTH, ATOMS)


@triton.jit
def store_rows(pointer, row, mask, start, value, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Undo `load_rows`: `value` `[rows, BLOCK_WIDTH]` is rounded to the dtype stored."""
    column = start + tl.arange(0, BLOCK_WIDTH)
    inside = mask[:, None] & (column < WIDTH)[None, :]
    tl.store(pointer + row[:, None] * WIDTH + column[None, :], value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def softmax_tile(scores, visible):
    """Compute the softmax over the visible keys of each row (`scores` carry log2 e), and its log-sum-exp in base 2. A
    row that sees nothing gets weights of zero and a log-sum-exp of +∞, which makes its weights zero again in a backward
    that computes `exp2(scores − log-sum-exp)`. Sequences share a tile, so a NaN reaches its neighbors in it."""
    scores = tl.where(visible, scores, float("-inf"))
    peak = tl.max(scores, 1)
    seen = tl.max(visible.to(tl.int32), 1) > 0
    weights = tl.exp2(scores - tl.where(seen, peak, 0.0)[:, None])
    total = tl.where(seen, tl.sum(weights, 1), 1.0)
    return weights / total[:, None], tl.where(seen, peak + tl.log2(total), float("inf"))


@triton.jit
def tile_scores(
    z, row, counts, scale, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ENERGY: tl.constexpr, PRECISION: tl.constexpr
):
    """Compute β S of a tile, times log2 e, `[ROWS, ROWS]` in float32."""
    ROWS: tl.constexpr = row.shape[0]
    scores = tl.zeros((ROWS, ROWS), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        chunk = load_rows(z, row, counts, start, WIDTH, COLUMNS)
        scores = tl.dot(chunk, tl.trans(chunk), scores, input_precision=PRECISION)
    if ENERGY:
        # The norms are the diagonal. Summed from the chunks they cost 120 bytes a thread in spilled registers.
        place = tl.arange(0, ROWS)
        scores -= 0.5 * tl.sum(tl.where(place[:, None] == place[None, :], scores, 0.0), 0)[None, :]
    return scores * (scale * LOG2_E)
