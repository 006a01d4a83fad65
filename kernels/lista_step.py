"""The LISTA step of tokens at most 256 wide, a tile of rows a block: residual, correction and shrinkage in one kernel.

    R  = X − H Dᵀ              one pass over the code width m in chunks; R `[rows, n]` stays on chip
    H⁺ = φ(H + step · R D)     a second pass, chunk by chunk; φ is S_θ, max(v, 0), or v itself

Backward, with dU = dH⁺ where H⁺ ≠ 0 (everywhere for v itself), again in two passes:

    dR = step · dU Dᵀ = dX,      dH = dU − dR D
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.launch import Launch, block_width, card_of, ceil_div, dot_precision, math_mode
from cdt_fast.kernels.residual_linear import nonlinearity as apply_nonlinearity

# A wider residual does not fit the registers of a block; `residual_linear` does the second half of such a step.
WIDEST = 256


class Blocks(NamedTuple):
    """Rows of a tile, atoms of a chunk of the code width, and how many warps and stages work on it."""

    rows: int
    atoms: int
    warps: int
    stages: int


# By the card's family and `math_mode`, for both directions and every width. In 16 bits none of them spills; 128 rows
# do, on sm_90 too. With 16 or 32 float32 rows and one stage, IEEE products spill more than 1 KB.
BLOCKS = {
    ("consumer", "16 bits"): Blocks(64, 32, warps=8, stages=3),
    ("ampere", "16 bits"): Blocks(64, 32, warps=8, stages=4),
    ("hopper", "16 bits"): Blocks(64, 64, warps=8, stages=3),
    ("consumer", "tf32"): Blocks(32, 32, warps=8, stages=2),
    ("ampere", "tf32"): Blocks(32, 32, warps=8, stages=2),
    ("hopper", "tf32"): Blocks(32, 32, warps=8, stages=2),
    ("consumer", "ieee"): Blocks(32, 16, warps=8, stages=2),
    ("ampere", "ieee"): Blocks(32, 32, warps=8, stages=2),
    ("hopper", "ieee"): Blocks(32, 32, warps=8, stages=2),
}


@triton.jit
def lista_step_kernel(
    codes,  # [rows, atoms]
    signal,  # [rows, width]
    dictionary,  # [width, atoms]
    next_codes,  # [rows, atoms], contiguous
    residual,  # [rows, width], contiguous; not touched without KEEP_RESIDUAL
    rows,
    width,
    atoms,
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
    for start in range(0, atoms, ATOMS):
        atom = start + tl.arange(0, ATOMS)
        atom_exists = (atom < atoms)[None, :]
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

    for start in range(0, atoms, ATOMS):
        atom = start + tl.arange(0, ATOMS)
        atom_exists = (atom < atoms)[None, :]
        atom = atom.to(tl.int64)[None, :]
        codes_tile = tl.load(codes_rows + atom * codes_column_stride, mask=row_exists & atom_exists, other=0.0)
        atoms_tile = tl.load(
            dictionary_rows + atom * dictionary_column_stride, mask=place_exists[:, None] & atom_exists, other=0.0
        )
        update = codes_tile.to(tl.float32) + step * tl.dot(correction, atoms_tile, input_precision=PRECISION)
        update = apply_nonlinearity(update, threshold, NONLINEARITY)
        tl.store(next_codes + row[:, None] * atoms + atom, update.to(target.dtype), mask=row_exists & atom_exists)


@triton.jit
def lista_step_backward_kernel(
    grad_output,  # [rows, atoms]
    output,  # [rows, atoms], contiguous
    dictionary,  # [width, atoms]
    grad_codes,  # [rows, atoms], contiguous; not touched without WANTS_CODES
    grad_residual,  # [rows, width], contiguous
    grad_update,  # [rows, atoms], contiguous; not touched without WANTS_UPDATE
    rows,
    width,
    atoms,
    grad_row_stride,
    grad_column_stride,
    dictionary_row_stride,
    dictionary_column_stride,
    step,
    PASSES_EVERYWHERE: tl.constexpr,
    WANTS_CODES: tl.constexpr,
    WANTS_UPDATE: tl.constexpr,
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
    grad_rows = grad_output + row[:, None] * grad_row_stride
    output_rows = output + row[:, None] * atoms
    dictionary_rows = dictionary + place[:, None] * dictionary_row_stride

    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, atoms, ATOMS):
        atom = start + tl.arange(0, ATOMS)
        atom_exists = (atom < atoms)[None, :]
        atom = atom.to(tl.int64)[None, :]
        exists = row_exists & atom_exists
        update = tl.load(grad_rows + atom * grad_column_stride, mask=exists, other=0.0)
        if not PASSES_EVERYWHERE:
            update = _where_not_zero(update, tl.load(output_rows + atom, mask=exists, other=0.0))
        if WANTS_UPDATE:
            tl.store(grad_update + row[:, None] * atoms + atom, update, mask=exists)
        atoms_tile = tl.load(
            dictionary_rows + atom * dictionary_column_stride, mask=place_exists[:, None] & atom_exists, other=0.0
        )  # [WIDTH, ATOMS]
        total = tl.dot(update, tl.trans(atoms_tile), total, input_precision=PRECISION)

    correction = (step * total).to(dictionary.dtype.element_ty)  # [ROWS, WIDTH]
    tl.store(grad_residual + row[:, None] * width + place[None, :], correction, mask=row_exists & place_exists[None, :])

    if WANTS_CODES:
        for start in range(0, atoms, ATOMS):
            atom = start + tl.arange(0, ATOMS)
            atom_exists = (atom < atoms)[None, :]
            atom = atom.to(tl.int64)[None, :]
            exists = row_exists & atom_exists
            # Masked once more rather than read back: another thread of the block may have written it.
            update = tl.load(grad_rows + atom * grad_column_stride, mask=exists, other=0.0)
            if not PASSES_EVERYWHERE:
                update = _where_not_zero(update, tl.load(output_rows + atom, mask=exists, other=0.0))
            atoms_tile = tl.load(
                dictionary_rows + atom * dictionary_column_stride, mask=place_exists[:, None] & atom_exists, other=0.0
            )
            through = update.to(tl.float32) - tl.dot(correction, atoms_tile, input_precision=PRECISION)
            tl.store(grad_codes + row[:, None] * atoms + atom, through.to(correction.dtype), mask=exists)


@triton.jit
def _where_not_zero(gradient, output):
    """dU from dH⁺ and H⁺; a code that is NaN is not zero, and its gradient passes."""
    return tl.where(output == 0, 0.0, gradient.to(tl.float32)).to(gradient.dtype)


def lista_step(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    nonlinearity: str,
    keep_residual: bool,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """`φ(H + step · (X − H Dᵀ) D)` and, where it is kept, the residual X − H Dᵀ.

    Args:
        codes: H, `[rows, m]`, any strides.
        signal: X, `[rows, n]` with n at most `WIDEST`, any strides.
        dictionary: D, `[n, m]`, any strides; the three have one dtype.
        step: the factor of the correction.
        threshold: θ of "soft_threshold".
        nonlinearity: "soft_threshold", "relu" or "identity".
        keep_residual: write the residual, which the gradient of the dictionary needs.
        blocks: the block shape, by default that of the card.

    Returns:
        The next codes `[rows, m]` and the residual `[rows, n]`, or `[0, n]` where it is not kept; contiguous.
    """
    rows, atoms = codes.shape
    width = signal.shape[1]
    blocks = blocks or BLOCKS[card_of(codes).family, math_mode(codes)]
    next_codes = torch.empty((rows, atoms), dtype=codes.dtype, device=codes.device)
    residual = torch.empty((rows if keep_residual else 0, width), dtype=codes.dtype, device=codes.device)
    Launch(
        lista_step_kernel,
        (ceil_div(rows, blocks.rows),),
        {
            "codes": codes,
            "signal": signal,
            "dictionary": dictionary,
            "next_codes": next_codes,
            "residual": residual,
            "rows": rows,
            "width": width,
            "atoms": atoms,
            "codes_row_stride": codes.stride(0),
            "codes_column_stride": codes.stride(1),
            "signal_row_stride": signal.stride(0),
            "signal_column_stride": signal.stride(1),
            "dictionary_row_stride": dictionary.stride(0),
            "dictionary_column_stride": dictionary.stride(1),
            "step": step,
            "threshold": threshold,
        },
        {
            "NONLINEARITY": nonlinearity,
            "KEEP_RESIDUAL": keep_residual,
            "PRECISION": dot_precision(codes.dtype),
            "ROWS": blocks.rows,
            "WIDTH": block_width(width),
            "ATOMS": blocks.atoms,
        },
        warps=blocks.warps,
        stages=blocks.stages,
        strided=("codes", "signal", "dictionary"),
    ).run()
    return next_codes, residual


def lista_step_backward(
    grad_output: Tensor,
    output: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    nonlinearity: str,
    wants_codes: bool,
    wants_update: bool,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the codes, of the residual (which is that of the signal), and of the update before φ.

    Args:
        grad_output: dH⁺, `[rows, m]`, any strides.
        output: H⁺, `[rows, m]`, contiguous.
        dictionary: D, `[n, m]` with n at most `WIDEST`, any strides; the three have one dtype.
        step, nonlinearity: as in the forward.
        wants_codes, wants_update: whether to write dH, and dU, which the gradient of the dictionary needs.
        blocks: the block shape, by default that of the card.

    Returns:
        dH `[rows, m]`, dR `[rows, n]` and dU `[rows, m]`, contiguous; dH and dU are `[0, m]` where not wanted.
    """
    rows, atoms = output.shape
    width = dictionary.shape[0]
    blocks = blocks or BLOCKS[card_of(output).family, math_mode(output)]
    grad_codes = torch.empty((rows if wants_codes else 0, atoms), dtype=output.dtype, device=output.device)
    grad_residual = torch.empty((rows, width), dtype=output.dtype, device=output.device)
    grad_update = torch.empty((rows if wants_update else 0, atoms), dtype=output.dtype, device=output.device)
    Launch(
        lista_step_backward_kernel,
        (ceil_div(rows, blocks.rows),),
        {
            "grad_output": grad_output,
            "output": output,
            "dictionary": dictionary,
            "grad_codes": grad_codes,
            "grad_residual": grad_residual,
            "grad_update": grad_update,
            "rows": rows,
            "width": width,
            "atoms": atoms,
            "grad_row_stride": grad_output.stride(0),
            "grad_column_stride": grad_output.stride(1),
            "dictionary_row_stride": dictionary.stride(0),
            "dictionary_column_stride": dictionary.stride(1),
            "step": step,
        },
        {
            "PASSES_EVERYWHERE": nonlinearity == "identity",
            "WANTS_CODES": wants_codes,
            "WANTS_UPDATE": wants_update,
            "PRECISION": dot_precision(output.dtype),
            "ROWS": blocks.rows,
            "WIDTH": block_width(width),
            "ATOMS": blocks.atoms,
        },
        warps=blocks.warps,
        stages=blocks.stages,
        strided=("grad_output", "dictionary"),
    ).run()
    return grad_codes, grad_residual, grad_update
