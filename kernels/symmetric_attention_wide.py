# pyright: reportGeneralTypeIssues=false
# The checker takes a `@triton.jit` function that is called in another for one that never returns.
"""Symmetric attention of long sequences whose tokens are too wide for a tile: every width in chunks.

    S_ij = z_iᵀ z_j (− ½‖z_j‖² with `energy`),  A_ij = exp(β S_ij − λ_i),  O_i = Σ_j A_ij V_j
    dS_ij = A_ij (dO_iᵀ V_j − δ_i),  dZ_i = β Σ_j (dS_ij + dS_ji) z_j,  dV_i = Σ_j A_ji dO_j

A block owns some rows and one chunk of the columns of what it computes; it forms the scores of its rows anew, a chunk
of the width after the other. That costs products that `streaming_attention` does not need, and no memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.launch import Launch, card_of, ceil_div, dot_precision, math_mode
from cdt_fast.kernels.symmetric_attention_streaming import block_of_rows, from_row, load_norms, row_dots, weigh
from cdt_fast.kernels.tiles import LN_2, load_rows, store_rows


class Blocks(NamedTuple):
    """Shape of a block: its rows, the keys and the columns that it takes at a time, its columns, warps, stages."""

    rows: int
    keys: int
    columns: int
    owned_columns: int
    warps: int
    stages: int


# By family of cards and `math_mode`. As many columns as registers hold: for each chunk of them the scores are formed
# anew.
FORWARD_BLOCKS = {
    "consumer": {
        "16 bits": Blocks(64, 64, 32, 256, 8, 2),
        "tf32": Blocks(64, 32, 32, 256, 8, 1),
        "ieee": Blocks(32, 32, 32, 256, 8, 2),
    },
    "ampere": {
        "16 bits": Blocks(64, 64, 64, 256, 8, 2),
        "tf32": Blocks(64, 32, 32, 256, 8, 1),
        "ieee": Blocks(32, 32, 32, 256, 8, 2),
    },
    "hopper": {
        "16 bits": Blocks(64, 64, 64, 256, 8, 3),
        "tf32": Blocks(64, 32, 32, 256, 8, 2),
        "ieee": Blocks(32, 32, 32, 256, 8, 2),
    },
}
BACKWARD_BLOCKS = {
    "consumer": {
        "16 bits": Blocks(32, 32, 64, 256, 8, 3),
        "tf32": Blocks(32, 32, 32, 256, 4, 2),
        "ieee": Blocks(32, 16, 32, 128, 8, 1),
    },
    "ampere": {
        "16 bits": Blocks(64, 64, 32, 256, 8, 2),
        "tf32": Blocks(32, 32, 32, 256, 4, 2),
        "ieee": Blocks(32, 16, 32, 128, 8, 1),
    },
    "hopper": {
        "16 bits": Blocks(64, 64, 64, 128, 8, 3),
        "tf32": Blocks(32, 32, 32, 256, 4, 2),
        "ieee": Blocks(32, 16, 32, 128, 8, 1),
    },
}
# Of the gradient of the values alone, which leaves more registers.
VALUES_BACKWARD_BLOCKS = {
    "consumer": {**BACKWARD_BLOCKS["consumer"], "16 bits": Blocks(64, 64, 32, 256, 8, 2)},
    "ampere": BACKWARD_BLOCKS["ampere"],
    "hopper": {**BACKWARD_BLOCKS["hopper"], "16 bits": Blocks(64, 64, 64, 256, 8, 2)},
}


@triton.jit
def gram(left, left_row, left_mask, right, right_row, right_mask,
         WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
         PRECISION: tl.constexpr):  # fmt: skip
    """`left · rightᵀ` of some rows of two `[…, WIDTH]`, `[ROWS, KEYS]` in float32."""
    products = tl.zeros((ROWS, KEYS), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        one = load_rows(left, left_row, left_mask, start, WIDTH, COLUMNS)
        other = load_rows(right, right_row, right_mask, start, WIDTH, COLUMNS)
        products = tl.dot(one, tl.trans(other), products, input_precision=PRECISION)
    return products


@triton.jit
def wide_scores(z, norms, own, own_mask, key, key_mask, scale,
                WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """β S_ij and β S_ji, both laid out `[own, key]`; `norms` `[tokens]` is None without `energy`."""
    scores = gram(z, own, own_mask, z, key, key_mask, WIDTH, ROWS, KEYS, COLUMNS, PRECISION)
    mirrored = scores
    if norms is not None:
        scores -= 0.5 * load_norms(norms, key, key_mask)[None, :]
        mirrored -= 0.5 * load_norms(norms, own, own_mask)[:, None]
    return scores * scale, mirrored * scale


@triton.jit
def wide_forward_kernel(
    z, values, norms, output, remainder, log_sum_exp, lengths,
    tokens, blocks_per_sequence, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    OWNED_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # z [sequences, tokens, WIDTH], values, output and remainder (may be None) [sequences, tokens, VALUE_WIDTH], norms
    # and log_sum_exp [sequences, tokens]; the second axis of the grid goes over the chunks of VALUE_WIDTH
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


@triton.jit
def wide_backward_kernel(
    z, values, norms, grad_output, log_sum_exp, delta, grad_z, lengths,
    tokens, blocks_per_sequence, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    OWNED_COLUMNS: tl.constexpr, PRECISION: tl.constexpr, TIED: tl.constexpr,
):  # fmt: skip
    # grad_z like z; delta [sequences, tokens] = Σ dO ∘ O; with TIED values is z, and both gradients are summed
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


@triton.jit
def wide_values_backward_kernel(
    z, norms, grad_output, log_sum_exp, grad_values, lengths,
    tokens, blocks_per_sequence, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    OWNED_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # grad_values and grad_output [sequences, tokens, VALUE_WIDTH]
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


def _launch(
    kernel: object, z: Tensor, owned_width: int, value_width: int, tensors: dict[str, Tensor | None], scale: float,
    blocks: Blocks, **constants: bool,
) -> None:  # fmt: skip
    sequences, tokens, width = z.shape
    blocks_per_sequence = ceil_div(tokens, blocks.rows)
    Launch(
        kernel,
        (sequences * blocks_per_sequence, ceil_div(owned_width, blocks.owned_columns)),
        {"z": z, **tensors, "tokens": tokens, "blocks_per_sequence": blocks_per_sequence, "scale": scale},
        {
            "WIDTH": width, "VALUE_WIDTH": value_width, "ROWS": blocks.rows, "KEYS": blocks.keys,
            "COLUMNS": blocks.columns, "OWNED_COLUMNS": blocks.owned_columns, "PRECISION": dot_precision(z.dtype),
            **constants,
        },
        blocks.warps,
        blocks.stages,
    ).run()  # fmt: skip


def wide_forward(
    z: Tensor,
    values: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    energy: bool,
    blocks: Blocks | None = None,
    *,
    remainder: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`z` `[B, T, d]`, `values` `[B, T, k]` (contiguous) → output `[B, T, k]`, log-sum-exp `[B, T]`.

    What rounding takes from the output is written to `remainder`, where one is given.
    """
    values = z if values is None else values
    output = torch.empty_like(values)
    log_sum_exp = z.new_empty(z.shape[:-1], dtype=torch.float32)
    tensors = {
        "values": values, "norms": row_dots(z, z) if energy else None, "output": output, "remainder": remainder,
        "log_sum_exp": log_sum_exp, "lengths": lengths,
    }  # fmt: skip
    width = values.shape[-1]
    blocks = blocks or FORWARD_BLOCKS[card_of(z).family][math_mode(z)]
    _launch(wide_forward_kernel, z, width, width, tensors, scale, blocks)
    return output, log_sum_exp


