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

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.arguments import SymmetricAttentionArguments, SymmetricAttentionBackwardArguments
from cdt_fast.kernels.blocks import (
    SYMMETRIC_ATTENTION_STREAMING,
    SYMMETRIC_ATTENTION_STREAMING_BACKWARD,
    Blocks,
)
from cdt_fast.kernels.launch import Launch, block_width, ceil_div, whole_tiles
from cdt_fast.kernels.tiles import LN_2, block_of_rows, from_row, load_norms, load_rows, store_rows, weigh


@triton.jit
def pair_scores(own, other, own_norm, norms, key, mask, scale, PRECISION: tl.constexpr):
    """β S_ij and β S_ji of two tiles of z, both laid out `[own, other]`; `norms` is None without `energy`."""
    scores = tl.dot(own, tl.trans(other), input_precision=PRECISION)
    mirrored = scores
    if norms is not None:
        scores -= 0.5 * load_norms(norms, key, mask)[None, :]
        mirrored -= 0.5 * own_norm[:, None]
    return scores * scale, mirrored * scale


@triton.jit(do_not_specialize=["blocks_per_sequence"])
def streaming_forward_kernel(
    z,  # [sequences, tokens, WIDTH]
    values,  # [sequences, tokens, VALUE_WIDTH], or None where TIED
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
    TIED: tl.constexpr,
):
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
    values,  # [sequences, tokens, VALUE_WIDTH], or None where TIED
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
    TIED: tl.constexpr,
):
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


def _pairs(launch: Launch) -> float:
    """Pairs of tokens in whole tiles."""
    return float(launch.grid[0]) * launch.blocks.rows * whole_tiles(launch.arguments["tokens"], launch.blocks.keys)


def _forward_work(launch: Launch) -> float:
    """Scores and their product with the values."""
    return 2.0 * _pairs(launch) * (launch.constants["BLOCK_WIDTH"] + launch.constants["BLOCK_VALUE_WIDTH"])


def _backward_work(launch: Launch) -> float:
    """The scores; both halves of dO Vᵀ and the product that gives dz (tied two); the one that gives dV."""
    width, value_width = launch.constants["BLOCK_WIDTH"], launch.constants["BLOCK_VALUE_WIDTH"]
    of_z = 0 if launch.arguments["grad_z"] is None else 2 * value_width + width * (1 + launch.constants["TIED"])
    of_values = 0 if launch.arguments["grad_values"] is None else value_width
    return 2.0 * _pairs(launch) * (width + of_z + of_values)


def streaming_forward(
    attention: SymmetricAttentionArguments, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output `[B, T, k]`, the rows' log-sum-exp `[B, T]`, and the output's remainder where it is kept, in 16 bits.

    The widths d and k are at most `WIDEST`.
    """
    z = attention.z
    output = torch.empty_like(z if attention.values is None else attention.values)
    remainder = torch.empty_like(output) if attention.keeps and z.element_size() == 2 else None
    log_sum_exp = z.new_empty(z.shape[:-1], dtype=torch.float32)
    blocks = blocks or SYMMETRIC_ATTENTION_STREAMING.blocks(z, _widest(attention))
    written = {"output": output, "remainder": remainder, "log_sum_exp": log_sum_exp}
    _launch(streaming_forward_kernel, attention, blocks, written, _forward_work)
    return output, log_sum_exp, remainder


def streaming_backward(
    attention: SymmetricAttentionBackwardArguments, blocks: Blocks | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of z and of the values, those that are needed.

    Where no remainder of the output was kept, an error of its rounding reaches the gradient of z.
    """
    z, values, grad_output = attention.z, attention.values, attention.grad_output
    grad_z = torch.empty_like(z) if attention.needs_z else None
    grad_values = torch.empty_like(values) if attention.needs_values and values is not None else None
    blocks = blocks or SYMMETRIC_ATTENTION_STREAMING_BACKWARD.blocks(z, _widest(attention))
    remainder = attention.kept if attention.kept.dim() > 1 else None
    tensors = {
        "delta": row_dots(grad_output, attention.output, remainder) if attention.needs_z else None,
        "grad_z": grad_z,
        "grad_values": grad_values,
    }
    _launch(streaming_backward_kernel, attention, blocks, tensors, _backward_work)
    return grad_z, grad_values


def _widest(attention: SymmetricAttentionArguments) -> int:
    return max(attention.z.shape[-1], 0 if attention.values is None else attention.values.shape[-1])


def _launch(
    kernel: object,
    attention: SymmetricAttentionArguments,
    blocks: Blocks,
    tensors: dict[str, Tensor | None],
    work: Callable[[Launch], float],
) -> None:
    """A launch over the blocks of rows of every sequence."""
    z, values = attention.z, attention.values
    sequences, tokens, width = z.shape
    value_width = width if values is None else values.shape[-1]
    blocks_per_sequence = ceil_div(tokens, blocks.rows)
    Launch(
        kernel,
        (sequences * blocks_per_sequence,),
        blocks,
        {
            "norms": row_dots(z, z) if attention.energy else None,
            **tensors,
            "tokens": tokens,
            "blocks_per_sequence": blocks_per_sequence,
        },
        {
            "WIDTH": width,
            "VALUE_WIDTH": value_width,
            "BLOCK_WIDTH": block_width(width),
            "BLOCK_VALUE_WIDTH": block_width(value_width),
            "TIED": values is None,
        },
        attention,
        work=work,
    ).run()


def row_dots(left: Tensor, right: Tensor, remainder: Tensor | None = None) -> Tensor:
    """`Σ left ∘ (right + remainder)` over the last dimension, `[..., width]` (contiguous) → `[...]` float32."""
    width = left.shape[-1]
    rows = left.shape[:-1].numel()
    output = left.new_empty(left.shape[:-1], dtype=torch.float32)
    held = block_width(width)
    blocks = Blocks(rows=max(1, 2048 // held))
    Launch(
        row_dots_kernel,
        (ceil_div(rows, blocks.rows),),
        blocks,
        {"left": left, "right": right, "remainder": remainder, "output": output, "rows": rows},
        {"WIDTH": width, "BLOCK_WIDTH": held},
    ).run()
    return output
