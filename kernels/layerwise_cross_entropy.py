"""Cross-entropy of a chunk of logits, a program a row: the loss and, in place, the gradient.

    x = c tanh(logits / c)  (softcap c; else x = logits),        λ = log Σ_v exp(x_v)
    loss = λ − (1 − ε) x_y − (ε / V) Σ_v x_v + ζ λ²              (ε: label smoothing, y: the target, ζ: z-loss)
    logits ← s ((1 + 2 ζ λ) exp(x_v − λ) − (1 − ε) [v = y] − ε / V) (1 − (x_v / c)²)   (s: the row's scale)

A row whose target is `ignore_index` has loss 0 and gradient 0. A target outside of [0, V) reads nothing: its row's
loss and gradient are NaN, so that the mistake shows. Of a head sharded over the vocabulary this is one shard: a first
call finds its part of λ and of what is subtracted from it, a second one takes λ and writes the gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# A row of at most so many bytes stays in registers between its two sweeps, without a spill on any card.
HELD_BYTES = 2**16


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


@triton.jit
def _gradient(logits, log_sum, pull, uniform, taken, softcap, HAS_SMOOTHING: tl.constexpr):
    x = _capped(logits, softcap)
    gradient = pull * tl.exp(x - log_sum) - taken
    if HAS_SMOOTHING:
        gradient -= uniform
    if softcap is not None:
        # The cap's slope. Not 1 − ratio²: near the cap that is the rounding error of the ratio.
        decay = tl.exp(-2.0 * tl.abs(logits.to(tl.float32) / softcap))
        gradient *= 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return gradient


@triton.jit
def _load(logits, columns, end, vocabulary):
    # The mask ends at the padding, where wide loads do, and what stands there does not count.
    found = tl.load(logits + columns, mask=columns < end, other=0.0)
    return tl.where(columns < vocabulary, found, float("-inf"))


@triton.jit
def _scores(logits, columns, vocabulary, softcap):
    x = _capped(logits, softcap)
    if softcap is not None:  # which has made −c of −∞
        x = tl.where(columns < vocabulary, x, float("-inf"))
    return x


# Chunks are slices of what belongs to all rows, which start anywhere.
@triton.jit(
    do_not_specialize=["first", "classes"], do_not_specialize_on_alignment=["targets", "scales", "losses", "log_sums"]
)
def cross_entropy_kernel(
    logits,  # [rows, padded], the first `vocabulary` columns of which count; read, and written with scales
    targets,  # [rows] int64
    scales,  # [rows] float32 or None
    losses,  # [rows] float32 or None; with log_sums written, what the loss is less than λ
    log_sums,  # [rows] float32 or None: λ of a shard, written, or with scales that of all shards, read
    vocabulary,
    padded,
    row_stride,
    first,  # class of this shard
    classes,  # of all shards
    ignore_index,
    softcap,  # a number or None
    smoothing,
    z_loss,
    HAS_SMOOTHING: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,  # whether a row has more columns than COLUMNS
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    ignored = target == ignore_index
    inside = (target >= 0) & (target < classes)
    place = target - first
    here = (place >= 0) & (place < vocabulary) & (target != ignore_index)
    at_target = tl.load(logits + place, mask=here, other=0.0)
    offsets = tl.arange(0, COLUMNS)
    end = tl.where(ignored, 0, padded)  # an ignored row is not read at all
    held = _load(logits, offsets, end, vocabulary)
    if log_sums is None or scales is None:
        x = _scores(held, offsets, vocabulary, softcap)
        highest = tl.max(x, 0)
        exponentials = tl.exp(x - _finite(highest))
        if HAS_SMOOTHING:
            values = tl.where(offsets < vocabulary, x, 0.0)
        if MORE:
            for start in range(COLUMNS, end, COLUMNS):
                columns = start + offsets
                x = _scores(_load(logits, columns, end, vocabulary), columns, vocabulary, softcap)
                raised = tl.maximum(highest, tl.max(x, 0))
                exponentials = exponentials * tl.exp(highest - _finite(raised)) + tl.exp(x - _finite(raised))
                highest = raised
                if HAS_SMOOTHING:
                    values += tl.where(columns < vocabulary, x, 0.0)
        highest = _finite(highest)
        above = tl.log(tl.sum(exponentials, 0))
        log_sum = highest + above
    else:
        log_sum = tl.load(log_sums + row)
    if losses is not None:
        x = tl.where(here, _capped(at_target, softcap), 0.0)
        if log_sums is None:
            # Not from λ: beside large logits that has lost the digits that a small loss consists of.
            loss = above + (1.0 - smoothing) * (highest - x) + z_loss * log_sum * log_sum
            if HAS_SMOOTHING:
                loss += smoothing * (highest - tl.sum(values, 0) / classes)
        else:
            loss = (1.0 - smoothing) * x
            if HAS_SMOOTHING:
                loss += smoothing * tl.sum(values, 0) / classes
            tl.store(log_sums + row, log_sum)
        loss = tl.where(inside, loss, float("nan"))
        tl.store(losses + row, tl.where(ignored, 0.0, loss))
    if scales is not None:
        scale = tl.load(scales + row)
        # Exactly zero where nothing counts, also if the logits are not finite.
        silent = ignored | (scale == 0.0)
        scale = tl.where(inside, scale, float("nan"))
        pull, uniform, taken = 1.0 + 2.0 * z_loss * log_sum, smoothing / classes, 1.0 - smoothing
        # Each thread writes where it has read, but for `at_target`, which all of them have read.
        tl.debug_barrier()
        gradient = _gradient(held, log_sum, pull, uniform, 0.0, softcap, HAS_SMOOTHING) * scale
        gradient = tl.where(silent, 0.0, gradient).to(logits.dtype.element_ty)
        tl.store(logits + offsets, gradient, mask=offsets < padded)
        if MORE:
            for start in range(COLUMNS, padded, COLUMNS):
                columns = start + offsets
                more = _load(logits, columns, end, vocabulary)
                gradient = _gradient(more, log_sum, pull, uniform, 0.0, softcap, HAS_SMOOTHING) * scale
                gradient = tl.where(silent, 0.0, gradient).to(logits.dtype.element_ty)
                tl.store(logits + columns, gradient, mask=columns < padded)
        # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
        tl.debug_barrier()
        gradient = _gradient(at_target, log_sum, pull, uniform, taken, softcap, HAS_SMOOTHING) * scale
        gradient = tl.where(silent, 0.0, gradient).to(logits.dtype.element_ty)
        tl.store(logits + place, gradient, mask=here)


def cross_entropy_(
    logits: Tensor,
    vocabulary: int,
    targets: Tensor,
    losses: Tensor | None,
    scales: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    smoothing: float,
    z_loss: float = 0.0,
    *,
    first: int = 0,
    classes: int | None = None,
    log_sums: Tensor | None = None,
    columns: int | None = None,
) -> None:
    """Write the losses if `losses` is given, and the gradient over the logits if `scales` are, as the kernel says.

    Args:
        logits: `[rows, padded]`, of any row stride and with adjacent columns; rows of a multiple of 16 columns are read
            and written 128 bits at a time.
        vocabulary: the columns that count. In the others may stand anything, and does afterwards.
        first: the class of the first column, and `classes` their number, if these are the logits of a shard.
        columns: of a block, a power of two; default: a whole row if it can be held.
    """
    (rows, padded), size = logits.shape, logits.element_size()
    assert logits.stride(1) == 1 or padded == 1
    assert all(vector is None or vector.dtype == torch.float32 for vector in (losses, scales, log_sums))
    # The cap takes registers. Longer rows are read twice, by blocks of which several share a multiprocessor.
    narrow = 1 if softcap is None else 2
    if columns is None:
        holds = padded <= HELD_BYTES // size // narrow**2
        columns = max(128, triton.next_power_of_2(padded)) if holds else 4096 // narrow
    options = {"num_warps": min(16, max(1, columns // 512)), "num_stages": 2, "enable_fp_fusion": True}
    if rows:
        cross_entropy_kernel[(rows,)](
            *(logits, targets, scales, losses, log_sums),
            *(vocabulary, padded, logits.stride(0), first, vocabulary if classes is None else classes, ignore_index),
            *(softcap, smoothing, z_loss),
            HAS_SMOOTHING=smoothing != 0.0,
            COLUMNS=columns,
            MORE=padded > columns,
            **options,
        )
