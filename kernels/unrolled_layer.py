"""The unrolled layer of short sequences: one read of the codes, one write, several whole sequences a tile.

    forward   A = softmax_rows(β Z Zᵀ),  U = A H + (1/c)(X − A Z) D,  H⁺ = φ(U),  Z⁺ = H⁺ D⁺ᵀ,  ε = Σ‖Z⁺ − S‖²
    backward  dZ⁺ += 2 dε (Z⁺ − S),  dU = (dH⁺ + dZ⁺ D⁺) ∘ φ′,  dR = (1/c) dU Dᵀ,  dA = dU Hᵀ − dR Zᵀ,
              dS = A ∘ (dA − rowsum(A ∘ dA)),  dZ = β (dS + dSᵀ) Z − Aᵀ dR,  dH = Aᵀ dU,  dX = dR

A tile holds its rows of X − A Z, or of dR, over the whole width n and takes the code width m in chunks. A is computed
again in the backward and φ′ is H⁺ ≠ 0, so nothing is saved but what the network holds anyway. The dictionaries'
gradients are products over all rows, for which the backward stores dU, (1/c)(X − A Z) and the whole dZ⁺.
"""

# pyright: reportGeneralTypeIssues=false
# The checker takes a `@triton.jit` function that is called in another for one that never returns.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.arguments import UnrolledLayerArguments, UnrolledLayerBackwardArguments, UnrolledLayerGradients
from cdt_fast.kernels.blocks import (
    UNROLLED_LAYER,
    UNROLLED_LAYER_BACKWARD,
    UNROLLED_LAYER_LEAN,
    UNROLLED_LAYER_UPDATE,
    Blocks,
)
from cdt_fast.kernels.cards import dot_precision
from cdt_fast.kernels.launch import Launch, block_width, ceil_div, whole_tiles
from cdt_fast.kernels.tiles import (
    bad_rows,
    finite,
    load_rows,
    nonlinearity,
    poisoned_rows,
    sequence_rows,
    softmax_tile,
    store_rows,
    tile_scores,
)


@triton.jit
def load_atoms(
    dictionary,
    start,
    CODE_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ATOMS: tl.constexpr,
):
    """`ATOMS` columns of a contiguous `[WIDTH, CODE_WIDTH]`, as `[BLOCK_WIDTH, ATOMS]`; zero elsewhere."""
    row = tl.arange(0, BLOCK_WIDTH)
    atom = start + tl.arange(0, ATOMS)
    return tl.load(
        dictionary + row[:, None] * CODE_WIDTH + atom[None, :],
        mask=(row < WIDTH)[:, None] & (atom < CODE_WIDTH)[None, :],
        other=0.0,
    )


