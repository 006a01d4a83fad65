"""Symmetric attention: short sequences are packed into tiles, long ones are streamed.

    S_ij = z_iᵀ z_j (− ½‖z_j‖² with `energy`),   A = softmax_rows(β S),   O = A V
    dA = dO Vᵀ,   dS = A ∘ (dA − rowsum(A ∘ dA)),   dZ = β (dS + dSᵀ) z,   dV = Aᵀ dO

**Packed**, up to 64 tokens: several whole sequences a tile. Its scores are one square of registers, block diagonal by a
mask, so the backward needs nothing but its inputs, and every width is taken in chunks.

**Streaming**: a block of rows reads the tokens of its sequence, with λ_i the row's log-sum-exp:

    O_i = Σ_j exp(β S_ij − λ_i) V_j,   dS_ij = A_ij (dO_iᵀ V_j − δ_i),   δ_i = dO_iᵀ O_i

In 16 bits `dO_iᵀ V_j − δ_i` is a small difference of large numbers if the tokens of a sequence are much alike. So O is
divided by the sum of the rounded weights, and what rounding took from it is kept as a remainder for δ. The scores are
symmetric, so one block of rows owns its rows of both gradients, in five products a pair of tiles, without atomics.

With `values` None V is z, and dZ is the sum of both gradients.
"""

# pyright: reportGeneralTypeIssues=false
# The checker takes a `@triton.jit` function that is called in another for one that never returns.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels._common import (
    LN_2,
    LOG2_E,
    Blocks,
    block_shapes,
    block_width,
    load_rows,
    rows_of_sequences,
    softmax_tile,
    store_rows,
    tile_scores,
)
from cdt_fast.ops.common import LONGEST

_packed, _streaming = block_shapes("ROWS", "COLUMNS"), block_shapes("ROWS", "KEYS")
# By the tokens of a sequence. With four warps 16-bit tiles of 64 rows spill, with eight they do not; 128 rows spill on
# consumer cards. Without wgmma 32 columns at a time spill 8 to 16 bytes in the forward, and 16 columns do with dz.
PACKED_BLOCKS = {
    "consumer": {64: _packed(64, 16, 8, 2)},
    "ampere": {64: _packed(64, 16, 8, 2)},
    "hopper": {64: _packed(64, 64, 8, 3)},
    "float32": {32: _packed(32, 64, 4, 2), 64: _packed(64, 16, 4, 2)},
}
PACKED_BACKWARD_BLOCKS = {
    **PACKED_BLOCKS,
    "consumer": {64: _packed(64, 32, 8, 3)},
    "ampere": {64: _packed(64, 32, 8, 2)},
}
# By the greater width, of z or of the values. No two warps compute the same products, except with 256 columns, where
# what avoids it spills or does not fit.
STREAMING_BLOCKS = {
    "consumer": {128: _streaming(128, 64, 8, 2), 256: _streaming(64, 32, 8, 2)},
    "ampere": {128: _streaming(128, 64, 8, 3), 256: _streaming(64, 32, 8, 3)},
    "hopper": {128: _streaming(128, 64, 8, 3), 256: _streaming(64, 64, 8, 2)},
    "float32": {64: _streaming(64, 32, 4, 2), 256: _streaming(32, 32, 4, 1)},
}
# At width 256 a single stage makes the consumer cards spill; two take 100,736 bytes of their 101,376. On Hopper eight
# warps with 64 rows of 128 columns compute twice, and one wgmma after the other.
STREAMING_BACKWARD_BLOCKS = {
    "consumer": {64: _streaming(64, 16, 4, 1), 128: _streaming(32, 32, 4, 2), 256: _streaming(32, 32, 8, 2)},
    "ampere": {64: _streaming(64, 32, 4, 3), 128: _streaming(64, 64, 8, 2), 256: _streaming(32, 64, 8, 1)},
    "hopper": {64: _streaming(128, 64, 8, 2), 128: _streaming(128, 32, 8, 2), 256: _streaming(32, 64, 8, 2)},
    "float32": {64: _streaming(32, 64, 8, 1), 128: _streaming(16, 32, 4, 1), 256: _streaming(16, 16, 4, 1)},
}
# Of sequences of at most SHORT tokens, which larger tiles pad to up to 1.6 times the work. Float32 has a smaller one
# already, and finds it first.
SHORT = 192
SHORT_BLOCKS = {family: {**rows, 128: _streaming(64, 32, 4, 2)} for family, rows in STREAMING_BLOCKS.items()}
SHORT_BACKWARD_BLOCKS = {
    **STREAMING_BACKWARD_BLOCKS,
    "hopper": {**STREAMING_BACKWARD_BLOCKS["hopper"], 64: _streaming(64, 32, 4, 2)},
}
BLOCKS = PACKED_BLOCKS, SHORT_BLOCKS, STREAMING_BLOCKS
BACKWARD_BLOCKS = PACKED_BACKWARD_BLOCKS, SHORT_BACKWARD_BLOCKS, STREAMING_BACKWARD_BLOCKS


