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

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.launch import Launch, block_width, card_of, ceil_div, dot_precision
from cdt_fast.kernels.residual_linear import nonlinearity
from cdt_fast.kernels.symmetric_attention_packed import tile_scores
from cdt_fast.kernels.tiles import (
    bad_rows,
    finite,
    load_rows,
    poisoned_rows,
    sequence_rows,
    softmax_tile,
    store_rows,
)


class Blocks(NamedTuple):
    """Shape of a block: the rows of its tile, the atoms and columns that it takes at a time, warps, pipeline stages."""

    rows: int
    atoms: int
    columns: int
    warps: int
    stages: int


# By family of cards, for elements of 2 bytes. Tiles of 128 rows spill, and tiles of float32 leave no shared memory for
# the dictionary: float32 is for torch's own products. As many atoms at a time that no two warps compute the same: the
# compiler gives each of eight warps all rows and an eighth of the columns, of which the tensor cores take eight or
# more; where tiles are no wider than high it gives each warp sixteen rows, which eight warps are too many for.
# Of the forward the greatest width of signal and next projection; whether a row is only for layers with one dictionary
# and without lengths, as others do not fit; and the block.
FORWARD_BLOCKS = {
    "consumer": [
        (128, False, Blocks(64, 32, 32, 4, 2)),
        (256, True, Blocks(64, 64, 32, 8, 2)),
        (256, False, Blocks(64, 32, 32, 8, 2)),
    ],
    "ampere": [(64, False, Blocks(64, 64, 32, 4, 2)), (256, False, Blocks(64, 64, 64, 8, 2))],
    # Wide signals are computed twice here: four warps spill, and so do 128 rows. Triton 3.9 spills up to 160 bytes of
    # these, 3.6 and 3.7 nothing; of Blocks(64, 32, 32, 8, 3), not timed, up to 72.
    "hopper": [(64, False, Blocks(64, 64, 32, 4, 3)), (256, False, Blocks(64, 64, 32, 8, 3))],
}
UPDATE_BLOCKS = {
    "consumer": Blocks(64, 32, 0, 8, 3),
    "ampere": Blocks(64, 64, 0, 8, 2),
    "hopper": Blocks(128, 64, 0, 8, 3),
}
BACKWARD_BLOCKS = {
    "consumer": Blocks(64, 64, 32, 8, 2),
    "ampere": Blocks(64, 64, 32, 8, 2),
    "hopper": Blocks(64, 64, 32, 8, 3),
}
LONGEST = 64
WIDEST = 256


@triton.jit
def load_atoms(
    dictionary, start, CODE_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ATOMS: tl.constexpr
):
    """`ATOMS` columns of a contiguous `[WIDTH, CODE_WIDTH]`, as `[BLOCK_WIDTH, ATOMS]`; zero elsewhere."""
    row = tl.arange(0, BLOCK_WIDTH)
    atom = start + tl.arange(0, ATOMS)
    return tl.load(
        dictionary + row[:, None] * CODE_WIDTH + atom[None, :],
        mask=(row < WIDTH)[:, None] & (atom < CODE_WIDTH)[None, :],
        other=0.0,
    )


