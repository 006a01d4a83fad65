"""The LISTA step of tokens at most 256 wide, a tile of rows a block: residual, correction and shrinkage in one kernel.

    R  = X − H Dᵀ              one pass over the code width m in chunks; R `[rows, n]` stays on chip
    H⁺ = φ(H + step · R D)     a second pass, chunk by chunk; φ is S_θ, max(v, 0), or v itself

Backward, with dU = dH⁺ where H⁺ ≠ 0 (everywhere for v itself), again in two passes:

    dR = step · dU Dᵀ = dX,      dH = dU − dR D
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# In 16 bits none of them spills registers; 128 rows do, on sm_90 too.
BLOCKS = {
    "consumer": {"ROWS": 64, "ATOMS": 32, "num_warps": 8, "num_stages": 3},
    "ampere": {"ROWS": 64, "ATOMS": 32, "num_warps": 8, "num_stages": 4},
    "hopper": {"ROWS": 64, "ATOMS": 64, "num_warps": 8, "num_stages": 3},
    "float32": {"ROWS": 32, "ATOMS": 32, "num_warps": 8, "num_stages": 2},
}


@triton.jit
def apply_nonlinearity(value, threshold, NONLINEARITY: tl.constexpr):
    """φ, written so that NaN, for which every comparison is false, stays NaN."""
    if NONLINEARITY == "relu":
        value = tl.where(value <= 0, 0.0, value)
    elif NONLINEARITY == "soft_threshold":
        shrunk = tl.where(value > 0, value - threshold, value + threshold)
        value = tl.where(tl.abs(value) <= threshold, 0.0, shrunk)
    elif NONLINEARITY == "hard_threshold":
        value = tl.where(tl.abs(value) <= threshold, 0.0, value)
    return value


@triton.jit(do_not_specialize=["rows"])
def lista_step_forward_kernel(
    codes,  # [rows, code_width]
    signal,  # [rows, width]
    dictionary,  # [width, code_width]
    next_codes,  # [rows, code_width], contiguous
    residual,  # [rows, width], contiguous; not touched without KEEP_RESIDUAL
    rows,
    width,
    code_width,
    codes_row_stride,
    codes_column_stride,
    signal_row_stride,
    signal_column_stride,
    dictionary_row_stride,
    dictionary_column_stride,
    step,
    threshold,
    NONLINEARITY: tl.constexpr,
    KEEP_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ATOMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, WIDTH)
    row_exists = (row < rows)[:, None]
    place_exists = place < width
    place = place.to(tl.int64)
    codes_rows = codes + row[:, None] * codes_row_stride
    dictionary_rows = dictionary + place[:, None] * dictionary_row_stride

    projection = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, code_width, ATOMS):
        atom = start + tl.arange(0, ATOMS)
        atom_exists = (atom < code_width)[None, :]
        atom = atom.to(tl.int64)[None, :]
        codes_tile = tl.load(codes_rows + atom * codes_column_stride, mask=row_exists & atom_exists, other=0.0)
        atoms_tile = tl.load(
            dictionary_rows + atom * dictionary_column_stride, mask=place_exists[:, None] & atom_exists, other=0.0
        )  # [WIDTH, ATOMS]
        projection = tl.dot(codes_tile, tl.trans(atoms_tile), projection, input_precision=PRECISION)

    exists = row_exists & place_exists[None, :]
    target = tl.load(
        signal + row[:, None] * signal_row_stride + place[None, :] * signal_column_stride, mask=exists, other=0.0
    )
    correction = (target.to(tl.float32) - projection).to(target.dtype)  # [ROWS, WIDTH]
    if KEEP_RESIDUAL:
        tl.store(residual + row[:, None] * width + place[None, :], correction, mask=exists)

    for start in range(0, code_width, ATOMS):
        atom = start + tl.arange(0, ATOMS)
        atom_exists = (atom < code_width)[None, :]
        atom = atom.to(tl.int64)[None, :]
        codes_tile = tl.load(codes_rows + atom * codes_column_stride, mask=row_exists & atom_exists, other=0.0)
        atoms_tile = tl.load(
            dictionary_rows + atom * dictionary_column_stride, mask=place_exists[:, None] & atom_exists, other=0.0
        )
        update = codes_tile.to(tl.float32) + step * tl.dot(correction, atoms_tile, input_precision=PRECISION)
        update = apply_nonlinearity(update, threshold, NONLINEARITY)
        tl.store(next_codes + row[:, None] * code_width + atom, update.to(target.dtype), mask=row_exists & atom_exists)


@triton.jit(do_not_specialize=["rows"])
def lista_step_backward_kernel(
    grad_output,  # [rows, code_width]
    output,  # [rows, code_width], contiguous
    dictionary,  # [width, code_width]
    grad_codes,  # [rows, code_width], contiguous; not touched without NEEDS_CODES
    grad_residual,  # [rows, width], contiguous
    grad_update,  # [rows, code_width], contiguous; not touched without NEEDS_UPDATE
    rows,
    width,
    code_width,
    grad_output_row_stride,
    grad_output_column_stride,
    dictionary_row_stride,
    dictionary_column_stride,
    step,
    PASSES_EVERYWHERE: tl.constexpr,
    NEEDS_CODES: tl.constexpr,
    NEEDS_UPDATE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ATOMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, WIDTH)
    row_exists = (row < rows)[:, None]
    place_exists = place < width
    place = place.to(tl.int64)
    grad_rows = grad_output + row[:, None] * grad_output_row_stride
    output_rows = output + row[:, None] * code_width
    dictionary_rows = dictionary + place[:, None] * dictionary_row_stride

    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, code_width, ATOMS):
        atom = start + tl.arange(0, ATOMS)
        atom_exists = (atom < code_width)[None, :]
        atom = atom.to(tl.int64)[None, :]
        exists = row_exists & atom_exists
        update = tl.load(grad_rows + atom * grad_output_column_stride, mask=exists, other=0.0)
        if not PASSES_EVERYWHERE:
            update = _where_not_zero(update, tl.load(output_rows + atom, mask=exists, other=0.0))
        if NEEDS_UPDATE:
            tl.store(grad_update + row[:, None] * code_width + atom, update, mask=exists)
        atoms_tile = tl.load(
            dictionary_rows + atom * dictionary_column_stride, mask=place_exists[:, None] & atom_exists, other=0.0
        )  # [WIDTH, ATOMS]
        total = tl.dot(update, tl.trans(atoms_tile), total, input_precision=PRECISION)

    correction = (step * total).to(dictionary.dtype.element_ty)  # [ROWS, WIDTH]
    tl.store(grad_residual + row[:, None] * width + place[None, :], correction, mask=row_exists & place_exists[None, :])

    if NEEDS_CODES:
        for start in range(0, code_width, ATOMS):
            atom = start + tl.arange(0, ATOMS)
            atom_exists = (atom < code_width)[None, :]
            atom = atom.to(tl.int64)[None, :]
            exists = row_exists & atom_exists
            # Masked once more rather than read back: another thread of the block may have written it.
            update = tl.load(grad_rows + atom * grad_output_column_stride, mask=exists, other=0.0)
            if not PASSES_EVERYWHERE:
                update = _where_not_zero(update, tl.load(output_rows + atom, mask=exists, other=0.0))
            atoms_tile = tl.load(
                dictionary_rows + atom * dictionary_column_stride, mask=place_exists[:, None] & atom_exists, other=0.0
            )
            through = update.to(tl.float32) - tl.dot(correction, atoms_tile, input_precision=PRECISION)
            tl.store(grad_codes + row[:, None] * code_width + atom, through.to(correction.dtype), mask=exists)


@triton.jit
def _where_not_zero(gradient, output):
    """dU from dH⁺ and H⁺; a code that is NaN is not zero, and its gradient passes."""
    return tl.where(output == 0, 0.0, gradient.to(tl.float32)).to(gradient.dtype)


def forward(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    step: float,
    threshold: float,
    nonlinearity: str,
    keep_residual: bool,
    blocks: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """The next codes `[rows, m]` and X − H Dᵀ `[rows, n]`, or `[0, n]` if it is not kept; contiguous.

    Codes, signal and dictionary are of one dtype and may have any strides; n is at most 256.
    """
    (rows, atoms), width = codes.shape, signal.shape[1]
    next_codes = codes.new_empty((rows, atoms))
    residual = codes.new_empty((rows if keep_residual else 0, width))
    if rows:
        lista_step_forward_kernel[(triton.cdiv(rows, blocks["ROWS"]),)](
            *(codes, signal, dictionary, next_codes, residual),
            *(rows, width, atoms),
            *(*codes.stride(), *signal.stride(), *dictionary.stride()),
            step,
            threshold,
            NONLINEARITY=nonlinearity,
            KEEP_RESIDUAL=keep_residual,
            WIDTH=max(16, triton.next_power_of_2(width)),
            **blocks,
        )
    return next_codes, residual


def backward(
    grad_output: Tensor,
    output: Tensor,
    dictionary: Tensor,
    step: float,
    nonlinearity: str,
    needs_codes: bool,
    needs_update: bool,
    blocks: Mapping[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """dH `[rows, m]`, dX `[rows, n]` and dU `[rows, m]`, contiguous; dH and dU are `[0, m]` if they are not needed.

    The output is contiguous.
    """
    (rows, atoms), width = output.shape, dictionary.shape[0]
    grad_codes = output.new_empty((rows if needs_codes else 0, atoms))
    grad_residual = output.new_empty((rows, width))
    grad_update = output.new_empty((rows if needs_update else 0, atoms))
    if rows:
        lista_step_backward_kernel[(triton.cdiv(rows, blocks["ROWS"]),)](
            *(grad_output, output, dictionary, grad_codes, grad_residual, grad_update),
            *(rows, width, atoms),
            *(*grad_output.stride(), *dictionary.stride()),
            step,
            PASSES_EVERYWHERE=nonlinearity == "identity",
            NEEDS_CODES=needs_codes,
            NEEDS_UPDATE=needs_update,
            WIDTH=max(16, triton.next_power_of_2(width)),
            **blocks,
        )
    return grad_codes, grad_residual, grad_update
