"""The denoising layer of short sequences: energy attention, then gates in a dictionary; several sequences a tile.

    S = β (E Eᵀ − ½ 1 ‖e_j‖²) − δ I,  A = softmax_rows(S),  ρ_i = ‖A_i‖,  V = A W,  C = V D
    G = sigmoid(κ (u − 1)),  u = C² / (ρ f t)²,  Y = (C ∘ G) Dᵀ,  v_i = ρ_i² Σ_j G_ij²
    dG = dH ∘ C + 2 ρ² dv G,  dH = dY D,  q = κ dG ∘ G (1 − G),  dC = dH ∘ G + 2 q ∘ C / (ρ f t)²,  dV = dC Dᵀ
    d log t_j = −2 Σ_i q u,  d log f = −2 Σ q u,  d log ρ_i = 2 v dv − 2 Σ_j q u,  dκ = Σ dG ∘ G (1 − G) (u − 1)
    dA = dV Wᵀ + d log ρ A / ρ²,  dS = A ∘ (dA − rowsum(A ∘ dA)),  dW = Aᵀ dV,  dβ = Σ dS ∘ S|β=1,δ=0,  dδ = −tr dS
    dE_i = β Σ_j (dS_ij + dS_ji) (e_j − e_i),  dD = Vᵀ dC + dYᵀ H

All is in units of the noise: ρ is what the mean V leaves of it, and v the variance of a token of Y. A tile holds its
rows of V, dY and dV over the whole width n, and takes the m atoms in chunks. Nothing is saved but the inputs.
"""

# pyright: reportGeneralTypeIssues=false
# The checker takes a `@triton.jit` function that is called in another for one that never returns.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels._common import (
    LOG2_E,
    Blocks,
    block_shapes,
    block_share,
    load_atoms,
    load_rows,
    programs_of,
    rows_of_sequences,
    sizes_of,
    softmax_tile,
    store_rows,
    tile_scores,
)
from cdt_fast.ops.common import rows_of
from cdt_fast.ops.products import add_product, product_over_rows

_blocks = block_shapes("ROWS", "ATOMS", "COLUMNS")
BLOCKS = {
    "consumer": _blocks(64, 32, 32, 8, 2),
    "ampere": _blocks(64, 64, 32, 8, 2),
    "hopper": _blocks(64, 32, 64, 4, 3),
}
# Two stages let a multiprocessor of Hopper's or Blackwell's hold two blocks of four warps.
BACKWARD_BLOCKS = {
    "consumer": _blocks(64, 32, 32, 8, 2),
    "ampere": _blocks(64, 32, 32, 8, 2),
    "hopper": _blocks(64, 32, 64, 4, 2),
    "b200": _blocks(64, 32, 32, 4, 2),  # where 64 columns spill
}