@triton.jit
def unrolled_forward_kernel(
    codes, signal, projection, dictionary, next_dictionary, target, next_codes, next_projection, errors, lengths,
    sequences, tokens, per_tile, step, threshold, scale,
    CODE_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    NEXT_WIDTH: tl.constexpr, BLOCK_NEXT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, ATOMS: tl.constexpr, COLUMNS: tl.constexpr,
    NONLINEARITY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # codes and next_codes [sequences, tokens, m]; signal and projection [sequences, tokens, WIDTH]; dictionary
    # [WIDTH, m]; next_dictionary [NEXT_WIDTH, m] or None for the same; target and next_projection
    # [sequences, tokens, NEXT_WIDTH]; errors [tiles], float32, with target
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


@triton.jit
def unrolled_update_kernel(
    next_codes, next_projection, next_dictionary, target, lengths,
    grad_next_codes, grad_next_projection, grad_error, grad_update, whole_grad_next_projection,
    rows, tokens,
    CODE_WIDTH: tl.constexpr, NEXT_WIDTH: tl.constexpr, BLOCK_NEXT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, ATOMS: tl.constexpr, NONLINEARITY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # dU: next_codes and grad_update [rows, m], next_projection and target [rows, NEXT_WIDTH], next_dictionary
    # [NEXT_WIDTH, m], grad_error [1] float32 with target; of the two upstream gradients either may be None
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


@triton.jit
def unrolled_backward_kernel(
    codes, signal, projection, dictionary, grad_update, lengths,
    residual, grad_signal, grad_projection, grad_codes,
    sequences, tokens, per_tile, step, scale,
    CODE_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, ATOMS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # grad_update and grad_codes like codes; residual, grad_signal and grad_projection like signal; residual,
    # grad_projection and grad_codes may be None
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


def forward_blocks(family: str, width: int, lean: bool) -> Blocks:
    """The row of `FORWARD_BLOCKS` for signals and projections of up to `width` columns; lean: as the table says."""
    return next(
        blocks for widest, only_lean, blocks in FORWARD_BLOCKS[family] if width <= widest and (lean or not only_lean)
    )


def unrolled_forward(
    codes: Tensor,
    signal: Tensor,
    projection: Tensor,
    dictionary: Tensor,
    next_dictionary: Tensor | None,
    target: Tensor | None,
    lengths: Tensor | None,
    step: float,
    threshold: float,
    scale: float,
    nonlinearity: str,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """H⁺ `[B, T, m]`, Z⁺ `[B, T, k]` and, with a target, the squared error of each tile `[tiles]`, float32.

    All tensors are contiguous and of one dtype; `T ≤ LONGEST`, and the widths n and k are at most `WIDEST`.
    """
    sequences, tokens, atoms = codes.shape
    width = signal.shape[-1]
    next_width = width if next_dictionary is None else next_dictionary.shape[0]
    lean = next_dictionary is None and lengths is None
    blocks = blocks or forward_blocks(card_of(codes).family, max(width, next_width), lean)
    per_tile = blocks.rows // max(1, tokens)
    tiles = ceil_div(sequences, per_tile) if tokens else 0
    next_codes = torch.empty_like(codes)
    next_projection = codes.new_empty((sequences, tokens, next_width))
    errors = None if target is None else codes.new_empty((tiles,), dtype=torch.float32)
    Launch(
        unrolled_forward_kernel,
        (tiles,),
        {
            "codes": codes, "signal": signal, "projection": projection, "dictionary": dictionary,
            "next_dictionary": next_dictionary, "target": target, "next_codes": next_codes,
            "next_projection": next_projection, "errors": errors, "lengths": lengths,
            "sequences": sequences, "tokens": tokens, "per_tile": per_tile,
            "step": step, "threshold": threshold, "scale": scale,
        },
        {
            "CODE_WIDTH": atoms, "WIDTH": width, "BLOCK_WIDTH": block_width(width),
            "NEXT_WIDTH": next_width, "BLOCK_NEXT_WIDTH": block_width(next_width),
            "ROWS": blocks.rows, "ATOMS": blocks.atoms, "COLUMNS": blocks.columns,
            "NONLINEARITY": nonlinearity, "PRECISION": dot_precision(codes.dtype),
        },
        blocks.warps,
        blocks.stages,
    ).run()  # fmt: skip
    return next_codes, next_projection, errors


class Gradients(NamedTuple):
    """What the backward of a layer computes; None where it was not asked for."""

    update: Tensor  # dU, like the codes, for the dictionary's gradient
    residual: Tensor | None  # (1/c)(X − A Z), like the signal, for the dictionary's gradient
    next_projection: Tensor | None  # the whole dZ⁺, with the loss's part in it
    signal: Tensor
    projection: Tensor | None
    codes: Tensor | None


def unrolled_backward(
    codes: Tensor,
    signal: Tensor,
    projection: Tensor,
    dictionary: Tensor,
    next_dictionary: Tensor | None,
    target: Tensor | None,
    lengths: Tensor | None,
    next_codes: Tensor,
    next_projection: Tensor | None,
    grad_next_codes: Tensor | None,
    grad_next_projection: Tensor | None,
    grad_error: Tensor | None,
    step: float,
    scale: float,
    nonlinearity: str,
    needs_dictionary: bool = True,
    needs_projection: bool = True,
    needs_codes: bool = True,
    blocks: Blocks | None = None,
    update_blocks: Blocks | None = None,
) -> Gradients:
    """The gradients of `unrolled_forward`; `grad_error` is one float32, the gradient of the sum of the errors.

    Without a target `next_projection` is not read and may be None.
    """
    blocks = blocks or BACKWARD_BLOCKS[card_of(codes).family]
    sequences, tokens, atoms = codes.shape
    width = signal.shape[-1]
    update, whole = unrolled_update(
        dictionary if next_dictionary is None else next_dictionary, target, lengths, next_codes, next_projection,
        grad_next_codes, grad_next_projection, grad_error, nonlinearity, update_blocks,
    )  # fmt: skip
    found = Gradients(
        update=update,
        residual=torch.empty_like(signal) if needs_dictionary else None,
        next_projection=whole,
        signal=torch.empty_like(signal),
        projection=torch.empty_like(projection) if needs_projection else None,
        codes=torch.empty_like(codes) if needs_codes else None,
    )
    per_tile = blocks.rows // max(1, tokens)
    Launch(
        unrolled_backward_kernel,
        (ceil_div(sequences, per_tile) if tokens else 0,),
        {
            "codes": codes, "signal": signal, "projection": projection, "dictionary": dictionary,
            "grad_update": update, "lengths": lengths, "residual": found.residual, "grad_signal": found.signal,
            "grad_projection": found.projection, "grad_codes": found.codes,
            "sequences": sequences, "tokens": tokens, "per_tile": per_tile, "step": step, "scale": scale,
        },
        {
            "CODE_WIDTH": atoms, "WIDTH": width, "BLOCK_WIDTH": block_width(width),
            "ROWS": blocks.rows, "ATOMS": blocks.atoms, "COLUMNS": blocks.columns,
            "PRECISION": dot_precision(codes.dtype),
        },
        blocks.warps,
        blocks.stages,
    ).run()  # fmt: skip
    return found


def unrolled_update(
    next_dictionary: Tensor,
    target: Tensor | None,
    lengths: Tensor | None,
    next_codes: Tensor,
    next_projection: Tensor | None,
    grad_next_codes: Tensor | None,
    grad_next_projection: Tensor | None,
    grad_error: Tensor | None,
    nonlinearity: str,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """dU `[B, T, m]`, and the whole dZ⁺ `[B, T, k]` (None where neither a gradient nor a loss arrives there)."""
    blocks = blocks or UPDATE_BLOCKS[card_of(next_codes).family]
    _, tokens, atoms = next_codes.shape
    rows = next_codes.shape[:-1].numel()
    next_width = next_dictionary.shape[0]
    if grad_error is None:
        target = None
    update = torch.empty_like(next_codes)
    whole = grad_next_projection if target is None else next_codes.new_empty((*next_codes.shape[:-1], next_width))
    Launch(
        unrolled_update_kernel,
        (ceil_div(rows, blocks.rows),),
        {
            "next_codes": next_codes, "next_projection": next_projection, "next_dictionary": next_dictionary,
            "target": target, "lengths": lengths, "grad_next_codes": grad_next_codes,
            "grad_next_projection": grad_next_projection, "grad_error": grad_error,
            "grad_update": update, "whole_grad_next_projection": whole,
            "rows": rows, "tokens": tokens,
        },
        {
            "CODE_WIDTH": atoms, "NEXT_WIDTH": next_width, "BLOCK_NEXT_WIDTH": block_width(next_width),
            "ROWS": blocks.rows, "ATOMS": blocks.atoms,
            "NONLINEARITY": nonlinearity, "PRECISION": dot_precision(next_codes.dtype),
        },
        blocks.warps,
        blocks.stages,
    ).run()  # fmt: skip
    return update, whole
