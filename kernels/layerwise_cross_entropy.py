"""Cross-entropy of a chunk of logits, a program a row: the loss and, in place, the gradient.

    x = c tanh(logits / c)  (softcap c; else x = logits),        lse = log Σ_v exp(x_v)
    loss = lse − (1 − ε) x_y − (ε / V) Σ_v x_v                    (ε: label smoothing, y: the target)
    logits ← s (exp(x_v − lse) − (1 − ε) [v = y] − ε / V) (1 − (x_v / c)²)   (s: the row's scale)

A row whose target is `ignore_index` has loss 0 and gradient 0. A target outside of [0, V) reads nothing: its row's
loss and gradient are NaN, so that the mistake shows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tanh(y):
    # exp alone would lose the leading digits near 0; libdevice's tanh is not there in the interpreter. The polynomial
    # is a least-squares fit of (tanh(y) − y) / y³ on [0, 0.6], off by 3e-9 relative to tanh.
    square = y * y
    series = -0.00589395 * square + 0.02079462
    series = series * square - 0.05378329
    series = series * square + 0.13331915
    series = series * square - 0.33333298
    near = y + y * square * series
    decay = tl.exp(-2.0 * tl.abs(y))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(y) < 0.6, near, tl.where(y < 0.0, -far, far))


@triton.jit
def _capped(logits, softcap):
    x = logits.to(tl.float32)
    if softcap is not None:
        x = softcap * _tanh(x / softcap)
    return x


@triton.jit
def _finite(highest):
    # Nothing but −inf so far: without this a difference from it would be NaN, as −inf − (−inf) is.
    return tl.where(highest == float("-inf"), 0.0, highest)


# Chunks are slices of what belongs to all rows, which start anywhere.
@triton.jit(do_not_specialize_on_alignment=["targets", "scales", "losses"])
def cross_entropy_kernel(
    logits,  # [rows, vocabulary], read, and written with scales
    targets,  # [rows] int64
    scales,  # [rows] float32 or None
    losses,  # [rows] float32 or None
    vocabulary,
    logits_row_stride,
    ignore_index,
    softcap,  # a number or None
    smoothing,
    HAS_SMOOTHING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row_stride
    target = tl.load(targets + row)
    ignored = target == ignore_index
    inside = (target >= 0) & (target < vocabulary)
    offsets = tl.arange(0, COLUMNS)
    highest = tl.full([], float("-inf"), tl.float32)
    exponentials = tl.zeros([COLUMNS], tl.float32)
    values = tl.zeros([COLUMNS], tl.float32)
    # An ignored row is not read at all.
    for start in range(0, tl.where(ignored, 0, vocabulary), COLUMNS):
        mask = start + offsets < vocabulary
        x = _capped(tl.load(logits + start + offsets, mask=mask, other=0.0), softcap)
        if HAS_SMOOTHING:
            values += tl.where(mask, x, 0.0)
        x = tl.where(mask, x, float("-inf"))
        raised = tl.maximum(highest, tl.max(x, 0))
        raised_finite = _finite(raised)
        exponentials = exponentials * tl.exp(highest - raised_finite) + tl.exp(x - raised_finite)
        highest = raised
    highest = _finite(highest)
    above = tl.log(tl.sum(exponentials, 0))
    if losses is not None:
        at_target = tl.load(logits + target, mask=inside & (target != ignore_index), other=0.0)
        # Not from the log-sum-exp: beside large logits that has lost the digits that a small loss consists of.
        loss = above + (1.0 - smoothing) * (highest - _capped(at_target, softcap))
        if HAS_SMOOTHING:
            loss += smoothing * (highest - tl.sum(values, 0) / vocabulary)
        loss = tl.where(inside, loss, float("nan"))
        tl.store(losses + row, tl.where(ignored, 0.0, loss))
    if scales is not None:
        if losses is not None:
            # Each thread writes where it has read, but for `at_target`, which all of them have read.
            tl.debug_barrier()
        scale = tl.load(scales + row)
        # Exactly zero where nothing counts, also if the logits are not finite.
        silent = ignored | (scale == 0.0)
        scale = tl.where(inside, scale, float("nan"))
        read = tl.where(silent, 0, vocabulary)
        for start in range(0, vocabulary, COLUMNS):
            columns = start + offsets
            x = tl.load(logits + columns, mask=columns < read, other=0.0).to(tl.float32)
            if softcap is not None:
                decay = tl.exp(-2.0 * tl.abs(x / softcap))
                x = _capped(x, softcap)
            gradient = tl.exp(x - (highest + above))
            if HAS_SMOOTHING:
                gradient -= smoothing / vocabulary
            # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
            gradient = tl.where(columns == target, gradient - (1.0 - smoothing), gradient)
            if softcap is not None:
                # The cap's slope. Not 1 − ratio²: near the cap that is the rounding error of the ratio.
                gradient *= 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
            gradient = tl.where(silent, 0.0, gradient * scale)
            tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < vocabulary)


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor | None,
    scales: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    smoothing: float,
    most_columns: int = 4096,
) -> None:
    """Write the losses if `losses` is given, and the gradient over the logits if `scales` are.

    Args:
        logits: `[rows, V]`, of any row stride and with adjacent columns.
        targets: `[rows]` int64, contiguous.
        losses: `[rows]` float32.
        scales: `[rows]` float32, what the gradients are multiplied by.
        most_columns: of a block; with smoothing and a softcap, wider ones spill registers.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 or vocabulary == 1
    assert all(vector is None or vector.dtype == torch.float32 for vector in (losses, scales))
    # Rows stay in the L2 cache between two reads, whatever the block; its width only hides latency.
    columns = min(most_columns, max(128, triton.next_power_of_2(vocabulary)))
    options = {"num_warps": max(1, columns // 512), "num_stages": 2, "enable_fp_fusion": True}
    if rows:
        cross_entropy_kernel[(rows,)](
            *(logits, targets, scales, losses),
            *(vocabulary, logits.stride(0), ignore_index),
            *(softcap, smoothing),
            HAS_SMOOTHING=smoothing != 0.0,
            COLUMNS=columns,
            **options,
        )