@triton.jit
def of_sequences(numbers, begin, row, exists, tokens):
    """Load β and f of the sequence of each row."""
    place = numbers + 2 * (begin + row // tokens)
    return tl.load(place, mask=exists, other=1.0), tl.load(place + 1, mask=exists, other=1.0)


@triton.jit
def energy_attention(
    e, row, exists, visible, scale, parameters, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr
):
    """Compute the scores for β = 1 and δ = 0, the attention and ρ² of each row."""
    scores = tile_scores(e, row, exists, 1.0 / LOG2_E, WIDTH, COLUMNS, True, PRECISION)
    place = tl.arange(0, visible.shape[0])
    own = tl.where(place[:, None] == place[None, :], tl.load(parameters), 0.0)
    attention, _ = softmax_tile((scores * scale[:, None] - own) * LOG2_E, visible)
    return scores, attention, tl.where(exists, tl.sum(attention * attention, 1), 1.0)


@triton.jit
def gated_codes(mean, atoms, unit, thresholds, sharpness, start, CODE_WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """Compute columns of C, C / (ρ f t)² and, zero beyond the last atom, G; `unit`: (ρ f)²."""
    column = start + tl.arange(0, atoms.shape[1])
    threshold = tl.load(thresholds + column, mask=column < CODE_WIDTH, other=1.0)
    inverse = (1.0 / unit)[:, None] * (1.0 / (threshold * threshold))[None, :]
    codes = tl.dot(mean, atoms, input_precision=PRECISION)
    scaled = codes * inverse
    gate = tl.where((column < CODE_WIDTH)[None, :], tl.sigmoid(sharpness * (codes * scaled - 1.0)), 0.0)
    return codes, scaled, gate


@triton.jit(do_not_specialize=["sequences", "tokens", "programs"])
def denoising_forward_kernel(
    signal,  # [sequences, tokens, WIDTH]
    features,  # [sequences, tokens, WIDTH]
    dictionary,  # [WIDTH, CODE_WIDTH]
    thresholds,  # [CODE_WIDTH] float32
    numbers,  # [sequences, 2] float32: β, f
    parameters,  # [2] float32: δ, κ
    output,  # [sequences, tokens, WIDTH]
    variance,  # [sequences, tokens] float32
    sequences,
    tokens,
    programs,
    CODE_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ATOMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    begin, end = block_share(sequences, programs)
    first, row, exists, _, visible = rows_of_sequences(begin, end, tokens, None, ROWS)
    w, e, y = signal + first * WIDTH, features + first * WIDTH, output + first * WIDTH
    scale, factor = of_sequences(numbers, begin, row, exists, tokens)
    _, attention, spread = energy_attention(e, row, exists, visible, scale, parameters, WIDTH, COLUMNS, PRECISION)
    attention = attention.to(signal.dtype.element_ty)
    for start in range(0, WIDTH, COLUMNS):
        chunk = load_rows(w, row, exists, start, WIDTH, COLUMNS)
        store_rows(y, row, exists, start, tl.dot(attention, chunk, input_precision=PRECISION), WIDTH, COLUMNS)
    left = variance + first + row
    tl.store(left, spread, mask=exists)
    # Read again, so that the products take it from shared memory: held in registers they would spill others.
    tl.debug_barrier()
    mean = load_rows(y, row, exists, 0, WIDTH, BLOCK_WIDTH)

    sharpness, unit = tl.load(parameters + 1), spread * factor * factor
    result = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, CODE_WIDTH, ATOMS):
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        codes, _scaled, gate = gated_codes(mean, atoms, unit, thresholds, sharpness, start, CODE_WIDTH, PRECISION)
        squares += tl.sum(gate * gate, 1)
        result = tl.dot((codes * gate).to(atoms.dtype), tl.trans(atoms), result, input_precision=PRECISION)
    store_rows(y, row, exists, 0, result, WIDTH, BLOCK_WIDTH)
    tl.store(left, tl.load(left, mask=exists) * squares, mask=exists)


@triton.jit(do_not_specialize=["sequences", "tokens", "programs"])
def denoising_backward_kernel(
    signal,  # [sequences, tokens, WIDTH]
    features,  # [sequences, tokens, WIDTH]
    dictionary,  # [WIDTH, CODE_WIDTH]
    thresholds,  # [CODE_WIDTH] float32
    numbers,  # [sequences, 2] float32: β, f
    parameters,  # [2] float32: δ, κ
    grad_output,  # [sequences, tokens, WIDTH]
    grad_variance,  # [sequences, tokens] float32
    means,  # [sequences, tokens, WIDTH]: V; it may be the gradient of the features
    shrunk,  # [sequences, tokens, CODE_WIDTH] or None: H
    grad_codes,  # [sequences, tokens, CODE_WIDTH]
    grad_signal,  # [sequences, tokens, WIDTH]
    grad_features,  # [sequences, tokens, WIDTH]
    grad_thresholds,  # [programs, CODE_WIDTH] float32
    grad_numbers,  # [sequences, tokens, 2] float32: of log β and log f, by row
    grad_parameters,  # [programs, 2] float32
    sequences,
    tokens,
    programs,
    CODE_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ATOMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    begin, end = block_share(sequences, programs)
    first, row, exists, _, visible = rows_of_sequences(begin, end, tokens, None, ROWS)
    w, e, v = signal + first * WIDTH, features + first * WIDTH, means + first * WIDTH
    dc = grad_codes + first * CODE_WIDTH
    dw, de = grad_signal + first * WIDTH, grad_features + first * WIDTH
    low = signal.dtype.element_ty
    scale, factor = of_sequences(numbers, begin, row, exists, tokens)
    _, attention, spread = energy_attention(e, row, exists, visible, scale, parameters, WIDTH, COLUMNS, PRECISION)
    attention = attention.to(low)
    for start in range(0, WIDTH, COLUMNS):
        chunk = load_rows(w, row, exists, start, WIDTH, COLUMNS)
        store_rows(v, row, exists, start, tl.dot(attention, chunk, input_precision=PRECISION), WIDTH, COLUMNS)
    # What follows reads what other threads of this block have stored.
    tl.debug_barrier()
    mean = load_rows(v, row, exists, 0, WIDTH, BLOCK_WIDTH)
    upstream = load_rows(grad_output + first * WIDTH, row, exists, 0, WIDTH, BLOCK_WIDTH)
    weight = 2.0 * spread * tl.load(grad_variance + first + row, mask=exists, other=0.0)

    sharpness, unit = tl.load(parameters + 1), spread * factor * factor
    grad_spread, grad_sharpness = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)  # of log ρ, and of κ
    by_gate = tl.zeros((ROWS,), tl.float32)  # Σ q u / κ
    for start in range(0, CODE_WIDTH, ATOMS):
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        codes, scaled, gate = gated_codes(mean, atoms, unit, thresholds, sharpness, start, CODE_WIDTH, PRECISION)
        grad_gate = weight[:, None] * gate
        grad_spread += tl.sum(grad_gate * gate, 1)
        through = tl.dot(upstream, atoms, input_precision=PRECISION)
        grad_gate += through * codes
        slope = grad_gate * gate * (1.0 - gate)
        grad_sharpness -= tl.sum(slope, 1)
        slope *= scaled
        gradient = through * gate + 2.0 * sharpness * slope
        # Not where H is computed: stored there, it spills up to 160 bytes.
        if shrunk is not None:
            store_rows(shrunk + first * CODE_WIDTH, row, exists, start, codes * gate, CODE_WIDTH, ATOMS)
        store_rows(dc, row, exists, start, gradient, CODE_WIDTH, ATOMS)
        slope *= codes
        by_gate += tl.sum(slope, 1)
        column = start + tl.arange(0, ATOMS)
        share = grad_thresholds + tl.program_id(0).to(tl.int64) * CODE_WIDTH
        tl.store(share + column, -2.0 * sharpness * tl.sum(slope, 0), mask=column < CODE_WIDTH)
    tl.debug_barrier()
    grad_sharpness += by_gate
    by_gate *= -2.0 * sharpness
    grad_spread += by_gate
    tl.store(grad_numbers + 2 * (first + row) + 1, by_gate, mask=exists)
    # In a loop of its own, though it reads D again: V, dY and this sum are more than the registers hold.
    grad_mean = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
    for start in range(0, CODE_WIDTH, ATOMS):
        atoms = load_atoms(dictionary, start, CODE_WIDTH, WIDTH, BLOCK_WIDTH, ATOMS)
        gradient = load_rows(dc, row, exists, start, CODE_WIDTH, ATOMS)
        grad_mean = tl.dot(gradient, tl.trans(atoms), grad_mean, input_precision=PRECISION)
    store_rows(dw, row, exists, 0, grad_mean, WIDTH, BLOCK_WIDTH)
    tl.debug_barrier()

    # Computed again, not kept over the loop above, where they would spill others.
    _, _, _, _, visible = rows_of_sequences(begin, end, tokens, None, ROWS)
    scale, _ = of_sequences(numbers, begin, row, exists, tokens)
    scores, attention, spread = energy_attention(e, row, exists, visible, scale, parameters, WIDTH, COLUMNS, PRECISION)
    grad_attention = attention * (grad_spread / spread)[:, None]
    for start in range(0, WIDTH, COLUMNS):
        through = load_rows(dw, row, exists, start, WIDTH, COLUMNS)
        chunk = load_rows(w, row, exists, start, WIDTH, COLUMNS)
        grad_attention = tl.dot(through, tl.trans(chunk), grad_attention, input_precision=PRECISION)
    grad_scores = attention * (grad_attention - tl.sum(attention * grad_attention, 1)[:, None])
    own = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
    share = grad_parameters + tl.program_id(0) * 2
    # Rows of dS sum to zero but for rounding, by which scores are large: only how they differ counts.
    of_scale = tl.sum(grad_scores * (scores - tl.sum(attention * scores, 1)[:, None]), 1)
    tl.store(grad_numbers + 2 * (first + row), scale * of_scale, mask=exists)
    tl.store(share, -tl.sum(tl.where(own, grad_scores, 0.0)))
    tl.store(share + 1, tl.sum(grad_sharpness))
    symmetric = ((grad_scores + tl.trans(grad_scores)) * scale[:, None]).to(low)
    # Of what was rounded, so that features which are much alike differ by the same in both terms.
    total = tl.sum(symmetric.to(tl.float32), 1)
    for start in range(0, WIDTH, COLUMNS):
        chunk = load_rows(e, row, exists, start, WIDTH, COLUMNS)
        gradient = tl.dot(symmetric, chunk, input_precision=PRECISION) - total[:, None] * chunk.to(tl.float32)
        store_rows(de, row, exists, start, gradient, WIDTH, COLUMNS)
    transposed = tl.trans(attention.to(low))
    for start in range(0, WIDTH, COLUMNS):
        through = load_rows(dw, row, exists, start, WIDTH, COLUMNS)
        gradient = tl.dot(transposed, through, input_precision=PRECISION)
        # These columns of dV stand where this is written: all threads have read them.
        tl.debug_barrier()
        store_rows(dw, row, exists, start, gradient, WIDTH, COLUMNS)


def _launch(kernel: Any, arguments: tuple[Any, ...], programs: int, blocks: Blocks) -> None:
    signal, _, dictionary, *_ = arguments
    if programs:
        kernel[(programs,)](*arguments, *signal.shape[:2], programs, **sizes_of(dictionary), **blocks)


# Signal and features are `[B, T, n]`, T at most 64, n at most 256, and the dictionary `[n, m]`: contiguous and of one
# dtype of 16 bits. Thresholds `[m]`, numbers (β, f) `[B, 2]` and parameters (δ, κ) are float32, on their device.
def forward(
    signal: Tensor,
    features: Tensor,
    dictionary: Tensor,
    thresholds: Tensor,
    numbers: Tensor,
    parameters: Tensor,
    processors: int,
    blocks: Blocks,
) -> tuple[Tensor, Tensor]:
    """Return Y `[B, T, n]` and, in float32, v `[B, T]`."""
    output, variance = torch.empty_like(signal), signal.new_empty(signal.shape[:2], dtype=torch.float32)
    arguments = signal, features, dictionary, thresholds, numbers, parameters, output, variance
    _launch(denoising_forward_kernel, arguments, programs_of(*signal.shape[:2], processors, blocks), blocks)
    return output, variance


def backward(
    signal: Tensor,
    features: Tensor,
    dictionary: Tensor,
    thresholds: Tensor,
    numbers: Tensor,
    parameters: Tensor,
    grad_output: Tensor | None,
    grad_variance: Tensor | None,
    needs_dictionary: bool,
    processors: int,
    blocks: Blocks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return dW and dE in their dtype, and in float32 dt, d(β, f), d(δ, κ) and, if needed, dD."""
    programs = programs_of(*signal.shape[:2], processors, blocks)
    grad_signal, grad_features = torch.empty_like(signal), torch.empty_like(signal)
    grad_thresholds, grad_parameters = (one.new_empty((programs, len(one))) for one in (thresholds, parameters))
    grad_codes = signal.new_empty((*signal.shape[:2], len(thresholds)))
    means = torch.empty_like(signal) if needs_dictionary else grad_features
    codes = torch.empty_like(grad_codes) if needs_dictionary else None
    grad_output = torch.zeros_like(signal) if grad_output is None else grad_output
    if grad_variance is None:
        grad_variance = thresholds.new_zeros(signal.shape[:2])
    given = signal, features, dictionary, thresholds, numbers, parameters
    grad_numbers = grad_variance.new_empty((*signal.shape[:2], 2))
    small = grad_thresholds, grad_numbers, grad_parameters
    others = grad_output, grad_variance, means, codes, grad_codes, grad_signal, grad_features, *small
    _launch(denoising_backward_kernel, (*given, *others), programs, blocks)
    grad_dictionary = None
    if codes is not None:
        grad_dictionary = product_over_rows(rows_of(means), rows_of(grad_codes), torch.float32)
        add_product(grad_dictionary, rows_of(grad_output), rows_of(codes))
    small = grad_thresholds.sum(0) / thresholds, grad_numbers.sum(1) / numbers, grad_parameters.sum(0)
    return grad_signal, grad_features, *small, grad_dictionary
