"""Symmetric attention of long sequences: a block of rows streams over the tokens of its sequence.

    forward   S_ij = z_iᵀ z_j (− ½‖z_j‖² with `energy`),  O_i = Σ_j exp(β S_ij − λ_i) V_j,  λ_i the row's log-sum-exp
    backward  dZ_i = β Σ_j (dS_ij + dS_ji) z_j,  dV_i = Σ_j A_ji dO_j,  dS_ij = A_ij (dO_iᵀ V_j − δ_i),  δ_i = dO_iᵀ O_i

In 16 bits `dO_iᵀ V_j − δ_i` is a small difference of large numbers where the tokens of a sequence are much alike, and
two things would spoil it: O as it was rounded, and weights that were rounded for a product and do not add up to one. So
O is divided by the sum of the rounded weights, and what rounding took from it is kept as a remainder for δ.

The scores are symmetric, so one block of rows owns its rows of both gradients: S, dO_i V_jᵀ and its mirror V_i dO_jᵀ,
and the two sums: five products a pair of tiles, no second kernel and no atomics. With `values` None V is z.
"""

# pyright: reportGeneralTypeIssues=false
# The checker takes a `@triton.jit` function that is called in another for one that never returns.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.launch import Launch, block_width, card_of, ceil_div, dot_precision, math_mode
from cdt_fast.kernels.tiles import LN_2, LOG2_E, load_rows, store_rows