@triton.jit(do_not_specialize=["sequences", "tokens", "per_tile"])
def packed_forward_kernel(
    z,  # [sequences, tokens, WIDTH]
    values,  # [sequences, tokens, VALUE_WIDTH]
    output,  # [sequences, tokens, VALUE_WIDTH]
    log_sum_exp,  # [sequences, tokens] float32
    lengths,  # [sequences] or None
    sequences,
    tokens,
    per_tile,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENERGY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start = tl.program_id(0) * per_tile
    end = tl.minimum(start + per_tile, sequences)
    first, row, exists, counts, visible = rows_of_sequences(start, end, tokens, lengths, ROWS)
    z, values, output = z + first * WIDTH, values + first * VALUE_WIDTH, output + first * VALUE_WIDTH
    scores = tile_scores(z, row, counts, scale, WIDTH, COLUMNS, ENERGY, PRECISION)
    attention, log_sum = softmax_tile(scores, visible)
    tl.store(log_sum_exp + first + row, log_sum * LN_2, mask=exists)
    for start in range(0, VALUE_WIDTH, COLUMNS):
        chunk = load_rows(values, row, counts, start, VALUE_WIDTH, COLUMNS)
        result = tl.dot(attention.to(chunk.dtype), chunk, input_precision=PRECISION)
        store_rows(output, row, exists, start, result, VALUE_WIDTH, COLUMNS)


@triton.jit(do_not_specialize=["sequences", "tokens", "per_tile"])
def packed_backward_kernel(
    z,  # [sequences, tokens, WIDTH]
    values,  # [sequences, tokens, VALUE_WIDTH]
    grad_output,  # [sequences, tokens, VALUE_WIDTH]
    grad_z,  # [sequences, tokens, WIDTH] or None
    grad_values,  # [sequences, tokens, VALUE_WIDTH] or None
    lengths,  # [sequences] or None
    sequences,
    tokens,
    per_tile,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENERGY: tl.constexpr,
    PRECISION: tl.constexpr,
    TIED: tl.constexpr,
):
    start = tl.program_id(0) * per_tile
    end = tl.minimum(start + per_tile, sequences)
    first, row, exists, counts, visible = rows_of_sequences(start, end, tokens, lengths, ROWS)
    z, values, grad_output = z + first * WIDTH, values + first * VALUE_WIDTH, grad_output + first * VALUE_WIDTH
    scores = tile_scores(z, row, counts, scale, WIDTH, COLUMNS, ENERGY, PRECISION)
    attention, _ = softmax_tile(scores, visible)
    # Rounded here, and transposed where it is used: whole, it spills beside values of 1024 columns.
    low = attention.to(grad_output.dtype.element_ty)

    if grad_z is not None:
        grad_attention = tl.zeros((ROWS, ROWS), tl.float32)
        for start in range(0, VALUE_WIDTH, COLUMNS):
            upstream = load_rows(grad_output, row, counts, start, VALUE_WIDTH, COLUMNS)
            chunk = load_rows(values, row, counts, start, VALUE_WIDTH, COLUMNS)
            grad_attention = tl.dot(upstream, tl.trans(chunk), grad_attention, input_precision=PRECISION)
        grad_scores = attention * (grad_attention - tl.sum(attention * grad_attention, 1)[:, None])
        mirrored = tl.trans(grad_scores)
        symmetric = grad_scores + mirrored
        if ENERGY:
            place = tl.arange(0, ROWS)
            symmetric -= tl.where(place[:, None] == place[None, :], tl.sum(mirrored, 1)[:, None], 0.0)
        symmetric = (symmetric * scale).to(z.dtype.element_ty)
        for start in range(0, WIDTH, COLUMNS):
            chunk = load_rows(z, row, counts, start, WIDTH, COLUMNS)
            gradient = tl.dot(symmetric.to(chunk.dtype), chunk, input_precision=PRECISION)
            if TIED:
                upstream = load_rows(grad_output, row, counts, start, WIDTH, COLUMNS)
                gradient += tl.dot(tl.trans(low), upstream, input_precision=PRECISION)
            store_rows(grad_z + first * WIDTH, row, exists, start, gradient, WIDTH, COLUMNS)

    if grad_values is not None:
        for start in range(0, VALUE_WIDTH, COLUMNS):
            upstream = load_rows(grad_output, row, counts, start, VALUE_WIDTH, COLUMNS)
            gradient = tl.dot(tl.trans(low), upstream, input_precision=PRECISION)
            store_rows(grad_values + first * VALUE_WIDTH, row, exists, start, gradient, VALUE_WIDTH, COLUMNS)


@triton.jit
def block_of_rows(tokens, blocks_per_sequence, lengths, ROWS: tl.constexpr):
    """Return this block's positions `[ROWS]` in its sequence, whose first row (int64) and how many tokens count."""
    sequence = tl.program_id(0) // blocks_per_sequence
    start = (tl.program_id(0) % blocks_per_sequence) * ROWS
    position = start + tl.arange(0, ROWS)
    length = tokens
    if lengths is not None:
        # Clamped before it is narrowed: a length may be of 64 bits. For rows that are all padding no token counts.
        length = tl.minimum(tl.load(lengths + sequence), tokens)
        length = tl.where(start < length, length, 0).to(tl.int32)
    return position, sequence.to(tl.int64) * tokens, length


@triton.jit
def weigh(scores, log_sum):
    """Compute `exp(scores − log_sum)`: the difference first, as log2 e would round two large numbers apart."""
    return tl.exp2((scores - log_sum) * LOG2_E)


@triton.jit
def pair_scores(own, other, own_norm, norms, key, mask, scale, PRECISION: tl.constexpr):
    """Compute β S_ij and β S_ji of two tiles of z, both laid out `[own, other]`; `norms` is None without `energy`."""
    scores = tl.dot(own, tl.trans(other), input_precision=PRECISION)
    mirrored = scores
    if norms is not None:
        scores -= 0.5 * tl.load(norms + key, mask=mask, other=0.0)[None, :]
        mirrored -= 0.5 * own_norm[:, None]
    return scores * scale, mirrored * scale


@triton.jit(do_not_specialize=["blocks_per_sequence"])
def streaming_forward_kernel(
    z,  # [sequences, tokens, WIDTH]
    values,  # [sequences, tokens, VALUE_WIDTH], or None for z
    norms,  # [sequences, tokens] float32, ‖z‖² with `energy`, else None
    output,  # [sequences, tokens, VALUE_WIDTH]
    remainder,  # [sequences, tokens, VALUE_WIDTH] or None
    log_sum_exp,  # [sequences, tokens] float32
    lengths,  # [sequences] or None
    tokens,
    blocks_per_sequence,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    position, first, length = block_of_rows(tokens, blocks_per_sequence, lengths, ROWS)
    z += first * WIDTH
    if values is not None:
        values += first * VALUE_WIDTH
    counts = position < length
    own = load_rows(z, position, counts, 0, WIDTH, BLOCK_WIDTH)
    own_norm = tl.zeros((ROWS,), tl.float32)
    if norms is not None:
        norms += first
        own_norm = tl.load(norms + position, mask=counts, other=0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total, rounded_total = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, BLOCK_VALUE_WIDTH), tl.float32)
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        other = load_rows(z, key, key < length, 0, WIDTH, BLOCK_WIDTH)
        scores, _ = pair_scores(own, other, own_norm, norms, key, key < length, scale, PRECISION)
        scores = tl.where((key < length)[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = weigh(scores, new_peak[:, None])
        shrinking = weigh(peak, new_peak)
        total = total * shrinking + tl.sum(weights, 1)
        chunk = other if values is None else load_rows(values, key, key < length, 0, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
        weights = weights.to(chunk.dtype)
        rounded_total = rounded_total * shrinking + tl.sum(weights.to(tl.float32), 1)
        result = tl.dot(weights, chunk, result * shrinking[:, None], input_precision=PRECISION)
        peak = new_peak
    result = tl.where(counts[:, None], result / rounded_total[:, None], 0.0)
    output += first * VALUE_WIDTH
    store_rows(output, position, position < tokens, 0, result, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
    if remainder is not None:
        result -= result.to(output.dtype.element_ty).to(tl.float32)
        remainder += first * VALUE_WIDTH
        store_rows(remainder, position, position < tokens, 0, result, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
    log_sum = tl.where(counts, peak + tl.log2(total) * LN_2, float("inf"))
    tl.store(log_sum_exp + first + position, log_sum, mask=position < tokens)


@triton.jit(do_not_specialize=["rows"])
def row_dots_kernel(
    left,  # [rows, WIDTH]
    right,  # [rows, WIDTH]
    remainder,  # [rows, WIDTH], added to right, or None
    output,  # [rows] float32
    rows,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    one = load_rows(left, row, row < rows, 0, WIDTH, BLOCK_WIDTH).to(tl.float32)
    other = load_rows(right, row, row < rows, 0, WIDTH, BLOCK_WIDTH).to(tl.float32)
    if remainder is not None:
        other += load_rows(remainder, row, row < rows, 0, WIDTH, BLOCK_WIDTH).to(tl.float32)
    tl.store(output + row, tl.sum(one * other, 1), mask=row < rows)


@triton.jit(do_not_specialize=["blocks_per_sequence"])
def streaming_backward_kernel(
    z,  # [sequences, tokens, WIDTH]
    values,  # [sequences, tokens, VALUE_WIDTH], or None for z
    norms,  # [sequences, tokens] float32, ‖z‖² with `energy`, else None
    grad_output,  # [sequences, tokens, VALUE_WIDTH]
    log_sum_exp,  # [sequences, tokens] float32
    delta,  # [sequences, tokens] float32, Σ dO ∘ O, read with grad_z
    grad_z,  # [sequences, tokens, WIDTH] or None
    grad_values,  # [sequences, tokens, VALUE_WIDTH] or None
    lengths,  # [sequences] or None
    tokens,
    blocks_per_sequence,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    position, first, length = block_of_rows(tokens, blocks_per_sequence, lengths, ROWS)
    z, grad_output = z + first * WIDTH, grad_output + first * VALUE_WIDTH
    if values is not None:
        values += first * VALUE_WIDTH
    log_sum_exp += first
    counts = position < length
    own = load_rows(z, position, counts, 0, WIDTH, BLOCK_WIDTH)
    own_norm = tl.zeros((ROWS,), tl.float32)
    if norms is not None:
        norms += first
        own_norm = tl.load(norms + position, mask=counts, other=0.0)
    own_log_sum = tl.load(log_sum_exp + position, mask=counts, other=float("inf"))
    if grad_z is not None:
        delta += first
        own_delta = tl.load(delta + position, mask=counts, other=0.0)
        own_upstream = load_rows(grad_output, position, counts, 0, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
        own_values = own if values is None else load_rows(values, position, counts, 0, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
        z_sum = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
        mirrored_sum = tl.zeros((ROWS,), tl.float32)
    if grad_values is not None:
        value_sum = tl.zeros((ROWS, BLOCK_VALUE_WIDTH), tl.float32)
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        exists = key < length
        other = load_rows(z, key, exists, 0, WIDTH, BLOCK_WIDTH)
        upstream = load_rows(grad_output, key, exists, 0, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
        log_sum = tl.load(log_sum_exp + key, mask=exists, other=float("inf"))
        scores, mirrored = pair_scores(own, other, own_norm, norms, key, exists, scale, PRECISION)
        mirrored_weights = weigh(mirrored, log_sum[None, :])
        if grad_z is not None:
            # The mirrored half first: the other way round sm_90 spills.
            grad_mirrored = tl.dot(own_values, tl.trans(upstream), input_precision=PRECISION)
            other_delta = tl.load(delta + key, mask=exists, other=0.0)
            grad_mirrored = mirrored_weights * (grad_mirrored - other_delta[None, :])
            weights = tl.where(exists[None, :], weigh(scores, own_log_sum[:, None]), 0.0)
            chunk = other if values is None else load_rows(values, key, exists, 0, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
            grad_weights = tl.dot(own_upstream, tl.trans(chunk), input_precision=PRECISION)
            grad_scores = weights * (grad_weights - own_delta[:, None]) + grad_mirrored
            z_sum = tl.dot((grad_scores * scale).to(other.dtype), other, z_sum, input_precision=PRECISION)
            if norms is not None:
                mirrored_sum += tl.sum(grad_mirrored, 1)
            if values is None:
                z_sum = tl.dot(mirrored_weights.to(upstream.dtype), upstream, z_sum, input_precision=PRECISION)
        if grad_values is not None:
            value_sum = tl.dot(mirrored_weights.to(upstream.dtype), upstream, value_sum, input_precision=PRECISION)
    if grad_z is not None:
        if norms is not None:
            z_sum -= (scale * mirrored_sum)[:, None] * own.to(tl.float32)
        z_sum = tl.where(counts[:, None], z_sum, 0.0)
        grad_z += first * WIDTH
        store_rows(grad_z, position, position < tokens, 0, z_sum, WIDTH, BLOCK_WIDTH)
    if grad_values is not None:
        value_sum = tl.where(counts[:, None], value_sum, 0.0)
        grad_values += first * VALUE_WIDTH
        store_rows(grad_values, position, position < tokens, 0, value_sum, VALUE_WIDTH, BLOCK_VALUE_WIDTH)


# The launchers take contiguous tensors. Packed, a sequence has at most 64 tokens; else the widths are at most 256.
def forward(
    z: Tensor,
    values: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    energy: bool,
    keep_remainder: bool,
    blocks: Blocks,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the output `[B, T, k]`, the rows' log-sum-exp `[B, T]` and, if it is kept, what rounding took off."""
    sequences, tokens, width = z.shape
    value_width = (z if values is None else values).shape[-1]
    output = torch.empty_like(z if values is None else values)
    remainder = torch.empty_like(output) if keep_remainder else None
    log_sum_exp = z.new_empty(z.shape[:-1], dtype=torch.float32)
    if sequences and 0 < tokens <= LONGEST:
        per_tile = blocks["ROWS"] // tokens
        packed_forward_kernel[(triton.cdiv(sequences, per_tile),)](
            *(z, z if values is None else values, output, log_sum_exp, lengths),
            *(sequences, tokens, per_tile, scale),
            WIDTH=width,
            VALUE_WIDTH=value_width,
            ENERGY=energy,
            **blocks,
        )
    elif sequences and tokens:
        blocks_per_sequence = triton.cdiv(tokens, blocks["ROWS"])
        norms = row_dots(z, z) if energy else None
        streaming_forward_kernel[(sequences * blocks_per_sequence,)](
            *(z, values, norms, output, remainder, log_sum_exp, lengths),
            *(tokens, blocks_per_sequence, scale),
            WIDTH=width,
            VALUE_WIDTH=value_width,
            BLOCK_WIDTH=block_width(width),
            BLOCK_VALUE_WIDTH=block_width(value_width),
            **blocks,
        )
    return output, log_sum_exp, remainder


def backward(
    grad_output: Tensor,
    z: Tensor,
    values: Tensor | None,
    lengths: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    remainder: Tensor | None,
    scale: float,
    energy: bool,
    needs_z: bool,
    needs_values: bool,
    blocks: Blocks,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of z and of the values, those that are needed. Packed, nothing that the forward has found is
    read. Streaming without a remainder, the error of the output's rounding reaches the gradient of z."""
    sequences, tokens, width = z.shape
    value_width = grad_output.shape[-1]
    grad_z = torch.empty_like(z) if needs_z else None
    grad_values = torch.empty_like(values) if needs_values and values is not None else None
    if sequences and 0 < tokens <= LONGEST:
        per_tile = blocks["ROWS"] // tokens
        packed_backward_kernel[(triton.cdiv(sequences, per_tile),)](
            *(z, z if values is None else values, grad_output, grad_z, grad_values, lengths),
            *(sequences, tokens, per_tile, scale),
            WIDTH=width,
            VALUE_WIDTH=value_width,
            ENERGY=energy,
            TIED=values is None,
            **blocks,
        )
    elif sequences and tokens:
        blocks_per_sequence = triton.cdiv(tokens, blocks["ROWS"])
        norms = row_dots(z, z) if energy else None
        delta = row_dots(grad_output, output, remainder) if needs_z else None
        streaming_backward_kernel[(sequences * blocks_per_sequence,)](
            *(z, values, norms, grad_output, log_sum_exp, delta, grad_z, grad_values, lengths),
            *(tokens, blocks_per_sequence, scale),
            WIDTH=width,
            VALUE_WIDTH=value_width,
            BLOCK_WIDTH=block_width(width),
            BLOCK_VALUE_WIDTH=block_width(value_width),
            **blocks,
        )
    return grad_z, grad_values


def row_dots(left: Tensor, right: Tensor, remainder: Tensor | None = None) -> Tensor:
    """Sum `left ∘ (right + remainder)` over the last dimension, `[..., width]` (contiguous) → `[...]` float32."""
    output, width = left.new_empty(left.shape[:-1], dtype=torch.float32), left.shape[-1]
    held = block_width(width)
    height = max(1, 2048 // held)
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    row_dots_kernel[(triton.cdiv(output.numel(), height),)](
        *(left, right, remainder, output, output.numel()), WIDTH=width, BLOCK_WIDTH=held, ROWS=height, **options
    )
    return output
