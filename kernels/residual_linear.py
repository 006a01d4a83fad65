"""A linear map, added to a residual and put through a nonlinearity, in one kernel.

    out = φ(R + α X W),    φ = max(v, 0), S_θ(v) = sign(v) max(|v| − θ, 0), or v itself

Products sum in float32 and the result is rounded once. Each operand has its own strides: the transpose of a weight
costs no copy, and a bias `[m]` is a residual whose rows are 0 apart. The text UT layer ends in it, and so does a LISTA
step of tokens too wide for the fused kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.launch import Launch, card_of, ceil_div, dot_precision, math_mode


class Blocks(NamedTuple):
    """The shape of a tile of the output, the depth of one of its products, and how many warps and stages make it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By the card's family and `math_mode`. float32 tiles are smaller: twice the bytes, and IEEE products use registers
# where tensor cores use none.
BLOCKS = {
    ("consumer", "16 bits"): Blocks(128, 128, 32, warps=8, stages=3),
    ("ampere", "16 bits"): Blocks(128, 128, 32, warps=8, stages=4),
    ("hopper", "16 bits"): Blocks(128, 256, 64, warps=8, stages=3),
    ("consumer", "tf32"): Blocks(128, 64, 32, warps=8, stages=3),
    ("ampere", "tf32"): Blocks(128, 128, 32, warps=8, stages=3),
    ("hopper", "tf32"): Blocks(128, 128, 32, warps=8, stages=3),
    ("consumer", "ieee"): Blocks(64, 64, 32, warps=4, stages=2),
    ("ampere", "ieee"): Blocks(64, 64, 32, warps=4, stages=3),
    ("hopper", "ieee"): Blocks(64, 64, 32, warps=4, stages=3),
}

# Rows of tiles that are worked on together, so that what they read of the weight is still in the L2 cache.
ROW_TILES = 8


@triton.jit
def nonlinearity(value, threshold, NONLINEARITY: tl.constexpr):
    """φ, written so that NaN, for which every comparison is false, stays NaN."""
    if NONLINEARITY == "relu":
        value = tl.where(value <= 0, 0.0, value)
    elif NONLINEARITY == "soft_threshold":
        shrunk = tl.where(value > 0, value - threshold, value + threshold)
        value = tl.where(tl.abs(value) <= threshold, 0.0, shrunk)
    return value


@triton.jit
def residual_linear_kernel(
    x,  # [rows, depth]
    weight,  # [depth, columns]
    residual,  # [rows, columns]
    output,  # [rows, columns], contiguous
    rows,
    depth,
    columns,
    x_row_stride,
    x_column_stride,
    weight_row_stride,
    weight_column_stride,
    residual_row_stride,
    residual_column_stride,
    alpha,
    threshold,
    NONLINEARITY: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles_together = ROW_TILES * tl.cdiv(columns, COLUMNS)
    first_row_tile = tile // tiles_together * ROW_TILES
    row_tiles = tl.minimum(tl.cdiv(rows, ROWS) - first_row_tile, ROW_TILES)
    tile = tile % tiles_together
    row = (first_row_tile + tile % row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tile // row_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row_exists = (row < rows)[:, None]
    column_exists = (column < columns)[None, :]
    x_rows = x + row[:, None] * x_row_stride
    weight_columns = weight + column[None, :] * weight_column_stride

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        inner_exists = inner < depth
        inner = inner.to(tl.int64)
        x_tile = tl.load(
            x_rows + inner[None, :] * x_column_stride, mask=row_exists & inner_exists[None, :], other=0.0
        )  # [ROWS, DEPTH]
        weight_tile = tl.load(
            weight_columns + inner[:, None] * weight_row_stride, mask=inner_exists[:, None] & column_exists, other=0.0
        )  # [DEPTH, COLUMNS]
        total = tl.dot(x_tile, weight_tile, total, input_precision=PRECISION)

    exists = row_exists & column_exists
    added = tl.load(
        residual + row[:, None] * residual_row_stride + column[None, :] * residual_column_stride, mask=exists, other=0.0
    )
    value = nonlinearity(added.to(tl.float32) + alpha * total, threshold, NONLINEARITY)
    tl.store(
        output + row[:, None] * columns + column[None, :],
        value.to(output.dtype.element_ty),
        mask=exists,
    )


def residual_linear(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    alpha: float = 1.0,
    nonlinearity: str = "relu",
    threshold: float = 0.0,
    blocks: Blocks | None = None,
) -> Tensor:
    """`φ(residual + alpha · x @ weight)`.

    Args:
        x: `[rows, n]`, any strides.
        weight: `[n, m]`, any strides, the dtype of `x`.
        residual: `[rows, m]` or `[m]`, any strides and float dtype.
        alpha: the factor of the product.
        nonlinearity: "relu", "soft_threshold" or "identity".
        threshold: θ of "soft_threshold".
        blocks: the block shape, by default that of the card.

    Returns:
        `[rows, m]`, contiguous, in the dtype of `x`.
    """
    rows, depth = x.shape
    columns = weight.shape[1]
    residual = residual.expand(rows, columns)
    blocks = blocks or BLOCKS[card_of(x).family, math_mode(x)]
    output = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    Launch(
        residual_linear_kernel,
        (ceil_div(rows, blocks.rows) * ceil_div(columns, blocks.columns),),
        {
            "x": x,
            "weight": weight,
            "residual": residual,
            "output": output,
            "rows": rows,
            "depth": depth,
            "columns": columns,
            "x_row_stride": x.stride(0),
            "x_column_stride": x.stride(1),
            "weight_row_stride": weight.stride(0),
            "weight_column_stride": weight.stride(1),
            "residual_row_stride": residual.stride(0),
            "residual_column_stride": residual.stride(1),
            "alpha": alpha,
            "threshold": threshold,
        },
        {
            "NONLINEARITY": nonlinearity,
            "PRECISION": dot_precision(x.dtype),
            "ROWS": blocks.rows,
            "COLUMNS": blocks.columns,
            "DEPTH": blocks.depth,
            "ROW_TILES": ROW_TILES,
        },
        warps=blocks.warps,
        stages=blocks.stages,
        strided=("x", "weight", "residual"),
    ).run()
    return output
