"""Symmetric attention of short sequences, several whole ones a tile, so that few of a tile's rows are idle.

    S = z zᵀ (− ½‖z_j‖² with `energy`),   A = softmax_rows(β S),   O = A V
    dA = dO Vᵀ,   dS = A ∘ (dA − rowsum(A ∘ dA)),   dZ = β (dS + dSᵀ) z,   dV = Aᵀ dO

The scores of a tile are one square of registers, block diagonal by a mask, so the backward needs nothing but its
inputs, and every width is taken in chunks. With `values` None V is z and dZ is the sum of both gradients.
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
from cdt_fast.kernels.blocks import SYMMETRIC_ATTENTION_PACKED, SYMMETRIC_ATTENTION_PACKED_BACKWARD, Blocks
from cdt_fast.kernels.launch import Launch, ceil_div, whole_tiles
from cdt_fast.kernels.tiles import (
    LN_2,
    load_rows,
    sequence_rows,
    softmax_tile,
    store_rows,
    tile_scores,
)


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
    first, row, exists, counts, visible = sequence_rows(tl.program_id(0), sequences, tokens, per_tile, lengths, ROWS)
    z += first * WIDTH
    values += first * VALUE_WIDTH
    output += first * VALUE_WIDTH
    scores = tile_scores(z, row, counts, scale, WIDTH, ROWS, COLUMNS, ENERGY, PRECISION)
    attention, log_sum = softmax_tile(scores, visible)
    tl.store(log_sum_exp + first + row, log_sum * LN_2, mask=exists)
    for start in range(0, VALUE_WIDTH, COLUMNS):
        chunk = load_rows(values, row, counts, start, VALUE_WIDTH, COLUMNS)
        mixed = tl.dot(attention.to(chunk.dtype), chunk, input_precision=PRECISION)
        store_rows(output, row, exists, start, mixed, VALUE_WIDTH, COLUMNS)


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
        grad_scores = attention * (grad_attention - tl.sum(attention * grad_attention, 1)[:, None])
        mirrored = tl.trans(grad_scores)
        symmetric = grad_scores + mirrored
        if ENERGY:
            place = tl.arange(0, ROWS)
            symmetric -= tl.where(place[:, None] == place[None, :], tl.sum(mirrored, 1)[:, None], 0.0)
        symmetric = (symmetric * scale).to(z.dtype.element_ty)
        for start in range(0, WIDTH, COLUMNS):
            chunk = load_rows(z, row, counts, start, WIDTH, COLUMNS)
            gradient = tl.dot(symmetric, chunk, input_precision=PRECISION)
            if TIED:
                upstream = load_rows(grad_output, row, counts, start, WIDTH, COLUMNS)
                gradient += tl.dot(tl.trans(low), upstream, input_precision=PRECISION)
            store_rows(grad_z + first * WIDTH, row, exists, start, gradient, WIDTH, COLUMNS)

    if grad_values is not None:
        for start in range(0, VALUE_WIDTH, COLUMNS):
            upstream = load_rows(grad_output, row, counts, start, VALUE_WIDTH, COLUMNS)
            gradient = tl.dot(tl.trans(low), upstream, input_precision=PRECISION)
            store_rows(grad_values + first * VALUE_WIDTH, row, exists, start, gradient, VALUE_WIDTH, COLUMNS)


def _forward_work(launch: Launch) -> float:
    """Scores and their product with the values."""
    rows, sizes, columns = launch.blocks.rows, launch.constants, launch.blocks.columns
    width, value_width = whole_tiles(sizes["WIDTH"], columns), whole_tiles(sizes["VALUE_WIDTH"], columns)
    return 2.0 * launch.grid[0] * rows**2 * (width + value_width)


def _backward_work(launch: Launch) -> float:
    """The scores, dO Vᵀ, the product that gives dz (tied two), and the one that gives dV."""
    rows, sizes, columns = launch.blocks.rows, launch.constants, launch.blocks.columns
    width, value_width = whole_tiles(sizes["WIDTH"], columns), whole_tiles(sizes["VALUE_WIDTH"], columns)
    of_z = 0 if launch.arguments["grad_z"] is None else value_width + width * (1 + sizes["TIED"])
    of_values = 0 if launch.arguments["grad_values"] is None else value_width
    return 2.0 * launch.grid[0] * rows**2 * (width + of_z + of_values)


def packed_forward(attention: SymmetricAttentionArguments, blocks: Blocks | None = None) -> tuple[Tensor, Tensor]:
    """The output `[B, T, k]` and the rows' log-sum-exp `[B, T]`; T is at most `LONGEST`."""
    z = attention.z
    output = torch.empty_like(z if attention.values is None else attention.values)
    log_sum_exp = z.new_empty(z.shape[:-1], dtype=torch.float32)
    written: dict[str, Tensor | None] = {"output": output, "log_sum_exp": log_sum_exp}
    _launch(packed_forward_kernel, attention, blocks, written, _forward_work)
    return output, log_sum_exp


def packed_backward(
    attention: SymmetricAttentionBackwardArguments, blocks: Blocks | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of z and of the values, those that are needed; the output and what was kept are not read."""
    z, values = attention.z, attention.values
    grad_z = torch.empty_like(z) if attention.needs_z else None
    grad_values = torch.empty_like(values) if attention.needs_values and values is not None else None
    gradients = {"grad_z": grad_z, "grad_values": grad_values}
    _launch(packed_backward_kernel, attention, blocks, gradients, _backward_work, TIED=values is None)
    return grad_z, grad_values


def _launch(
    kernel: object,
    attention: SymmetricAttentionArguments,
    blocks: Blocks | None,
    tensors: dict[str, Tensor | None],
    work: Callable[[Launch], float],
    **constants: bool,
) -> None:
    """A launch over tiles of whole sequences."""
    z, values = attention.z, attention.z if attention.values is None else attention.values
    sequences, tokens, width = z.shape
    of_z = tensors.get("grad_z") is not None
    table = SYMMETRIC_ATTENTION_PACKED_BACKWARD if of_z else SYMMETRIC_ATTENTION_PACKED
    blocks = blocks or table.blocks(z, tokens)
    per_tile = blocks.rows // max(1, tokens)
    Launch(
        kernel,
        (ceil_div(sequences, per_tile) if tokens else 0,),
        blocks,
        {
            "values": values,
            **tensors,
            "sequences": sequences,
            "tokens": tokens,
            "per_tile": per_tile,
        },
        {
            "WIDTH": width,
            "VALUE_WIDTH": values.shape[-1],
            **constants,
        },
        attention,
        work=work,
    ).run()
