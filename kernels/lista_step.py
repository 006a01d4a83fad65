"""The LISTA step of tokens at most 256 wide, a tile of rows a block: residual, correction and shrinkage in one kernel.

    R  = X − H Dᵀ              one pass over the code width m in chunks; R `[rows, n]` stays on chip
    H⁺ = φ(H + step · R D)     a second pass, chunk by chunk; φ is S_θ, max(v, 0), or v itself

Backward, with dU = dH⁺ where H⁺ ≠ 0 (everywhere for v itself), again in two passes:

    dR = step · dU Dᵀ = dX,      dH = dU − dR D
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels._common import Blocks, load_atoms, load_rows, sizes_of, store_rows

# In 16 bits none of them spills registers; 128 rows do, on sm_90 too.
BLOCKS = {
    "consumer": {"ROWS": 64, "ATOMS": 32, "num_warps": 8, "num_stages": 3},
    "ampere": {"ROWS": 64, "ATOMS": 32, "num_warps": 8, "num_stages": 4},
    "hopper": {"ROWS": 64, "ATOMS": 64, "num_warps": 8, "num_stages": 3},
    "float32": {"ROWS": 32, "ATOMS": 32, "num_warps": 8, "num_stages": 2},
}


@triton.jit
def apply_nonlinearity(value, threshold, NONLINEARITY: tl.constexpr):
    """Apply φ, written so that NaN, for which every comparison is false, stays NaN."""
    if NONLINEARITY == "relu":
        value = tl.where(value <= 0, 0.0, value)
    elif NONLINEARITY == "soft_threshold":
        shrunk = tl.where(value > 0, value - threshold, value + threshold)
        value = tl.where(tl.abs(value) <= threshold, 0.0, shrunk)
    return value


@triton.jit(do_not_specialize=["rows"])
def lista_step_forward_kernel(
    codes,  # [rows, CODE_WIDTH]
    signal,  # [rows, WIDTH]
    dictionary,  # [WIDTH, CODE_WIDTH]
    next_codes,  # [rows, CODE_WIDTH]
    residual,  # [rows, WIDTH] or None
    rows,
    step,
    threshold,
    CODE_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    NONLINEARITY: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    ATOMS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    exists = row < rows - first
    codes += first * CODE_WIDTH
    projection = tl.zeros([ROWS, BLOCK_WIDTH], tl.float32)
    for start in range(0, CODE_WIDTH, ATOMS):
        chunk = load_rows(codes, row, exists, start, CODE_WIDTH, ATOMS)
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        projection = tl.dot(chunk, tl.trans(atoms), projection, input_precision=PRECISION)
    target = load_rows(signal + first * WIDTH, row, exists, 0, WIDTH, BLOCK_WIDTH)
    correction = (target.to(tl.float32) - projection).to(target.dtype)
    if residual is not None:
        store_rows(residual + first * WIDTH, row, exists, 0, correction, WIDTH, BLOCK_WIDTH)
    for start in range(0, CODE_WIDTH, ATOMS):
        chunk = load_rows(codes, row, exists, start, CODE_WIDTH, ATOMS)
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        update = chunk.to(tl.float32) + step * tl.dot(correction, atoms, input_precision=PRECISION)
        update = apply_nonlinearity(update, threshold, NONLINEARITY)
        store_rows(next_codes + first * CODE_WIDTH, row, exists, start, update, CODE_WIDTH, ATOMS)


@triton.jit(do_not_specialize=["rows"])
def lista_step_backward_kernel(
    grad_output,  # [rows, CODE_WIDTH]
    output,  # [rows, CODE_WIDTH]
    dictionary,  # [WIDTH, CODE_WIDTH]
    grad_codes,  # [rows, CODE_WIDTH] or None
    grad_residual,  # [rows, WIDTH]
    grad_update,  # [rows, CODE_WIDTH] or None
    rows,
    step,
    CODE_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PASSES_ALL: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    ATOMS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    exists = row < rows - first
    grad_output, output = grad_output + first * CODE_WIDTH, output + first * CODE_WIDTH
    total = tl.zeros([ROWS, BLOCK_WIDTH], tl.float32)
    for start in range(0, CODE_WIDTH, ATOMS):
        update = _load_update(grad_output, output, row, exists, start, PASSES_ALL, CODE_WIDTH, ATOMS)
        if grad_update is not None:
            store_rows(grad_update + first * CODE_WIDTH, row, exists, start, update, CODE_WIDTH, ATOMS)
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        total = tl.dot(update, tl.trans(atoms), total, input_precision=PRECISION)
    correction = (step * total).to(dictionary.dtype.element_ty)
    store_rows(grad_residual + first * WIDTH, row, exists, 0, correction, WIDTH, BLOCK_WIDTH)
    if grad_codes is not None:
        for start in range(0, CODE_WIDTH, ATOMS):
            # Masked once more rather than read back: another thread of the block may have written it.
            update = _load_update(grad_output, output, row, exists, start, PASSES_ALL, CODE_WIDTH, ATOMS)
            atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
            through = update.to(tl.float32) - tl.dot(correction, atoms, input_precision=PRECISION)
            store_rows(grad_codes + first * CODE_WIDTH, row, exists, start, through, CODE_WIDTH, ATOMS)


@triton.jit
def _load_update(
    grad_output, output, row, exists, start, PASSES_ALL: tl.constexpr, CODE_WIDTH: tl.constexpr, ATOMS: tl.constexpr
):
    """Load columns of dU, from dH⁺ and H⁺; a code that is NaN is not zero, and its gradient passes."""
    update = load_rows(grad_output, row, exists, start, CODE_WIDTH, ATOMS)
    if not PASSES_ALL:
        passes = load_rows(output, row, exists, start, CODE_WIDTH, ATOMS) != 0
        update = tl.where(passes, update.to(tl.float32), 0.0).to(update.dtype)
    return update


# The launchers take contiguous tensors of one dtype.
def forward(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    step: float,
    threshold: float,
    nonlinearity: str,
    keep_residual: bool,
    blocks: Blocks,
) -> tuple[Tensor, Tensor | None]:
    """Return the next codes `[rows, m]` and, if it is kept, X − H Dᵀ `[rows, n]`; n is at most 256."""
    rows = len(codes)
    next_codes, residual = torch.empty_like(codes), torch.empty_like(signal) if keep_residual else None
    if rows:
        lista_step_forward_kernel[(triton.cdiv(rows, blocks["ROWS"]),)](
            *(codes, signal, dictionary, next_codes, residual, rows, step, threshold),
            **sizes_of(dictionary),
            NONLINEARITY=nonlinearity,
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
    blocks: Blocks,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return dH `[rows, m]`, dX `[rows, n]` and dU `[rows, m]`; dH and dU are None if they are not needed."""
    rows = len(output)
    grad_codes = torch.empty_like(output) if needs_codes else None
    grad_residual = output.new_empty((rows, len(dictionary)))
    grad_update = torch.empty_like(output) if needs_update else None
    if rows:
        lista_step_backward_kernel[(triton.cdiv(rows, blocks["ROWS"]),)](
            *(grad_output, output, dictionary, grad_codes, grad_residual, grad_update, rows, step),
            **sizes_of(dictionary),
            PASSES_ALL=nonlinearity == "identity",
            **blocks,
        )
    return grad_codes, grad_residual, grad_update
