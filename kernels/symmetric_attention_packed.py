"""Symmetric attention of short sequences, several whole ones a tile, so that few of a tile's rows are idle.

    S = z zᵀ (− ½‖z_j‖² with `energy`),   A = softmax_rows(β S),   O = A V
    dA = dO Vᵀ,   dS = A ∘ (dA − rowsum(A ∘ dA)),   dZ = β (dS + dSᵀ) z,   dV = Aᵀ dO

The scores of a tile are one square of registers, block diagonal by a mask, so the backward needs nothing but its
inputs, and every width is taken in chunks. With `values` None V is z and dZ is the sum of both gradients.
"""

# pyright: reportGeneralTypeIssues=false
# The checker takes a `@triton.jit` function that is called in another for one that never returns.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.launch import Launch, card_of, ceil_div, dot_precision, math_mode
from cdt_fast.kernels.tiles import (
    LN_2,
    LOG2_E,
    load_rows,
    multiply_tile,
    sequence_rows,
    softmax_tile,
    store_rows,
)


class Blocks(NamedTuple):
    """Shape of a block: the rows of its tile, the columns that it holds at a time, warps, pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


# By family of cards and `math_mode`: the longest sequence, and the block that packs such sequences. With four warps
# 16-bit tiles of 64 rows spill on cards without wgmma, with eight they do not. 128 rows spill on consumer cards, and
# IEEE float32 does at 64 rows: longer sequences are for `streaming_attention`. A third stage makes sm_80 spill.
BLOCKS = {
    "consumer": {
        "16 bits": [(64, Blocks(64, 32, 8, 3))],
        "tf32": [(32, Blocks(32, 64, 4, 2)), (64, Blocks(64, 16, 4, 2))],
        "ieee": [(32, Blocks(32, 32, 4, 2)), (64, Blocks(64, 32, 16, 2))],
    },
    "ampere": {
        "16 bits": [(64, Blocks(64, 32, 8, 2))],
        "tf32": [(32, Blocks(32, 64, 4, 2)), (64, Blocks(64, 16, 4, 2))],
        "ieee": [(32, Blocks(32, 32, 4, 3)), (64, Blocks(64, 32, 16, 2))],
    },
    "hopper": {
        "16 bits": [(64, Blocks(64, 64, 4, 3))],
        "tf32": [(32, Blocks(32, 64, 4, 2)), (64, Blocks(64, 32, 4, 2))],
        "ieee": [(32, Blocks(32, 32, 4, 3)), (64, Blocks(64, 32, 16, 2))],
    },
}


@triton.jit
def tile_scores(z, row, counts, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                ENERGY: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
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
def packed_forward_kernel(
    z, values, output, log_sum_exp, lengths,
    sequences, tokens, per_tile, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # z [sequences, tokens, WIDTH], values and output [sequences, tokens, VALUE_WIDTH], log_sum_exp [sequences, tokens]
    first, row, exists, counts, visible = sequence_rows(tl.program_id(0), sequences, tokens, per_tile, lengths, ROWS)
    z += first * WIDTH
    values += first * VALUE_WIDTH
    output += first * VALUE_WIDTH
    scores = tile_scores(z, row, counts, scale, WIDTH, ROWS, COLUMNS, ENERGY, PRECISION)
    attention, log_sum = softmax_tile(scores, visible)
    tl.store(log_sum_exp + first + row, log_sum * LN_2, mask=exists)
    for start in range(0, VALUE_WIDTH, COLUMNS):
        chunk = load_rows(values, row, counts, start, VALUE_WIDTH, COLUMNS)
        store_rows(
            output, row, exists, start, multiply_tile(attention, chunk, visible, PRECISION), VALUE_WIDTH, COLUMNS
        )


@triton.jit
def packed_backward_kernel(
    z, values, grad_output, grad_z, grad_values, lengths,
    sequences, tokens, per_tile, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ENERGY: tl.constexpr, PRECISION: tl.constexpr, TIED: tl.constexpr,
):  # fmt: skip
    # grad_output and grad_values [sequences, tokens, VALUE_WIDTH], grad_z [sequences, tokens, WIDTH]; one may be None
    first, row, exists, counts, visible = sequence_rows(tl.program_id(0), sequences, tokens, per_tile, lengths, ROWS)
    z += first * WIDTH
    values += first * VALUE_WIDTH
    grad_output += first * VALUE_WIDTH
    scores = tile_scores(z, row, counts, scale, WIDTH, ROWS, COLUMNS, ENERGY, PRECISION)
    attention, _ = softmax_tile(scores, visible)
    # Rounded here, and transposed where it is used: whole, it spills beside values of 1024 columns.
    low = attention.to(grad_output.dtype.element_ty)

    if grad_z is not None:
        grad_attention = tl.zeros((ROWS, ROWS), tl.float32)
        for start in range(0, VALUE_WIDTH, COLUMNS):
            upstream = load_rows(grad_output, row, counts, start, VALUE_WIDTH, COLUMNS)
            chunk = load_rows(values, row, counts, start, VALUE_WIDTH, COLUMNS)
            grad_attention = tl.dot(upstream, tl.trans(chunk), grad_attention, input_precision=PRECISION)
        grad_attention = tl.where(visible, grad_attention, 0.0)
        grad_scores = attention * (grad_attention - tl.sum(attention * grad_attention, 1)[:, None])
        # Once more: a row whose sum is NaN is NaN from end to end, and the transposed would carry that on.
        grad_scores = tl.where(visible, grad_scores, 0.0)
        mirrored = tl.trans(grad_scores)
        symmetric = grad_scores + mirrored
        if ENERGY:
            place = tl.arange(0, ROWS)
            symmetric -= tl.where(place[:, None] == place[None, :], tl.sum(mirrored, 1)[:, None], 0.0)
        symmetric = (symmetric * scale).to(z.dtype.element_ty)
        for start in range(0, WIDTH, COLUMNS):
            chunk = load_rows(z, row, counts, start, WIDTH, COLUMNS)
            gradient = multiply_tile(symmetric, chunk, visible, PRECISION)
            if TIED:
                upstream = load_rows(grad_output, row, counts, start, WIDTH, COLUMNS)
                gradient += multiply_tile(tl.trans(low), upstream, visible, PRECISION)
            store_rows(grad_z + first * WIDTH, row, exists, start, gradient, WIDTH, COLUMNS)

    if grad_values is not None:
        for start in range(0, VALUE_WIDTH, COLUMNS):
            upstream = load_rows(grad_output, row, counts, start, VALUE_WIDTH, COLUMNS)
            gradient = multiply_tile(tl.trans(low), upstream, visible, PRECISION)
            store_rows(grad_values + first * VALUE_WIDTH, row, exists, start, gradient, VALUE_WIDTH, COLUMNS)


def longest(z: Tensor) -> int:
    """The most tokens of a sequence that a tile holds on the card of `z`."""
    return BLOCKS[card_of(z).family][math_mode(z)][-1][0]


def blocks_for(z: Tensor) -> Blocks:
    """The row of `BLOCKS` for sequences like `z` `[sequences, tokens, width]` on the card that it is on."""
    for most, blocks in BLOCKS[card_of(z).family][math_mode(z)]:
        if z.shape[1] <= most:
            return blocks
    raise ValueError(f"a tile holds sequences of up to {longest(z)} tokens, got {z.shape[1]}")


def packed_forward(
    z: Tensor, values: Tensor, lengths: Tensor | None, scale: float, energy: bool, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor]:
    """Contiguous `z` `[B, T, d]` and `values` `[B, T, k]`, T ≤ `longest(z)` → output, log-sum-exp `[B, T]`."""
    blocks = blocks or blocks_for(z)
    sequences, tokens, width = z.shape
    output = torch.empty_like(values)
    log_sum_exp = z.new_empty((sequences, tokens), dtype=torch.float32)
    per_tile = blocks.rows // max(1, tokens)
    Launch(
        packed_forward_kernel,
        (ceil_div(sequences, per_tile) if tokens else 0,),
        {
            "z": z, "values": values, "output": output, "log_sum_exp": log_sum_exp, "lengths": lengths,
            "sequences": sequences, "tokens": tokens, "per_tile": per_tile, "scale": scale,
        },
        {
            "WIDTH": width, "VALUE_WIDTH": values.shape[-1], "ROWS": blocks.rows, "COLUMNS": blocks.columns,
            "ENERGY": energy, "PRECISION": dot_precision(z.dtype),
        },
        blocks.warps,
        blocks.stages,
    ).run()  # fmt: skip
    return output, log_sum_exp


def packed_backward(
    z: Tensor,
    values: Tensor | None,
    grad_output: Tensor,
    lengths: Tensor | None,
    scale: float,
    energy: bool,
    needs_z: bool = True,
    needs_values: bool = True,
    blocks: Blocks | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `z` and `values`, those that are needed; with `values` None all of it is in that of `z`."""
    blocks = blocks or blocks_for(z)
    sequences, tokens, width = z.shape
    per_tile = blocks.rows // max(1, tokens)
    grad_z = torch.empty_like(z) if needs_z else None
    grad_values = torch.empty_like(values) if needs_values and values is not None else None
    Launch(
        packed_backward_kernel,
        (ceil_div(sequences, per_tile) if tokens else 0,),
        {
            "z": z, "values": z if values is None else values, "grad_output": grad_output,
            "grad_z": grad_z, "grad_values": grad_values, "lengths": lengths,
            "sequences": sequences, "tokens": tokens, "per_tile": per_tile, "scale": scale,
        },
        {
            "WIDTH": width, "VALUE_WIDTH": grad_output.shape[-1], "ROWS": blocks.rows, "COLUMNS": blocks.columns,
            "ENERGY": energy, "PRECISION": dot_precision(z.dtype), "TIED": values is None,
        },
        blocks.warps,
        blocks.stages,
    ).run()  # fmt: skip
    return grad_z, grad_values
