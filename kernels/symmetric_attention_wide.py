"""Symmetric attention of long sequences whose tokens are too wide for a tile: every width in chunks.

    S_ij = z_iᵀ z_j (− ½‖z_j‖² with `energy`),  A_ij = exp(β S_ij − λ_i),  O_i = Σ_j A_ij V_j
    dS_ij = A_ij (dO_iᵀ V_j − δ_i),  dZ_i = β Σ_j (dS_ij + dS_ji) z_j,  dV_i = Σ_j A_ji dO_j

A block owns some rows and one chunk of the columns of what it computes; it forms the scores of its rows anew, a chunk
of the width after the other. That costs products that the streaming kernels do not need, and no memory.
"""

# pyright: reportGeneralTypeIssues=false
# The checker takes a `@triton.jit` function that is called in another for one that never returns.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.arguments import SymmetricAttentionArguments, SymmetricAttentionBackwardArguments
from cdt_fast.kernels.blocks import (
    SYMMETRIC_ATTENTION_WIDE,
    SYMMETRIC_ATTENTION_WIDE_BACKWARD,
    SYMMETRIC_ATTENTION_WIDE_VALUES_BACKWARD,
    Blocks,
)
from cdt_fast.kernels.cards import dot_precision
from cdt_fast.kernels.launch import Launch, ceil_div, whole_tiles
from cdt_fast.kernels.symmetric_attention_streaming import row_dots
from cdt_fast.kernels.tiles import LN_2, block_of_rows, from_row, load_norms, load_rows, store_rows, weigh