def wide_backward(
    z: Tensor,
    values: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    grad_output: Tensor,
    lengths: Tensor | None,
    scale: float,
    energy: bool,
    needs_z: bool = True,
    needs_values: bool = True,
    blocks: Blocks | None = None,
    *,
    remainder: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `z` and `values`, those that are needed; with `values` None all of it is in that of `z`.

    Without the `remainder` of the output an error of its rounding reaches the gradient of `z`.
    """
    family, numbers = card_of(z).family, math_mode(z)
    norms = row_dots(z, z) if energy else None
    grad_z = torch.empty_like(z) if needs_z else None
    grad_values = torch.empty_like(values) if needs_values and values is not None else None
    shared = {"norms": norms, "grad_output": grad_output, "log_sum_exp": log_sum_exp, "lengths": lengths}
    width = grad_output.shape[-1]
    if grad_z is not None:
        delta = row_dots(grad_output, output, remainder)
        tensors = {**shared, "values": z if values is None else values, "delta": delta, "grad_z": grad_z}
        chosen = blocks or BACKWARD_BLOCKS[family][numbers]
        _launch(wide_backward_kernel, z, z.shape[-1], width, tensors, scale, chosen, TIED=values is None)
    if grad_values is not None:
        tensors = {**shared, "grad_values": grad_values}
        chosen = blocks or VALUES_BACKWARD_BLOCKS[family][numbers]
        _launch(wide_values_backward_kernel, z, width, width, tensors, scale, chosen)
    return grad_z, grad_values