@triton.jit(do_not_specialize=["sequences", "tokens", "per_tile"])
def unrolled_forward_kernel(
    codes,  # [sequences, tokens, CODE_WIDTH]
    signal,  # [sequences, tokens, WIDTH]
    projection,  # [sequences, tokens, WIDTH]
    dictionary,  # [WIDTH, CODE_WIDTH]
    next_dictionary,  # [NEXT_WIDTH, CODE_WIDTH], or None for the same
    target,  # [sequences, tokens, NEXT_WIDTH] or None
    next_codes,  # [sequences, tokens, CODE_WIDTH]
    next_projection,  # [sequences, tokens, NEXT_WIDTH]
    errors,  # [tiles] float32, with target
    lengths,  # [sequences] or None
    sequences,
    tokens,
    per_tile,
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
    # 64 bits for the tile's first row, 32 for what lies inside it: offsets of 64 bits cost twice the registers.
    first, row, exists, counts, visible = sequence_rows(tl.program_id(0), sequences, tokens, per_tile, lengths, ROWS)
    codes += first * CODE_WIDTH
    next_codes += first * CODE_WIDTH
    signal += first * WIDTH
    projection += first * WIDTH
    next_projection += first * NEXT_WIDTH
    scores = tile_scores(projection, row, counts, scale, WIDTH, ROWS, COLUMNS, False, PRECISION)
    attention, _ = softmax_tile(scores, visible)
    own = load_rows(projection, row, counts, 0, WIDTH, BLOCK_WIDTH)
    residual = load_rows(signal, row, counts, 0, WIDTH, BLOCK_WIDTH).to(tl.float32)
    # Where z is not finite the whole sequence's attention is NaN: that must only be kept from the tile's other ones.
    residual -= tl.dot(attention.to(own.dtype), finite(own), input_precision=PRECISION)
    residual = (residual * step).to(own.dtype)

    attention = attention.to(codes.dtype.element_ty)
    result = tl.zeros((ROWS, BLOCK_NEXT_WIDTH), tl.float32)
    bad = tl.zeros((ROWS,), tl.int32)
    for start in range(0, CODE_WIDTH, ATOMS):
        atom = start + tl.arange(0, ATOMS)
        offset = row[:, None] * CODE_WIDTH + atom[None, :]
        inside = (atom < CODE_WIDTH)[None, :]
        chunk = tl.load(codes + offset, mask=counts[:, None] & inside, other=0.0)
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        bad |= bad_rows(chunk).to(tl.int32)
        update = tl.dot(attention, finite(chunk), input_precision=PRECISION)
        update = tl.dot(residual, atoms, update, input_precision=PRECISION)
        following = nonlinearity(update, threshold, NONLINEARITY).to(chunk.dtype)
        tl.store(next_codes + offset, following, mask=exists[:, None] & inside)
        if next_dictionary is not None:
            atoms = load_atoms(next_dictionary, start, CODE_WIDTH, NEXT_WIDTH, BLOCK_NEXT_WIDTH, ATOMS)
        result = tl.dot(following, tl.trans(atoms), result, input_precision=PRECISION)
    # Codes that are not finite beside a projection that is: Z⁺ shows it in the whole sequence. Who sees whom is asked
    # in other words than above: the same ones would be kept over the loop, and spill others.
    if target is None:
        # The lengths are read again: kept over the loop, what counts spills. With a target it stays for the error.
        _, _, _, counts, _ = sequence_rows(tl.program_id(0), sequences, tokens, per_tile, lengths, ROWS)
    start_of = row - row % tokens
    seen = (row[None, :] >= start_of[:, None]) & (row[None, :] < start_of[:, None] + tokens) & counts[:, None]
    result = tl.where(poisoned_rows(seen, bad != 0)[:, None], float("nan"), result)
    store_rows(next_projection, row, exists, 0, result, NEXT_WIDTH, BLOCK_NEXT_WIDTH)
    if target is not None:
        # Read again, a few columns at a time: two whole tiles in float32 would spill. Both are zero at padding.
        tl.debug_barrier()
        error = tl.zeros((ROWS,), tl.float32)
        for start in range(0, NEXT_WIDTH, COLUMNS):
            difference = load_rows(next_projection, row, exists, start, NEXT_WIDTH, COLUMNS).to(tl.float32)
            difference -= load_rows(target + first * NEXT_WIDTH, row, counts, start, NEXT_WIDTH, COLUMNS).to(tl.float32)
            error += tl.sum(difference * difference, 1)
        tl.store(errors + tl.program_id(0), tl.sum(error, 0))


@triton.jit(do_not_specialize=["rows", "tokens"])
def unrolled_update_kernel(
    next_codes,  # [rows, CODE_WIDTH]
    next_projection,  # [rows, NEXT_WIDTH], read with target
    next_dictionary,  # [NEXT_WIDTH, CODE_WIDTH]
    target,  # [rows, NEXT_WIDTH] or None
    lengths,  # [rows / tokens] or None
    grad_next_codes,  # [rows, CODE_WIDTH] or None
    grad_next_projection,  # [rows, NEXT_WIDTH] or None
    grad_error,  # [1] float32, with target
    grad_update,  # [rows, CODE_WIDTH]
    whole_grad_next_projection,  # [rows, NEXT_WIDTH], written with target
    rows,
    tokens,
    CODE_WIDTH: tl.constexpr,
    NEXT_WIDTH: tl.constexpr,
    BLOCK_NEXT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ATOMS: tl.constexpr,
    NONLINEARITY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    exists = first + row < rows
    counts = exists
    if lengths is not None:
        counts = exists & ((first + row) % tokens < tl.load(lengths + (first + row) // tokens, mask=exists, other=0))
    next_codes += first * CODE_WIDTH
    grad_update += first * CODE_WIDTH

    HAS_NEXT: tl.constexpr = grad_next_projection is not None or target is not None  # pyright: ignore[reportAssignmentType]
    if grad_next_projection is not None:
        grad_next_projection += first * NEXT_WIDTH
        upstream = load_rows(grad_next_projection, row, counts, 0, NEXT_WIDTH, BLOCK_NEXT_WIDTH)
    if target is not None:
        next_projection += first * NEXT_WIDTH
        error = load_rows(next_projection, row, counts, 0, NEXT_WIDTH, BLOCK_NEXT_WIDTH).to(tl.float32)
        error -= load_rows(target + first * NEXT_WIDTH, row, counts, 0, NEXT_WIDTH, BLOCK_NEXT_WIDTH).to(tl.float32)
        # A loss that does not count gives no gradient, also where it is infinite: 0 · ∞ = NaN.
        weight = 2.0 * tl.load(grad_error)
        error = tl.where(weight == 0.0, 0.0, error * weight)
        if grad_next_projection is not None:
            error += upstream.to(tl.float32)
        upstream = error.to(next_codes.dtype.element_ty)
        store_rows(
            whole_grad_next_projection + first * NEXT_WIDTH, row, exists, 0, upstream, NEXT_WIDTH, BLOCK_NEXT_WIDTH
        )

    for start in range(0, CODE_WIDTH, ATOMS):
        atom = start + tl.arange(0, ATOMS)
        offset = row[:, None] * CODE_WIDTH + atom[None, :]
        mask = counts[:, None] & (atom < CODE_WIDTH)[None, :]
        update = tl.zeros((ROWS, ATOMS), tl.float32)
        if HAS_NEXT:
            atoms = load_atoms(next_dictionary, start, CODE_WIDTH, NEXT_WIDTH, BLOCK_NEXT_WIDTH, ATOMS)
            update = tl.dot(upstream, atoms, update, input_precision=PRECISION)
        if grad_next_codes is not None:
            update += tl.load(grad_next_codes + first * CODE_WIDTH + offset, mask=mask, other=0.0).to(tl.float32)
        if NONLINEARITY != "identity":
            following = tl.load(next_codes + offset, mask=mask, other=0.0)
            update = tl.where(following != 0, update, 0.0)
        tl.store(
            grad_update + offset,
            update.to(grad_update.dtype.element_ty),
            mask=exists[:, None] & (atom < CODE_WIDTH)[None, :],
        )


@triton.jit(do_not_specialize=["sequences", "tokens", "per_tile"])
def unrolled_backward_kernel(
    codes,  # [sequences, tokens, CODE_WIDTH]
    signal,  # [sequences, tokens, WIDTH]
    projection,  # [sequences, tokens, WIDTH]
    dictionary,  # [WIDTH, CODE_WIDTH]
    grad_update,  # [sequences, tokens, CODE_WIDTH]
    lengths,  # [sequences] or None
    residual,  # [sequences, tokens, WIDTH] or None
    grad_signal,  # [sequences, tokens, WIDTH]
    grad_projection,  # [sequences, tokens, WIDTH] or None
    grad_codes,  # [sequences, tokens, CODE_WIDTH] or None
    sequences,
    tokens,
    per_tile,
    step,
    scale,
    CODE_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ATOMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first, row, exists, counts, _ = sequence_rows(tl.program_id(0), sequences, tokens, per_tile, lengths, ROWS)
    codes += first * CODE_WIDTH
    grad_update += first * CODE_WIDTH
    signal += first * WIDTH
    projection += first * WIDTH
    grad_signal += first * WIDTH
    residual_sum = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
    for start in range(0, CODE_WIDTH, ATOMS):
        atom = start + tl.arange(0, ATOMS)
        offset = row[:, None] * CODE_WIDTH + atom[None, :]
        update = tl.load(grad_update + offset, mask=counts[:, None] & (atom < CODE_WIDTH)[None, :], other=0.0)
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        residual_sum = tl.dot(update, tl.trans(atoms), residual_sum, input_precision=PRECISION)
    store_rows(grad_signal, row, exists, 0, residual_sum * step, WIDTH, BLOCK_WIDTH)
    # Asked for again, not kept: over the loop above this mask would cost up to 64 registers, and spill others.
    _, _, _, _, visible = sequence_rows(tl.program_id(0), sequences, tokens, per_tile, lengths, ROWS)
    # A row of dU that is not finite makes its row of dR so; all that see it get NaN, and nobody else.
    poisoned = poisoned_rows(visible, bad_rows(residual_sum))[:, None]
    # What follows reads what other threads of this block have stored.
    tl.debug_barrier()

    grad_attention = tl.zeros((ROWS, ROWS), tl.float32)
    if grad_projection is not None:
        # In a loop of its own, though it reads dU again: of two products in one loop the compiler gives all warps the
        # same rows, and with 64 rows every one is computed by two.
        for start in range(0, CODE_WIDTH, ATOMS):
            atom = start + tl.arange(0, ATOMS)
            offset = row[:, None] * CODE_WIDTH + atom[None, :]
            mask = counts[:, None] & (atom < CODE_WIDTH)[None, :]
            update = tl.load(grad_update + offset, mask=mask, other=0.0)
            chunk = tl.load(codes + offset, mask=mask, other=0.0)
            grad_attention = tl.dot(update, tl.trans(chunk), grad_attention, input_precision=PRECISION)
    scores = tile_scores(projection, row, counts, scale, WIDTH, ROWS, COLUMNS, False, PRECISION)
    attention, _ = softmax_tile(scores, visible)
    if residual is not None:
        low = attention.to(codes.dtype.element_ty)
        for start in range(0, WIDTH, COLUMNS):
            own = load_rows(projection, row, counts, start, WIDTH, COLUMNS)
            left = load_rows(signal, row, counts, start, WIDTH, COLUMNS).to(tl.float32)
            left -= tl.dot(low, finite(own), input_precision=PRECISION)
            store_rows(residual + first * WIDTH, row, exists, start, left * step, WIDTH, COLUMNS)
    if grad_projection is not None:
        for start in range(0, WIDTH, COLUMNS):
            own = load_rows(projection, row, counts, start, WIDTH, COLUMNS)
            grad_residual = load_rows(grad_signal, row, counts, start, WIDTH, COLUMNS)
            grad_attention = tl.dot(-grad_residual, tl.trans(own), grad_attention, input_precision=PRECISION)
        grad_attention = tl.where(visible, grad_attention, 0.0)
        grad_scores = attention * (grad_attention - tl.sum(attention * grad_attention, 1)[:, None])
        # Once more: a row whose sum is NaN is NaN from end to end, and the transposed would carry that on.
        symmetric = tl.where(visible, (grad_scores + tl.trans(grad_scores)) * scale, 0.0).to(codes.dtype.element_ty)
    transposed = tl.trans(attention.to(codes.dtype.element_ty))
    if grad_projection is not None:
        for start in range(0, WIDTH, COLUMNS):
            own = finite(load_rows(projection, row, counts, start, WIDTH, COLUMNS))
            grad_residual = finite(load_rows(grad_signal, row, counts, start, WIDTH, COLUMNS))
            gradient = tl.dot(symmetric, own, input_precision=PRECISION)
            gradient = tl.dot(transposed, -grad_residual, gradient, input_precision=PRECISION)
            gradient = tl.where(poisoned, float("nan"), gradient)
            store_rows(grad_projection + first * WIDTH, row, exists, start, gradient, WIDTH, COLUMNS)
    if grad_codes is not None:
        for start in range(0, CODE_WIDTH, ATOMS):
            atom = start + tl.arange(0, ATOMS)
            offset = row[:, None] * CODE_WIDTH + atom[None, :]
            inside = (atom < CODE_WIDTH)[None, :]
            update = finite(tl.load(grad_update + offset, mask=counts[:, None] & inside, other=0.0))
            gradient = tl.where(poisoned, float("nan"), tl.dot(transposed, update, input_precision=PRECISION))
            tl.store(
                grad_codes + first * CODE_WIDTH + offset,
                gradient.to(codes.dtype.element_ty),
                mask=exists[:, None] & inside,
            )


def _forward_work(launch: Launch) -> float:
    """Scores and A Z, then of every atom A H, the update and the next projection."""
    sizes, rows = launch.constants, launch.blocks.rows
    small = rows * (whole_tiles(sizes["WIDTH"], launch.blocks.columns) + sizes["BLOCK_WIDTH"])
    large = rows + sizes["BLOCK_WIDTH"] + sizes["BLOCK_NEXT_WIDTH"]
    return 2.0 * launch.grid[0] * rows * (small + large * whole_tiles(sizes["CODE_WIDTH"], launch.blocks.atoms))


def _update_work(launch: Launch) -> float:
    """dZ⁺ D⁺, where a gradient arrives there."""
    given, sizes = launch.arguments, launch.constants
    if given["grad_next_projection"] is None and given["target"] is None:
        return 0.0
    atoms = whole_tiles(sizes["CODE_WIDTH"], launch.blocks.atoms)
    return 2.0 * launch.grid[0] * launch.blocks.rows * sizes["BLOCK_NEXT_WIDTH"] * atoms


def _backward_work(launch: Launch) -> float:
    """dU Dᵀ and dU Hᵀ, the scores, A Z, dR Zᵀ, both parts of dZ, and Aᵀ dU."""
    given, sizes, rows = launch.arguments, launch.constants, launch.blocks.rows
    of_projection, of_codes = given["grad_projection"] is not None, given["grad_codes"] is not None
    columns = whole_tiles(sizes["WIDTH"], launch.blocks.columns)
    small = rows * columns * (1 + (given["residual"] is not None) + 3 * of_projection)
    large = sizes["BLOCK_WIDTH"] + rows * (of_projection + of_codes)
    return 2.0 * launch.grid[0] * rows * (small + large * whole_tiles(sizes["CODE_WIDTH"], launch.blocks.atoms))


def unrolled_forward(
    layer: UnrolledLayerArguments, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """H⁺ `[B, T, m]`, Z⁺ `[B, T, k]` and, with a target, the squared error of each tile `[tiles]`, float32.

    All tensors are contiguous and, but for the target, of one dtype; T is at most `LONGEST`, n and k at most `WIDEST`.
    """
    codes, next_dictionary = layer.codes, layer.next_dictionary
    sequences, tokens, code_width = codes.shape
    width = layer.signal.shape[-1]
    next_width = width if next_dictionary is None else next_dictionary.shape[0]
    table = UNROLLED_LAYER_LEAN if next_dictionary is None and layer.lengths is None else UNROLLED_LAYER
    blocks = blocks or table.blocks(codes, max(width, next_width))
    per_tile = blocks.rows // max(1, tokens)
    tiles = ceil_div(sequences, per_tile) if tokens else 0
    next_codes = torch.empty_like(codes)
    next_projection = codes.new_empty((sequences, tokens, next_width))
    errors = None if layer.target is None else codes.new_empty((tiles,), dtype=torch.float32)
    Launch(
        unrolled_forward_kernel,
        (tiles,),
        blocks,
        {
            "codes": codes,
            "signal": layer.signal,
            "projection": layer.projection,
            "dictionary": layer.dictionary,
            "next_dictionary": next_dictionary,
            "target": layer.target,
            "next_codes": next_codes,
            "next_projection": next_projection,
            "errors": errors,
            "lengths": layer.lengths,
            "sequences": sequences,
            "tokens": tokens,
            "per_tile": per_tile,
            "step": layer.step,
            "threshold": layer.threshold,
            "scale": layer.scale,
        },
        {
            "CODE_WIDTH": code_width,
            "WIDTH": width,
            "BLOCK_WIDTH": block_width(width),
            "NEXT_WIDTH": next_width,
            "BLOCK_NEXT_WIDTH": block_width(next_width),
            "NONLINEARITY": layer.nonlinearity,
            "PRECISION": dot_precision(codes.dtype),
        },
        work=_forward_work,
    ).run()
    return next_codes, next_projection, errors


def unrolled_backward(
    layer: UnrolledLayerBackwardArguments,
    blocks: Blocks | None = None,
    update_blocks: Blocks | None = None,
) -> UnrolledLayerGradients:
    """The gradients of `unrolled_forward`: of what is needed, and of the signal always.

    Its `projection` is there, and its dictionaries are contiguous and of the dtype of the codes.
    """
    codes, signal = layer.codes, layer.signal
    blocks = blocks or UNROLLED_LAYER_BACKWARD.blocks(codes)
    sequences, tokens, code_width = codes.shape
    width = signal.shape[-1]
    update, whole = unrolled_update(layer, update_blocks)
    gradients = UnrolledLayerGradients(
        update=update,
        residual=torch.empty_like(signal) if layer.needs_dictionary else None,
        next_projection=whole,
        signal=torch.empty_like(signal),
        projection=torch.empty_like(signal) if layer.needs_projection else None,
        codes=torch.empty_like(codes) if layer.needs_codes else None,
    )
    per_tile = blocks.rows // max(1, tokens)
    Launch(
        unrolled_backward_kernel,
        (ceil_div(sequences, per_tile) if tokens else 0,),
        blocks,
        {
            "codes": codes,
            "signal": signal,
            "projection": layer.projection,
            "dictionary": layer.dictionary,
            "grad_update": update,
            "lengths": layer.lengths,
            "residual": gradients.residual,
            "grad_signal": gradients.signal,
            "grad_projection": gradients.projection,
            "grad_codes": gradients.codes,
            "sequences": sequences,
            "tokens": tokens,
            "per_tile": per_tile,
            "step": layer.step,
            "scale": layer.scale,
        },
        {
            "CODE_WIDTH": code_width,
            "WIDTH": width,
            "BLOCK_WIDTH": block_width(width),
            "PRECISION": dot_precision(codes.dtype),
        },
        work=_backward_work,
    ).run()
    return gradients


def unrolled_update(
    layer: UnrolledLayerBackwardArguments, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor | None]:
    """dU `[B, T, m]`, and the whole dZ⁺ `[B, T, k]` (None where neither a gradient nor a loss arrives there)."""
    next_codes = layer.next_codes
    blocks = blocks or UNROLLED_LAYER_UPDATE.blocks(next_codes)
    _, tokens, code_width = next_codes.shape
    rows = next_codes.shape[:-1].numel()
    next_dictionary = layer.dictionary if layer.next_dictionary is None else layer.next_dictionary
    next_width = next_dictionary.shape[0]
    target = None if layer.grad_error is None else layer.target
    update = torch.empty_like(next_codes)
    whole = layer.grad_next_projection
    if target is not None:
        whole = next_codes.new_empty((*next_codes.shape[:-1], next_width))
    Launch(
        unrolled_update_kernel,
        (ceil_div(rows, blocks.rows),),
        blocks,
        {
            "next_codes": next_codes,
            "next_projection": layer.next_projection,
            "next_dictionary": next_dictionary,
            "target": target,
            "lengths": layer.lengths,
            "grad_next_codes": layer.grad_next_codes,
            "grad_next_projection": layer.grad_next_projection,
            "grad_error": layer.grad_error,
            "grad_update": update,
            "whole_grad_next_projection": whole,
            "rows": rows,
            "tokens": tokens,
        },
        {
            "CODE_WIDTH": code_width,
            "NEXT_WIDTH": next_width,
            "BLOCK_NEXT_WIDTH": block_width(next_width),
            "NONLINEARITY": layer.nonlinearity,
            "PRECISION": dot_precision(next_codes.dtype),
        },
        work=_update_work,
    ).run()
    return update, whole
