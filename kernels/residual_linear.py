"""A linear map, added to a residual and put through a nonlinearity, in one kernel.

    out = φ(R + α X W),    φ = max(v, 0), S_θ(v) = sign(v) max(|v| − θ, 0), or v itself

Products sum in float32 and the result is rounded once. Each operand has its own strides: the transpose of a weight
costs no copy, and a bias `[m]` is a residual whose rows are 0 apart. The text UT layer ends in it, and so does a LISTA
step of tokens too wide for the fused kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels._common import Blocks
from cdt_fast.kernels.lista_step import apply_nonlinearity

BLOCKS = {
    "consumer": {"ROWS": 128, "COLUMNS": 128, "DEPTH": 32, "num_warps": 8, "num_stages": 3},
    "ampere": {"ROWS": 128, "COLUMNS": 128, "DEPTH": 32, "num_warps": 8, "num_stages": 4},
    "hopper": {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 4},
    "float32": {"ROWS": 128, "COLUMNS": 64, "DEPTH": 32, "num_warps": 8, "num_stages": 3},
}
# Rows of tiles that are worked on together, so that what they read of the weight is still in the L2 cache.
ROW_TILES = tl.constexpr(8)


@triton.jit(do_not_specialize=["rows"])
def residual_linear_forward_kernel(
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
    residual_places = residual + row[:, None] * residual_row_stride + column[None, :] * residual_column_stride
    added = tl.load(residual_places, mask=exists, other=0.0)
    value = apply_nonlinearity(added.to(tl.float32) + alpha * total, threshold, NONLINEARITY)
    tl.store(output + row[:, None] * columns + column[None, :], value.to(output.dtype.element_ty), mask=exists)


def forward(
    x: Tensor, weight: Tensor, residual: Tensor, alpha: float, threshold: float, nonlinearity: str, blocks: Blocks
) -> Tensor:
    """Return `φ(residual + α x W)`, `[rows, m]`, contiguous, in the dtype of x. The operands may have any strides; the
    residual is `[rows, m]` or `[m]`."""
    (rows, depth), columns = x.shape, weight.shape[1]
    residual = residual.expand(rows, columns)
    output = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, blocks["ROWS"]) * triton.cdiv(columns, blocks["COLUMNS"])
    if tiles:
        residual_linear_forward_kernel[(tiles,)](
            *(x, weight, residual, output, rows, depth, columns),
            *(*x.stride(), *weight.stride(), *residual.stride(), alpha, threshold),
            NONLINEARITY=nonlinearity,
            **blocks,
        )
    return output
