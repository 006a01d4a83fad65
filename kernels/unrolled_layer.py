"""The unrolled layer of short sequences: one read of the codes, one write, several whole sequences a tile.

    forward   A = softmax_rows(β Z Zᵀ),  U = A H + (1/c)(X − A Z) D,  H⁺ = φ(U),  Z⁺ = H⁺ D⁺ᵀ,  ε = Σ‖Z⁺ − S‖²
    backward  dZ⁺ += 2 dε (Z⁺ − S),  dU = (dH⁺ + dZ⁺ D⁺) ∘ φ′,  dR = (1/c) dU Dᵀ,  dA = dU Hᵀ − dR Zᵀ,
              dS = A ∘ (dA − rowsum(A ∘ dA)),  dZ = β (dS + dSᵀ) Z − Aᵀ dR,  dH = Aᵀ dU,  dX = dR

A tile holds its rows of X − A Z, or of dR, over the whole width n and takes the code width m in chunks. A is computed
again in the backward and φ′ is H⁺ ≠ 0, so nothing is saved but what the network holds anyway. The dictionaries'
gradients are products over all rows, for which the backward stores dU, (1/c)(X − A Z) and the whole dZ⁺.

Without codes they are H = (1/c) X D, which nobody forms: with V = Z − X in the place of A's values

    U = (1/c)(X − A V) D,  dA = −dR Vᵀ,  dX = dR + Aᵀ dR
"""

# pyright: reportGeneralTypeIssues=false
# The checker takes a `@triton.jit` function that is called in another for one that never returns.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels._common import (
    Blocks,
    block_shapes,
    block_share,
    block_width,
    load_atoms,
    load_rows,
    programs_of,
    rows_of_sequences,
    sizes_of,
    softmax_tile,
    store_rows,
    tile_scores,
)
from cdt_fast.kernels.lista_step import apply_nonlinearity

_blocks = block_shapes("ROWS", "ATOMS", "COLUMNS")
# By the greater width, of the signal or of the next projection. Tiles of 128 rows spill, and tiles of float32 leave no
# shared memory for the dictionary: float32 is for torch's own products.
BLOCKS = {
    "consumer": {128: _blocks(64, 32, 32, 4, 2), 256: _blocks(64, 32, 32, 8, 2)},
    "ampere": {64: _blocks(64, 64, 32, 4, 2), 256: _blocks(64, 64, 64, 8, 2)},
    "hopper": {64: _blocks(64, 64, 32, 4, 3), 256: _blocks(64, 64, 32, 8, 2)},
}
# For aligned rows, and except on Hopper for one dictionary without lengths. On an H100 two blocks of four warps on a
# multiprocessor take half the time of one of eight.
LEAN_BLOCKS = {
    **BLOCKS,
    "consumer": {128: _blocks(64, 32, 32, 4, 2), 256: _blocks(64, 64, 32, 8, 2)},
    "hopper": {256: _blocks(64, 32, 64, 4, 3)},
}
BACKWARD_BLOCKS = {
    "consumer": _blocks(64, 32, 32, 8, 2),
    "ampere": _blocks(64, 64, 32, 8, 2),
    "hopper": _blocks(64, 64, 32, 8, 2),
}
LEAN_BACKWARD_BLOCKS = {
    **BACKWARD_BLOCKS,
    "consumer": _blocks(64, 64, 32, 8, 2),
    "hopper": _blocks(64, 32, 64, 4, 3),
    "b200": BACKWARD_BLOCKS["consumer"],  # of four warps its shared memory holds one block as well
}