class Blocks(NamedTuple):
    """Shape of a block: the rows that it owns, the rows that it streams at a time, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# By family of cards and `math_mode`: the greatest width (of z and of the values), and the block. On tensor cores no
# two warps compute the same products, but where what avoids it spills or does not fit (256 columns; in 16 bits the
# backward of 128 columns on Hopper): the compiler gives each warp sixteen rows and all keys where tiles are no wider
# than high, else all rows and no less than eight keys.
FORWARD_BLOCKS = {
    "consumer": {
        "16 bits": [(64, Blocks(128, 64, 8, 2)), (128, Blocks(128, 64, 8, 2)), (256, Blocks(64, 64, 8, 1))],
        "tf32": [(64, Blocks(64, 32, 4, 2)), (128, Blocks(32, 32, 4, 1)), (256, Blocks(32, 32, 4, 1))],
        "ieee": [(64, Blocks(64, 32, 8, 2)), (128, Blocks(32, 32, 8, 1)), (256, Blocks(16, 16, 8, 1))],
    },
    "ampere": {
        "16 bits": [(64, Blocks(128, 64, 8, 3)), (128, Blocks(128, 64, 8, 3)), (256, Blocks(64, 64, 8, 2))],
        "tf32": [(64, Blocks(64, 32, 4, 2)), (128, Blocks(64, 32, 4, 2)), (256, Blocks(32, 64, 8, 1))],
        "ieee": [(64, Blocks(64, 32, 8, 2)), (128, Blocks(32, 32, 8, 2)), (256, Blocks(32, 16, 8, 1))],
    },
    "hopper": {
        "16 bits": [(64, Blocks(128, 64, 8, 3)), (128, Blocks(128, 64, 8, 3)), (256, Blocks(64, 64, 8, 2))],
        "tf32": [(64, Blocks(64, 32, 4, 2)), (128, Blocks(64, 32, 4, 2)), (256, Blocks(64, 32, 8, 2))],
        "ieee": [(64, Blocks(64, 32, 8, 2)), (128, Blocks(32, 32, 8, 1)), (256, Blocks(32, 16, 8, 2))],
    },
}
# At width 256 a single stage makes the consumer cards spill; two take 100,736 bytes of their 101,376.
BACKWARD_BLOCKS = {
    "consumer": {
        "16 bits": [(64, Blocks(64, 16, 4, 1)), (128, Blocks(32, 32, 4, 2)), (256, Blocks(32, 32, 8, 2))],
        "tf32": [(64, Blocks(32, 64, 8, 1)), (128, Blocks(16, 32, 4, 1)), (256, Blocks(16, 16, 4, 1))],
        "ieee": [(64, Blocks(32, 16, 8, 1)), (128, Blocks(16, 16, 8, 1)), (256, Blocks(16, 16, 8, 1))],
    },
    "ampere": {
        "16 bits": [(64, Blocks(64, 32, 4, 3)), (128, Blocks(64, 64, 8, 2)), (256, Blocks(32, 64, 8, 1))],
        "tf32": [(64, Blocks(32, 64, 8, 1)), (128, Blocks(32, 64, 8, 1)), (256, Blocks(16, 32, 8, 1))],
        "ieee": [(64, Blocks(32, 16, 8, 2)), (128, Blocks(16, 16, 8, 1)), (256, Blocks(16, 16, 8, 2))],
    },
    "hopper": {
        "16 bits": [(64, Blocks(64, 32, 4, 2)), (128, Blocks(64, 32, 8, 2)), (256, Blocks(32, 64, 8, 2))],
        "tf32": [(64, Blocks(64, 32, 4, 1)), (128, Blocks(32, 64, 8, 1)), (256, Blocks(32, 32, 8, 1))],
        "ieee": [(64, Blocks(32, 16, 8, 2)), (128, Blocks(16, 16, 8, 2)), (256, Blocks(16, 16, 8, 2))],
    },
}
WIDEST = 256


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
def pair_scores(own, other, own_norm, norms, key, mask, scale, PRECISION: tl.constexpr):
    """β S_ij and β S_ji of two tiles of z, both laid out `[own, other]`; `norms` is None without `energy`."""
    scores = tl.dot(own, tl.trans(other), input_precision=PRECISION)
    mirrored = scores
    if norms is not None:
        scores -= 0.5 * load_norms(norms, key, mask)[None, :]
        mirrored -= 0.5 * own_norm[:, None]
    return scores * scale, mirrored * scale


@triton.jit
def weigh(scores, log_sum):
    """`exp(scores − log_sum)`: the difference first, as log2 e would round a large score and a large sum apart."""
    return tl.exp2((scores - log_sum) * LOG2_E)


@triton.jit
def streaming_forward_kernel(
    z, values, norms, output, remainder, log_sum_exp, lengths,
    tokens, blocks_per_sequence, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, TIED: tl.constexpr,
):  # fmt: skip
    # z [sequences, tokens, WIDTH], values, output and remainder (may be None) [sequences, tokens, VALUE_WIDTH],
    # log_sum_exp [sequences, tokens]; norms [sequences, tokens] = ‖z‖² with `energy`, else None
    position, first, length = block_of_rows(tokens, blocks_per_sequence, lengths, ROWS)
    z = from_row(z, first, WIDTH)
    if values is not None:
        values = from_row(values, first, VALUE_WIDTH)
    counts = position < length
    own = load_rows(z, position, counts, 0, WIDTH, BLOCK_WIDTH)
    own_norm = tl.zeros((ROWS,), tl.float32)
    if norms is not None:
        norms = from_row(norms, first, 1)
        own_norm = load_norms(norms, position, counts)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    rounded_total = tl.zeros((ROWS,), tl.float32)
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
        chunk = other if TIED else load_rows(values, key, key < length, 0, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
        weights = weights.to(chunk.dtype)
        rounded_total = rounded_total * shrinking + tl.sum(weights.to(tl.float32), 1)
        result = tl.dot(weights, chunk, result * shrinking[:, None], input_precision=PRECISION)
        peak = new_peak
    result = tl.where(counts[:, None], result / rounded_total[:, None], 0.0)
    output = from_row(output, first, VALUE_WIDTH)
    store_rows(output, position, position < tokens, 0, result, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
    if remainder is not None:
        result -= result.to(output.dtype.element_ty).to(tl.float32)
        remainder = from_row(remainder, first, VALUE_WIDTH)
        store_rows(remainder, position, position < tokens, 0, result, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
    log_sum = tl.where(counts, peak + tl.log2(total) * LN_2, float("inf"))
    tl.store(from_row(log_sum_exp, first, 1) + position, log_sum, mask=position < tokens)


@triton.jit
def row_dots_kernel(
    left, right, remainder, output,
    rows,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # left, right and what is to be added to right, or None [rows, WIDTH] → output [rows], float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    one = load_rows(left, row, row < rows, 0, WIDTH, BLOCK_WIDTH).to(tl.float32)
    other = load_rows(right, row, row < rows, 0, WIDTH, BLOCK_WIDTH).to(tl.float32)
    if remainder is not None:
        other += load_rows(remainder, row, row < rows, 0, WIDTH, BLOCK_WIDTH).to(tl.float32)
    tl.store(output + row, tl.sum(one * other, 1), mask=row < rows)


@triton.jit
def streaming_backward_kernel(
    z, values, norms, grad_output, log_sum_exp, delta, grad_z, grad_values, lengths,
    tokens, blocks_per_sequence, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, TIED: tl.constexpr,
):  # fmt: skip
    # delta [sequences, tokens] = Σ dO ∘ O; grad_z and grad_values like z and values, either may be None
    position, first, length = block_of_rows(tokens, blocks_per_sequence, lengths, ROWS)
    z, grad_output = from_row(z, first, WIDTH), from_row(grad_output, first, VALUE_WIDTH)
    if values is not None:
        values = from_row(values, first, VALUE_WIDTH)
    log_sum_exp = from_row(log_sum_exp, first, 1)
    counts = position < length
    own = load_rows(z, position, counts, 0, WIDTH, BLOCK_WIDTH)
    own_norm = tl.zeros((ROWS,), tl.float32)
    if norms is not None:
        norms = from_row(norms, first, 1)
        own_norm = load_norms(norms, position, counts)
    own_log_sum = tl.load(log_sum_exp + position, mask=counts, other=float("inf"))
    if grad_z is not None:
        delta = from_row(delta, first, 1)
        own_delta = tl.load(delta + position, mask=counts, other=0.0)
        own_upstream = load_rows(grad_output, position, counts, 0, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
        own_values = own if TIED else load_rows(values, position, counts, 0, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
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
            chunk = other if TIED else load_rows(values, key, exists, 0, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
            grad_weights = tl.dot(own_upstream, tl.trans(chunk), input_precision=PRECISION)
            grad_scores = weights * (grad_weights - own_delta[:, None]) + grad_mirrored
            z_sum = tl.dot((grad_scores * scale).to(other.dtype), other, z_sum, input_precision=PRECISION)
            if norms is not None:
                mirrored_sum += tl.sum(grad_mirrored, 1)
            if TIED:
                z_sum = tl.dot(mirrored_weights.to(upstream.dtype), upstream, z_sum, input_precision=PRECISION)
        if grad_values is not None:
            value_sum = tl.dot(mirrored_weights.to(upstream.dtype), upstream, value_sum, input_precision=PRECISION)
    if grad_z is not None:
        if norms is not None:
            z_sum -= (scale * mirrored_sum)[:, None] * own.to(tl.float32)
        z_sum = tl.where(counts[:, None], z_sum, 0.0)
        grad_z = from_row(grad_z, first, WIDTH)
        store_rows(grad_z, position, position < tokens, 0, z_sum, WIDTH, BLOCK_WIDTH)
    if grad_values is not None:
        value_sum = tl.where(counts[:, None], value_sum, 0.0)
        grad_values = from_row(grad_values, first, VALUE_WIDTH)
        store_rows(grad_values, position, position < tokens, 0, value_sum, VALUE_WIDTH, BLOCK_VALUE_WIDTH)


def blocks_for(table: dict[str, dict[str, list[tuple[int, Blocks]]]], z: Tensor, width: int) -> Blocks:
    """The row of a block table for tensors like `z` whose widths are at most `width`."""
    for widest, blocks in table[card_of(z).family][math_mode(z)]:
        if width <= widest:
            return blocks
    raise ValueError(f"a block holds widths up to {WIDEST}, got {width}")


def streaming_forward(
    z: Tensor,
    values: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    energy: bool,
    blocks: Blocks | None = None,
    *,
    remainder: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Contiguous `z` `[B, T, d]`, `values` `[B, T, k]` (d, k ≤ `WIDEST`) → output `[B, T, k]`, log-sum-exp `[B, T]`.

    What rounding takes from the output is written to `remainder`, where one is given.
    """
    sequences, tokens, width = z.shape
    value_width = width if values is None else values.shape[-1]
    blocks = blocks or blocks_for(FORWARD_BLOCKS, z, max(width, value_width))
    output = z.new_empty((sequences, tokens, value_width))
    log_sum_exp = z.new_empty((sequences, tokens), dtype=torch.float32)
    blocks_per_sequence = ceil_div(tokens, blocks.rows)
    Launch(
        streaming_forward_kernel,
        (sequences * blocks_per_sequence,),
        {
            "z": z, "values": values, "norms": row_dots(z, z) if energy else None,
            "output": output, "remainder": remainder, "log_sum_exp": log_sum_exp, "lengths": lengths,
            "tokens": tokens, "blocks_per_sequence": blocks_per_sequence, "scale": scale,
        },
        {
            "WIDTH": width, "VALUE_WIDTH": value_width,
            "BLOCK_WIDTH": block_width(width), "BLOCK_VALUE_WIDTH": block_width(value_width),
            "ROWS": blocks.rows, "KEYS": blocks.keys, "PRECISION": dot_precision(z.dtype), "TIED": values is None,
        },
        blocks.warps,
        blocks.stages,
    ).run()  # fmt: skip
    return output, log_sum_exp


