"""Device functions that several kernels share: tiles of sequences, masked loads, softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def block_share(sequences, programs):
    """The first sequence of this block of `programs`, and of the next one: as many as the others', or one fewer."""
    program = tl.program_id(0).to(tl.int64)
    begin, end = program * sequences // programs, (program + 1) * sequences // programs
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def sequence_rows(tile, sequences, tokens, per_tile, lengths, BLOCK: tl.constexpr):
    """`rows_of_sequences` of the tile of that number, of `per_tile` whole sequences."""
    start = tile * per_tile
    return rows_of_sequences(start, tl.minimum(start + per_tile, sequences), tokens, lengths, BLOCK)


@triton.jit
def rows_of_sequences(start, end, tokens, lengths, BLOCK: tl.constexpr):
    """Rows of the whole sequences `start … end`: their offsets, which exist, which are no padding, who may see whom.

    Returns the tile's first row (int64), and within the tile: row (int32), exists and counts `[BLOCK]`, visible
    `[BLOCK, BLOCK]` (query, key).
    """
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
def softmax_tile(scores, visible):
    """Softmax over the visible keys of each row (in base 2: `scores` carry log2 e), and its log-sum-exp in base 2.

    A row that sees nothing gets weights of zero and a log-sum-exp of +∞, which makes its weights zero again in a
    backward that computes `exp2(scores − log-sum-exp)`. Sequences share a tile, so a NaN reaches its neighbors in it.
    """
    scores = tl.where(visible, scores, float("-inf"))
    peak = tl.max(scores, 1)
    seen = tl.max(visible.to(tl.int32), 1) > 0
    weights = tl.exp2(scores - tl.where(seen, peak, 0.0)[:, None])
    total = tl.where(seen, tl.sum(weights, 1), 1.0)
    return weights / total[:, None], tl.where(seen, peak + tl.log2(total), float("inf"))


@triton.jit
def nonlinearity(value, threshold, NONLINEARITY: tl.constexpr):
    """φ, written so that NaN, for which every comparison is false, stays NaN."""
    if NONLINEARITY == "relu":
        value = tl.where(value <= 0, 0.0, value)
    elif NONLINEARITY == "soft_threshold":
        shrunk = tl.where(value > 0, value - threshold, value + threshold)
        value = tl.where(tl.abs(value) <= threshold, 0.0, shrunk)
    elif NONLINEARITY == "hard_threshold":
        value = tl.where(tl.abs(value) <= threshold, 0.0, value)
    return value


@triton.jit
def tile_scores(
    z,
    row,
    counts,
    scale,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENERGY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """β S of a tile, times log2 e, `[ROWS, ROWS]` in float32."""
    scores = tl.zeros((ROWS, ROWS), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        chunk = load_rows(z, row, counts, start, WIDTH, COLUMNS)
        scores = tl.dot(chunk, tl.trans(chunk), scores, input_precision=PRECISION)
    if ENERGY:
        # The norms are the diagonal. Summed from the chunks they cost 120 bytes a thread in spilled registers.
        place = tl.arange(0, ROWS)
        scores -= 0.5 * tl.sum(tl.where(place[:, None] == place[None, :], scores, 0.0), 0)[None, :]
    return scores * (scale * LOG2_E)


@triton.jit
def block_of_rows(tokens, blocks_per_sequence, lengths, ROWS: tl.constexpr):
    """This block's positions `[ROWS]` in its sequence, the sequence's first row (int64) and how many tokens count."""
    sequence = tl.program_id(0) // blocks_per_sequence
    position = (tl.program_id(0) % blocks_per_sequence) * ROWS + tl.arange(0, ROWS)
    length = tokens
    if lengths is not None:
        # Clamped before it is narrowed: a length may be of 64 bits.
        length = tl.maximum(tl.minimum(tl.load(lengths + sequence), tokens), 0).to(tl.int32)
    return position, sequence.to(tl.int64) * tokens, length


# No device function takes a None that it would hand back: Triton 3.6 knows None as an argument of a kernel alone.
@triton.jit
def from_row(pointer, first, WIDTH: tl.constexpr):
    """The pointer moved to row `first` of `[rows, WIDTH]`: inside a sequence 32 bits are enough."""
    return pointer + first * WIDTH


@triton.jit
def load_norms(norms, row, mask):
    """‖z‖² of the rows, `[rows]`."""
    return tl.load(norms + row, mask=mask, other=0.0)


@triton.jit
def weigh(scores, log_sum):
    """`exp(scores − log_sum)`: the difference first, as log2 e would round a large score and a large sum apart."""
    return tl.exp2((scores - log_sum) * LOG2_E)