@triton.jit
def load_values(signal, projection, row, mask, start, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load columns of what the attention weighs in the residual: Z, or in the first layer V = Z − X."""
    values = load_rows(projection, row, mask, start, WIDTH, BLOCK)
    if FIRST:
        left = load_rows(signal, row, mask, start, WIDTH, BLOCK)
        values = (values.to(tl.float32) - left.to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def residual_columns(
    signal,
    projection,
    attention,
    row,
    mask,
    start,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute columns of X − A Z, or in the first layer of X − A V."""
    left = load_rows(signal, row, mask, start, WIDTH, BLOCK_WIDTH).to(tl.float32)
    values = load_values(signal, projection, row, mask, start, FIRST, WIDTH, BLOCK_WIDTH)
    return left - tl.dot(attention.to(values.dtype), values, input_precision=PRECISION)


@triton.jit(do_not_specialize=["sequences", "tokens", "programs"])
def unrolled_forward_kernel(
    codes,  # [sequences, tokens, CODE_WIDTH] or None
    signal,  # [sequences, tokens, WIDTH]
    projection,  # [sequences, tokens, WIDTH]
    dictionary,  # [WIDTH, CODE_WIDTH]
    next_dictionary,  # [NEXT_WIDTH, CODE_WIDTH], or None for the same
    target,  # [sequences, tokens, NEXT_WIDTH] or None
    next_codes,  # [sequences, tokens, CODE_WIDTH]
    next_projection,  # [sequences, tokens, NEXT_WIDTH]
    residual,  # [sequences, tokens, WIDTH], scratch: may be the next projection
    errors,  # [programs] float32, with target
    lengths,  # [sequences] or None
    sequences,
    tokens,
    programs,
    step,
    threshold,
    scale,
    CODE_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    NEXT_WIDTH: tl.constexpr,
    BLOCK_NEXT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ATOMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NONLINEARITY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    begin, end = block_share(sequences, programs)
    # 64 bits for the tile's first row, 32 for what lies inside it: offsets of 64 bits cost twice the registers.
    first, row, exists, counts, visible = rows_of_sequences(begin, end, tokens, lengths, ROWS)
    x, z, r = signal + first * WIDTH, projection + first * WIDTH, residual + first * WIDTH
    h_next, z_next = next_codes + first * CODE_WIDTH, next_projection + first * NEXT_WIDTH
    scores = tile_scores(z, row, counts, scale, WIDTH, COLUMNS, False, PRECISION)
    attention, _ = softmax_tile(scores, visible)
    for start in range(0, WIDTH, COLUMNS):
        left = residual_columns(x, z, attention, row, counts, start, codes is None, WIDTH, COLUMNS, PRECISION)
        store_rows(r, row, exists, start, left * step, WIDTH, COLUMNS)
    # Read again, so that the products take it from shared memory: held in registers it would spill others.
    tl.debug_barrier()
    whole_residual = load_rows(r, row, counts, 0, WIDTH, BLOCK_WIDTH)

    attention = attention.to(next_codes.dtype.element_ty)
    result = tl.zeros((ROWS, BLOCK_NEXT_WIDTH), tl.float32)
    for start in range(0, CODE_WIDTH, ATOMS):
        update = tl.zeros((ROWS, ATOMS), tl.float32)
        if codes is not None:
            chunk = load_rows(codes + first * CODE_WIDTH, row, counts, start, CODE_WIDTH, ATOMS)
            update = tl.dot(attention, chunk, update, input_precision=PRECISION)
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        update = tl.dot(whole_residual, atoms, update, input_precision=PRECISION)
        following = apply_nonlinearity(update, threshold, NONLINEARITY).to(next_codes.dtype.element_ty)
        store_rows(h_next, row, exists, start, following, CODE_WIDTH, ATOMS)
        if next_dictionary is not None:
            atoms = load_atoms(next_dictionary, start, CODE_WIDTH, NEXT_WIDTH, BLOCK_NEXT_WIDTH, ATOMS)
        result = tl.dot(following, tl.trans(atoms), result, input_precision=PRECISION)
    store_rows(z_next, row, exists, 0, result, NEXT_WIDTH, BLOCK_NEXT_WIDTH)
    if target is not None:
        # Read again, a few columns at a time: two whole tiles in float32 would spill. Both are zero at padding.
        tl.debug_barrier()
        s = target + first * NEXT_WIDTH
        error = tl.zeros((ROWS,), tl.float32)
        for start in range(0, NEXT_WIDTH, COLUMNS):
            difference = load_rows(z_next, row, exists, start, NEXT_WIDTH, COLUMNS).to(tl.float32)
            difference -= load_rows(s, row, counts, start, NEXT_WIDTH, COLUMNS).to(tl.float32)
            error += tl.sum(difference * difference, 1)
        tl.store(errors + tl.program_id(0), tl.sum(error, 0))


@triton.jit(do_not_specialize=["sequences", "tokens", "programs"])
def unrolled_backward_kernel(
    codes,  # [sequences, tokens, CODE_WIDTH] or None
    signal,  # [sequences, tokens, WIDTH]
    projection,  # [sequences, tokens, WIDTH]
    dictionary,  # [WIDTH, CODE_WIDTH]
    next_codes,  # [sequences, tokens, CODE_WIDTH]
    next_projection,  # [sequences, tokens, NEXT_WIDTH], read with target
    next_dictionary,  # [NEXT_WIDTH, CODE_WIDTH], or None for the same
    target,  # [sequences, tokens, NEXT_WIDTH] or None
    grad_next_codes,  # [sequences, tokens, CODE_WIDTH] or None
    grad_next_projection,  # [sequences, tokens, NEXT_WIDTH] or None
    grad_error,  # [1] float32, with target
    lengths,  # [sequences] or None
    grad_update,  # [sequences, tokens, CODE_WIDTH]
    whole_grad_next_projection,  # [sequences, tokens, NEXT_WIDTH], written with target
    residual,  # [sequences, tokens, WIDTH] or None
    grad_residual,  # [sequences, tokens, WIDTH]; where nobody needs it, it may be the gradient of the projection
    grad_signal,  # [sequences, tokens, WIDTH] or None: dR is it
    grad_projection,  # [sequences, tokens, WIDTH] or None
    grad_codes,  # [sequences, tokens, CODE_WIDTH] or None
    sequences,
    tokens,
    programs,
    step,
    scale,
    CODE_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    NEXT_WIDTH: tl.constexpr,
    BLOCK_NEXT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ATOMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NONLINEARITY: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGED: tl.constexpr,  # dU Hᵀ is summed in the loop that computes dU: eight warps would spill a kilobyte
):
    begin, end = block_share(sequences, programs)
    first, row, exists, counts, _ = rows_of_sequences(begin, end, tokens, lengths, ROWS)
    x, z, dr = signal + first * WIDTH, projection + first * WIDTH, grad_residual + first * WIDTH
    du = grad_update + first * CODE_WIDTH
    if target is not None:
        z_next, s = next_projection + first * NEXT_WIDTH, target + first * NEXT_WIDTH
        whole = whole_grad_next_projection + first * NEXT_WIDTH
        # A loss that does not count gives no gradient, also where it is infinite: 0 · ∞ = NaN.
        weight = 2.0 * tl.load(grad_error)
        for start in range(0, NEXT_WIDTH, COLUMNS):
            error = load_rows(z_next, row, counts, start, NEXT_WIDTH, COLUMNS).to(tl.float32)
            error -= load_rows(s, row, counts, start, NEXT_WIDTH, COLUMNS).to(tl.float32)
            error = tl.where(weight == 0.0, 0.0, error * weight)
            if grad_next_projection is not None:
                dz_next = grad_next_projection + first * NEXT_WIDTH
                error += load_rows(dz_next, row, counts, start, NEXT_WIDTH, COLUMNS).to(tl.float32)
            store_rows(whole, row, exists, start, error, NEXT_WIDTH, COLUMNS)
        # What follows reads what other threads of this block have stored.
        tl.debug_barrier()
        upstream = load_rows(whole, row, counts, 0, NEXT_WIDTH, BLOCK_NEXT_WIDTH)
    elif grad_next_projection is not None:
        dz_next = grad_next_projection + first * NEXT_WIDTH
        upstream = load_rows(dz_next, row, counts, 0, NEXT_WIDTH, BLOCK_NEXT_WIDTH)

    residual_sum = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
    grad_attention = tl.zeros((ROWS, ROWS), tl.float32)
    for start in range(0, CODE_WIDTH, ATOMS):
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        update = tl.zeros((ROWS, ATOMS), tl.float32)
        if grad_next_projection is not None or target is not None:
            following = atoms
            if next_dictionary is not None:
                following = load_atoms(next_dictionary, start, CODE_WIDTH, NEXT_WIDTH, BLOCK_NEXT_WIDTH, ATOMS)
            update = tl.dot(upstream, following, update, input_precision=PRECISION)
        # Masked before they are added: else the product starts from dH⁺, which is then not copied ahead of its use.
        active = exists[:, None]
        if NONLINEARITY != "identity":
            active = load_rows(next_codes + first * CODE_WIDTH, row, counts, start, CODE_WIDTH, ATOMS) != 0
        update = tl.where(active, update, 0.0)
        if grad_next_codes is not None:
            dh_next = load_rows(grad_next_codes + first * CODE_WIDTH, row, counts, start, CODE_WIDTH, ATOMS)
            update += tl.where(active, dh_next, 0.0).to(tl.float32)
        low = update.to(grad_update.dtype.element_ty)
        store_rows(du, row, exists, start, low, CODE_WIDTH, ATOMS)
        residual_sum = tl.dot(low, tl.trans(atoms), residual_sum, input_precision=PRECISION)
        if MERGED:
            chunk = load_rows(codes + first * CODE_WIDTH, row, counts, start, CODE_WIDTH, ATOMS)
            grad_attention = tl.dot(low, tl.trans(chunk), grad_attention, input_precision=PRECISION)
    store_rows(dr, row, exists, 0, residual_sum * step, WIDTH, BLOCK_WIDTH)
    # Asked for again, not kept: over the loop above this mask would cost up to 64 registers, and spill others.
    _, _, _, counts, visible = rows_of_sequences(begin, end, tokens, lengths, ROWS)
    tl.debug_barrier()

    if grad_projection is not None and codes is not None and not MERGED:
        # In a loop of its own, though it reads dU again: of two products in one loop the compiler gives all warps
        # the same rows, and with 64 rows and eight warps every one is computed by two.
        for start in range(0, CODE_WIDTH, ATOMS):
            update = load_rows(du, row, counts, start, CODE_WIDTH, ATOMS)
            chunk = load_rows(codes + first * CODE_WIDTH, row, counts, start, CODE_WIDTH, ATOMS)
            grad_attention = tl.dot(update, tl.trans(chunk), grad_attention, input_precision=PRECISION)
    scores = tile_scores(z, row, counts, scale, WIDTH, COLUMNS, False, PRECISION)
    attention, _ = softmax_tile(scores, visible)
    if residual is not None:
        r = residual + first * WIDTH
        for start in range(0, WIDTH, COLUMNS):
            left = residual_columns(x, z, attention, row, counts, start, codes is None, WIDTH, COLUMNS, PRECISION)
            store_rows(r, row, exists, start, left * step, WIDTH, COLUMNS)
    if grad_projection is not None:
        for start in range(0, WIDTH, COLUMNS):
            values = load_values(x, z, row, counts, start, codes is None, WIDTH, COLUMNS)
            through = load_rows(dr, row, counts, start, WIDTH, COLUMNS)
            grad_attention = tl.dot(-through, tl.trans(values), grad_attention, input_precision=PRECISION)
        grad_scores = attention * (grad_attention - tl.sum(attention * grad_attention, 1)[:, None])
        symmetric = ((grad_scores + tl.trans(grad_scores)) * scale).to(grad_update.dtype.element_ty)
    transposed = tl.trans(attention.to(grad_update.dtype.element_ty))
    if grad_projection is not None:
        for start in range(0, WIDTH, COLUMNS):
            own = load_rows(z, row, counts, start, WIDTH, COLUMNS)
            through = load_rows(dr, row, counts, start, WIDTH, COLUMNS)
            gradient = tl.dot(symmetric, own, input_precision=PRECISION)
            gradient = tl.dot(transposed, -through, gradient, input_precision=PRECISION)
            # dR may stand where this is written: all threads have read these columns of it.
            tl.debug_barrier()
            store_rows(grad_projection + first * WIDTH, row, exists, start, gradient, WIDTH, COLUMNS)
    if grad_signal is not None:
        for start in range(0, WIDTH, COLUMNS):
            through = load_rows(dr, row, counts, start, WIDTH, COLUMNS)
            gradient = through.to(tl.float32) + tl.dot(transposed, through, input_precision=PRECISION)
            store_rows(grad_signal + first * WIDTH, row, exists, start, gradient, WIDTH, COLUMNS)
    if grad_codes is not None:
        for start in range(0, CODE_WIDTH, ATOMS):
            update = load_rows(du, row, counts, start, CODE_WIDTH, ATOMS)
            gradient = tl.dot(transposed, update, input_precision=PRECISION)
            store_rows(grad_codes + first * CODE_WIDTH, row, exists, start, gradient, CODE_WIDTH, ATOMS)


# The layer: the resolved arguments of `cdt_fast.ops.unrolled_layer`, contiguous and, but for the target, of one dtype;
# T is at most 64, n and k at most 256.
def forward(layer: Any, processors: int, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return H⁺ `[B, T, m]`, Z⁺ `[B, T, k]` and, with a target, the squared error of each block, in float32."""
    codes, signal, dictionary, projection, next_dictionary, target, lengths, step, threshold, scale, name = layer
    sequences, tokens, width = signal.shape
    next_width = width if next_dictionary is None else next_dictionary.shape[0]
    programs = programs_of(sequences, tokens, processors, blocks)
    next_codes = signal.new_empty((sequences, tokens, dictionary.shape[1]))
    next_projection = signal.new_empty((sequences, tokens, next_width))
    residual = next_projection if next_width == width else torch.empty_like(signal)
    errors = None if target is None else signal.new_empty((programs,), dtype=torch.float32)
    if programs:
        unrolled_forward_kernel[(programs,)](
            *(codes, signal, projection, dictionary, next_dictionary, target),
            *(next_codes, next_projection, residual, errors, lengths),
            *(sequences, tokens, programs, step, threshold, scale),
            **sizes_of(dictionary),
            NEXT_WIDTH=next_width,
            BLOCK_NEXT_WIDTH=block_width(next_width),
            NONLINEARITY=name,
            **blocks,
        )
    return next_codes, next_projection, errors


def backward(
    layer: Any,
    next_codes: Tensor,
    next_projection: Tensor | None,
    grad_next_codes: Tensor | None,
    grad_next_projection: Tensor | None,
    grad_error: Tensor | None,
    needs: Sequence[bool],  # of signal, codes, dictionary and projection
    processors: int,
    blocks: Blocks,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Return dU, (1/c)(X − A Z), the whole dZ⁺, dX, dZ and dH; None or, for dX, anything, if not needed."""
    needs_signal, needs_codes, needs_dictionary, needs_projection = needs
    codes, signal, dictionary, projection, next_dictionary, target, lengths, step, _, scale, name = layer
    sequences, tokens, width = signal.shape
    next_width = width if next_dictionary is None else next_dictionary.shape[0]
    target = None if grad_error is None else target
    next_projection = None if target is None else next_projection
    whole = None if target is None else signal.new_empty((sequences, tokens, next_width))
    grad_projection = torch.empty_like(signal) if needs_projection else None
    grad_residual = grad_projection
    if needs_signal or grad_residual is None:
        grad_residual = torch.empty_like(signal)
    grad_signal = torch.empty_like(signal) if codes is None and needs_signal else None
    update = torch.empty_like(next_codes)
    residual = torch.empty_like(signal) if needs_dictionary else None
    grad_codes = torch.empty_like(next_codes) if needs_codes else None
    programs = programs_of(sequences, tokens, processors, blocks)
    if programs:
        unrolled_backward_kernel[(programs,)](
            *(codes, signal, projection, dictionary, next_codes, next_projection, next_dictionary, target),
            *(grad_next_codes, grad_next_projection, grad_error, lengths),
            *(update, whole, residual, grad_residual, grad_signal, grad_projection, grad_codes),
            *(sequences, tokens, programs, step, scale),
            **sizes_of(dictionary),
            NEXT_WIDTH=next_width,
            BLOCK_NEXT_WIDTH=block_width(next_width),
            NONLINEARITY=name,
            MERGED=codes is not None and needs_projection and blocks["num_warps"] == 4,
            **blocks,
        )
    grad_next = grad_next_projection if whole is None else whole
    grad_signal = grad_residual if grad_signal is None else grad_signal
    return update, residual, grad_next, grad_signal, grad_projection, grad_codes