@triton.jit
def gram(
    left,
    left_row,
    left_mask,
    right,
    right_row,
    right_mask,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`left · rightᵀ` of some rows of two `[…, WIDTH]`, `[ROWS, KEYS]` in float32."""
    products = tl.zeros((ROWS, KEYS), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        one = load_rows(left, left_row, left_mask, start, WIDTH, COLUMNS)
        other = load_rows(right, right_row, right_mask, start, WIDTH, COLUMNS)
        products = tl.dot(one, tl.trans(other), products, input_precision=PRECISION)
    return products


@triton.jit
def wide_scores(
    z,
    norms,
    own,
    own_mask,
    key,
    key_mask,
    scale,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """β S_ij and β S_ji, both laid out `[own, key]`; `norms` `[tokens]` is None without `energy`."""
    scores = gram(z, own, own_mask, z, key, key_mask, WIDTH, ROWS, KEYS, COLUMNS, PRECISION)
    mirrored = scores
    if norms is not None:
        scores -= 0.5 * load_norms(norms, key, key_mask)[None, :]
        mirrored -= 0.5 * load_norms(norms, own, own_mask)[:, None]
    return scores * scale, mirrored * scale


@triton.jit(do_not_specialize=["tokens", "blocks_per_sequence"])
def wide_forward_kernel(
    z,  # [sequences, tokens, WIDTH]
    values,  # [sequences, tokens, VALUE_WIDTH], whose chunks the grid's second axis goes over
    norms,  # [sequences, tokens] float32, ‖z‖² with `energy`, else None
    output,  # [sequences, tokens, VALUE_WIDTH]
    remainder,  # [sequences, tokens, VALUE_WIDTH] or None
    log_sum_exp,  # [sequences, tokens] float32
    lengths,  # [sequences] or None
    tokens,
    blocks_per_sequence,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OWNED_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    own, first, length = block_of_rows(tokens, blocks_per_sequence, lengths, ROWS)
    owned = tl.program_id(1) * OWNED_COLUMNS
    z, values = from_row(z, first, WIDTH), from_row(values, first, VALUE_WIDTH)
    if norms is not None:
        norms = from_row(norms, first, 1)
    counts = own < length
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    rounded_total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, OWNED_COLUMNS), tl.float32)
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        exists = key < length
        scores, _ = wide_scores(z, norms, own, counts, key, exists, scale, WIDTH, ROWS, KEYS, COLUMNS, PRECISION)
        scores = tl.where(exists[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = weigh(scores, new_peak[:, None])
        shrinking = weigh(peak, new_peak)
        total = total * shrinking + tl.sum(weights, 1)
        chunk = load_rows(values, key, exists, owned, VALUE_WIDTH, OWNED_COLUMNS)
        weights = weights.to(chunk.dtype)
        rounded_total = rounded_total * shrinking + tl.sum(weights.to(tl.float32), 1)
        result = tl.dot(weights, chunk, result * shrinking[:, None], input_precision=PRECISION)
        peak = new_peak
    result = tl.where(counts[:, None], result / rounded_total[:, None], 0.0)
    output = from_row(output, first, VALUE_WIDTH)
    store_rows(output, own, own < tokens, owned, result, VALUE_WIDTH, OWNED_COLUMNS)
    if remainder is not None:
        result -= result.to(output.dtype.element_ty).to(tl.float32)
        remainder = from_row(remainder, first, VALUE_WIDTH)
        store_rows(remainder, own, own < tokens, owned, result, VALUE_WIDTH, OWNED_COLUMNS)
    # Every chunk finds the same log-sum-exp: the first one stores it.
    log_sum = tl.where(counts, peak + tl.log2(total) * LN_2, float("inf"))
    tl.store(from_row(log_sum_exp, first, 1) + own, log_sum, mask=(own < tokens) & (owned == 0))


@triton.jit(do_not_specialize=["tokens", "blocks_per_sequence"])
def wide_backward_kernel(
    z,  # [sequences, tokens, WIDTH], whose chunks the grid's second axis goes over
    values,  # [sequences, tokens, VALUE_WIDTH]; z where TIED, and then both gradients are summed
    norms,  # [sequences, tokens] float32, ‖z‖² with `energy`, else None
    grad_output,  # [sequences, tokens, VALUE_WIDTH]
    log_sum_exp,  # [sequences, tokens] float32
    delta,  # [sequences, tokens] float32, Σ dO ∘ O
    grad_z,  # [sequences, tokens, WIDTH]
    lengths,  # [sequences] or None
    tokens,
    blocks_per_sequence,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OWNED_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    TIED: tl.constexpr,
):
    own, first, length = block_of_rows(tokens, blocks_per_sequence, lengths, ROWS)
    owned = tl.program_id(1) * OWNED_COLUMNS
    z, values = from_row(z, first, WIDTH), from_row(values, first, VALUE_WIDTH)
    grad_output = from_row(grad_output, first, VALUE_WIDTH)
    log_sum_exp, delta = from_row(log_sum_exp, first, 1), from_row(delta, first, 1)
    if norms is not None:
        norms = from_row(norms, first, 1)
    counts = own < length
    own_log_sum = tl.load(log_sum_exp + own, mask=counts, other=float("inf"))
    own_delta = tl.load(delta + own, mask=counts, other=0.0)
    total = tl.zeros((ROWS, OWNED_COLUMNS), tl.float32)
    mirrored_sum = tl.zeros((ROWS,), tl.float32)
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        exists = key < length
        scores, mirrored = wide_scores(z, norms, own, counts, key, exists, scale, WIDTH, ROWS, KEYS, COLUMNS, PRECISION)
        weights = tl.where(exists[None, :], weigh(scores, own_log_sum[:, None]), 0.0)
        grad_scores = gram(grad_output, own, counts, values, key, exists, VALUE_WIDTH, ROWS, KEYS, COLUMNS, PRECISION)
        grad_scores = weights * (grad_scores - own_delta[:, None])
        mirrored_weights = weigh(mirrored, tl.load(log_sum_exp + key, mask=exists, other=float("inf"))[None, :])
        grad_mirrored = gram(values, own, counts, grad_output, key, exists, VALUE_WIDTH, ROWS, KEYS, COLUMNS, PRECISION)
        grad_mirrored = mirrored_weights * (grad_mirrored - tl.load(delta + key, mask=exists, other=0.0)[None, :])
        if norms is not None:
            mirrored_sum += tl.sum(grad_mirrored, 1)
        chunk = load_rows(z, key, exists, owned, WIDTH, OWNED_COLUMNS)
        grad_scores = ((grad_scores + grad_mirrored) * scale).to(chunk.dtype)
        total = tl.dot(grad_scores, chunk, total, input_precision=PRECISION)
        if TIED:
            chunk = load_rows(grad_output, key, exists, owned, WIDTH, OWNED_COLUMNS)
            total = tl.dot(mirrored_weights.to(chunk.dtype), chunk, total, input_precision=PRECISION)
    if norms is not None:
        total -= (scale * mirrored_sum)[:, None] * load_rows(z, own, counts, owned, WIDTH, OWNED_COLUMNS).to(tl.float32)
    total = tl.where(counts[:, None], total, 0.0)
    store_rows(from_row(grad_z, first, WIDTH), own, own < tokens, owned, total, WIDTH, OWNED_COLUMNS)


@triton.jit(do_not_specialize=["tokens", "blocks_per_sequence"])
def wide_values_backward_kernel(
    z,  # [sequences, tokens, WIDTH]
    norms,  # [sequences, tokens] float32, ‖z‖² with `energy`, else None
    grad_output,  # [sequences, tokens, VALUE_WIDTH]
    log_sum_exp,  # [sequences, tokens] float32
    grad_values,  # [sequences, tokens, VALUE_WIDTH], whose chunks the grid's second axis goes over
    lengths,  # [sequences] or None
    tokens,
    blocks_per_sequence,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OWNED_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    own, first, length = block_of_rows(tokens, blocks_per_sequence, lengths, ROWS)
    owned = tl.program_id(1) * OWNED_COLUMNS
    z, grad_output = from_row(z, first, WIDTH), from_row(grad_output, first, VALUE_WIDTH)
    log_sum_exp = from_row(log_sum_exp, first, 1)
    if norms is not None:
        norms = from_row(norms, first, 1)
    counts = own < length
    total = tl.zeros((ROWS, OWNED_COLUMNS), tl.float32)
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        exists = key < length
        _, mirrored = wide_scores(z, norms, own, counts, key, exists, scale, WIDTH, ROWS, KEYS, COLUMNS, PRECISION)
        weights = weigh(mirrored, tl.load(log_sum_exp + key, mask=exists, other=float("inf"))[None, :])
        chunk = load_rows(grad_output, key, exists, owned, VALUE_WIDTH, OWNED_COLUMNS)
        total = tl.dot(weights.to(chunk.dtype), chunk, total, input_precision=PRECISION)
    total = tl.where(counts[:, None], total, 0.0)
    store_rows(from_row(grad_values, first, VALUE_WIDTH), own, own < tokens, owned, total, VALUE_WIDTH, OWNED_COLUMNS)


def wide_forward(
    attention: SymmetricAttentionArguments, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output `[B, T, k]`, the rows' log-sum-exp `[B, T]`, and what rounding took from the output, if it is kept."""
    z, values = attention.z, attention.z if attention.values is None else attention.values
    output = torch.empty_like(values)
    remainder = torch.empty_like(output) if attention.keeps and z.element_size() == 2 else None
    log_sum_exp = z.new_empty(z.shape[:-1], dtype=torch.float32)
    _launch(
        wide_forward_kernel,
        attention,
        output,
        blocks or SYMMETRIC_ATTENTION_WIDE.blocks(z),
        {
            "values": values,
            "norms": row_dots(z, z) if attention.energy else None,
            "output": output,
            "remainder": remainder,
            "log_sum_exp": log_sum_exp,
        },
    )
    return output, log_sum_exp, remainder


def wide_backward(
    attention: SymmetricAttentionBackwardArguments, blocks: Blocks | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of z and of the values, those that are needed.

    Where no remainder of the output was kept, an error of its rounding reaches the gradient of z.
    """
    z, values, grad_output = attention.z, attention.values, attention.grad_output
    grad_z = torch.empty_like(z) if attention.needs_z else None
    grad_values = torch.empty_like(values) if attention.needs_values and values is not None else None
    norms = row_dots(z, z) if attention.energy else None
    shared = {"norms": norms, "grad_output": grad_output, "log_sum_exp": attention.log_sum_exp}
    if grad_z is not None:
        delta = row_dots(grad_output, attention.output, attention.remainder)
        _launch(
            wide_backward_kernel,
            attention,
            grad_z,
            blocks or SYMMETRIC_ATTENTION_WIDE_BACKWARD.blocks(z),
            {**shared, "values": z if values is None else values, "delta": delta, "grad_z": grad_z},
            TIED=values is None,
        )
    if grad_values is not None:
        _launch(
            wide_values_backward_kernel,
            attention,
            grad_values,
            blocks or SYMMETRIC_ATTENTION_WIDE_VALUES_BACKWARD.blocks(z),
            {**shared, "grad_values": grad_values},
        )
    return grad_z, grad_values


def _launch(
    kernel: object,
    attention: SymmetricAttentionArguments,
    written: Tensor,
    blocks: Blocks,
    tensors: dict[str, Tensor | None],
    **constants: bool,
) -> None:
    """A launch over blocks of rows and the chunks of the columns of `written`."""
    z = attention.z
    sequences, tokens, width = z.shape
    blocks_per_sequence = ceil_div(tokens, blocks.rows)

    def work(launch: Launch) -> float:
        """Grams over the whole width, for each of the chunks anew, and products with what a chunk owns."""
        sizes, chunk = launch.constants, launch.blocks.columns
        width, value_width = whole_tiles(sizes["WIDTH"], chunk), whole_tiles(sizes["VALUE_WIDTH"], chunk)
        grams = width + (2 * value_width if "TIED" in sizes else 0)
        owned = launch.blocks.owned_columns * (1 + sizes.get("TIED", False))
        pairs = launch.grid[0] * launch.blocks.rows * whole_tiles(tokens, launch.blocks.keys)
        return 2.0 * launch.grid[1] * pairs * (grams + owned)

    Launch(
        kernel,
        (sequences * blocks_per_sequence, ceil_div(written.shape[-1], blocks.owned_columns)),
        blocks,
        {
            "z": z,
            **tensors,
            "lengths": attention.lengths,
            "tokens": tokens,
            "blocks_per_sequence": blocks_per_sequence,
            "scale": attention.scale,
        },
        {
            "WIDTH": width,
            "VALUE_WIDTH": width if attention.values is None else attention.values.shape[-1],
            "PRECISION": dot_precision(z.dtype),
            **constants,
        },
        work=work,
    ).run()