def row_dots(left: Tensor, right: Tensor, remainder: Tensor | None = None) -> Tensor:
    """`Σ left ∘ (right + remainder)` over the last dimension, `[..., width]` (contiguous) → `[...]` float32."""
    width = left.shape[-1]
    rows = left.shape[:-1].numel()
    output = left.new_empty(left.shape[:-1], dtype=torch.float32)
    held = block_width(width)
    block_rows = max(1, 2048 // held)
    Launch(
        row_dots_kernel,
        (ceil_div(rows, block_rows),),
        {"left": left, "right": right, "remainder": remainder, "output": output, "rows": rows},
        {"WIDTH": width, "BLOCK_WIDTH": held, "ROWS": block_rows},
        4,
        1,
    ).run()
    return output


def streaming_backward(
    z: Tensor,
    values: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    grad_output: Tensor,
    lengths: Tensor | None,
    scale: float,
    energy: bool,
    needs_z: bool = True,
    needs_values: bool = True,
    blocks: Blocks | None = None,
    *,
    remainder: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `z` and `values`, those that are needed; with `values` None all of it is in that of `z`.

    Without the `remainder` of the output an error of its rounding reaches the gradient of `z`.
    """
    sequences, tokens, width = z.shape
    value_width = grad_output.shape[-1]
    blocks = blocks or blocks_for(BACKWARD_BLOCKS, z, max(width, value_width))
    grad_z = torch.empty_like(z) if needs_z else None
    grad_values = torch.empty_like(values) if needs_values and values is not None else None
    blocks_per_sequence = ceil_div(tokens, blocks.rows)
    Launch(
        streaming_backward_kernel,
        (sequences * blocks_per_sequence,),
        {
            "z": z, "values": values, "norms": row_dots(z, z) if energy else None,
            "grad_output": grad_output, "log_sum_exp": log_sum_exp,
            "delta": row_dots(grad_output, output, remainder) if needs_z else None,
            "grad_z": grad_z, "grad_values": grad_values, "lengths": lengths,
            "tokens": tokens, "blocks_per_sequence": blocks_per_sequence, "scale": scale,
        },
        {
            "WIDTH": width, "VALUE_WIDTH": value_width,
            "BLOCK_WIDTH": block_width(width), "BLOCK_VALUE_WIDTH": block_width(value_width),
            "ROWS": blocks.rows, "KEYS": blocks.keys, "PRECISION": dot_precision(z.dtype), "TIED": values is None,
        },
        blocks.warps,
        blocks.stages,
    ).run()  # fmt: skip
    return grad_z, grad_values
