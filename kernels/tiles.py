"""Device functions that several kernels share: tiles of whole short sequences, masked loads, values that poison."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence_rows(tile, sequences, tokens, per_tile, lengths, BLOCK: tl.constexpr):
    """Rows of `per_tile` whole sequences: their offsets, which exist, which are no padding, and who may see whom.

    Returns the tile's first row (int64), and within the tile: row (int32), exists and counts `[BLOCK]`, visible
    `[BLOCK, BLOCK]` (query, key).
    """
    local = tl.arange(0, BLOCK)
    sequence = tile * per_tile + local // tokens
    exists = (local < per_tile * tokens) & (sequence < sequences)
    counts = exists
    if lengths is not None:
        counts = exists & (local % tokens < tl.load(lengths + sequence, mask=exists, other=0))
    first = tile.to(tl.int64) * per_tile * tokens
    visible = (sequence[:, None] == sequence[None, :]) & counts[:, None] & counts[None, :]
    return first, local, exists, counts, visible


@triton.jit
def load_rows(pointer, row, mask, start, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Columns `start … start + BLOCK_WIDTH` of the rows `row` of a contiguous `[rows, WIDTH]`; zero elsewhere."""
    column = start + tl.arange(0, BLOCK_WIDTH)
    return tl.load(
        pointer + row[:, None] * WIDTH + column[None, :], mask=mask[:, None] & (column < WIDTH)[None, :], other=0.0
    )


@triton.jit
def store_rows(pointer, row, mask, start, value, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """The counterpart of `load_rows`: `value` `[rows, BLOCK_WIDTH]` is rounded to the dtype stored."""
    column = start + tl.arange(0, BLOCK_WIDTH)
    tl.store(
        pointer + row[:, None] * WIDTH + column[None, :],
        value.to(pointer.dtype.element_ty),
        mask=mask[:, None] & (column < WIDTH)[None, :],
    )


@triton.jit
def finite(value):
    """`value` with zeros in place of NaN and infinities.

    Sequences share a tile, and the zero weight that keeps them apart does not hold back a NaN: 0 · NaN = NaN.
    """
    return tl.where(tl.abs(value) < float("inf"), value, 0.0).to(value.dtype)


@triton.jit
def bad_rows(value):
    """The rows `[rows]` of `value` in which something is not finite."""
    return tl.min((tl.abs(value) < float("inf")).to(tl.int32), 1) == 0


@triton.jit
def poisoned_rows(visible, bad):
    """The rows `[rows]` that see a row that is `bad`."""
    return tl.max((visible & bad[None, :]).to(tl.int32), 1) > 0


@triton.jit
def multiply_tile(weights, tile, visible, PRECISION: tl.constexpr):
    """`weights @ tile`, in which what is not finite reaches the rows that see it, and no others."""
    product = tl.dot(weights.to(tile.dtype), finite(tile), input_precision=PRECISION)
    return tl.where(poisoned_rows(visible, bad_rows(tile))[:, None], float("nan"), product)


@triton.jit
def softmax_tile(scores, visible):
    """Softmax over the visible keys of each row (in base 2: `scores` carry log2 e), and its log-sum-exp in base 2.

    A row that sees nothing gets weights of zero and a log-sum-exp of +∞, which makes its weights zero again in a
    backward that computes `exp2(scores − log-sum-exp)`. What a row does not see has no weight even where the row is
    NaN: the transposed weights would carry it to another sequence.
    """
    scores = tl.where(visible, scores, float("-inf"))
    peak = tl.max(scores, 1)
    seen = tl.max(visible.to(tl.int32), 1) > 0
    weights = tl.exp2(scores - tl.where(seen, peak, 0.0)[:, None])
    total = tl.where(seen, tl.sum(weights, 1), 1.0)
    weights = tl.where(visible, weights / total[:, None], 0.0)
    return weights, tl.where(seen, peak + tl.log2(total), float("inf"))
