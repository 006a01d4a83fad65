"""Cross-entropy of a chunk of logits, a program a row: the loss, the log-sum-exp and, in place, the gradient.

    x = c tanh(logits / c)  (softcap c; else x = logits),        lse = log Σ_v exp(x_v)
    ce = lse − (1 − ε) x_y − (ε / V) Σ_v x_v                      (ε: label smoothing, y: the target)
    loss = (1 − α) ce + α KL,    KL = Σ_v q_v d_v − log Σ_v exp(z_v − max z) + log Σ_v exp(x_v − max x)
    logits ← s (exp(x_v − lse) − α q_v − (1 − α) ((1 − ε) [v = y] + ε / V)) (1 − (x_v / c)²)   (s: the row's scale)
    to_last ← to_last + s α q_v (d_v − Σ_u q_u d_u) (1 − (z_v / c)²)

with z those of the last depth, q = softmax(z), and d = (z − max z) − (x − max x); without them α = 0.

A row whose target is `ignore_index` has loss 0 and gradient 0. A target outside of [0, V) reads nothing: its row's
loss and gradient are NaN, so that the mistake shows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cdt_fast.kernels.arguments import SweepArguments
from cdt_fast.kernels.blocks import LAYERWISE_CROSS_ENTROPY, LAYERWISE_CROSS_ENTROPY_KL, Blocks
from cdt_fast.kernels.launch import Launch


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
def _capped(logits, softcap, HAS_SOFTCAP: tl.constexpr):
    x = logits.to(tl.float32)
    if HAS_SOFTCAP:
        x = softcap * _tanh(x / softcap)
    return x


@triton.jit
def _slope(decay):
    # Of the cap, from exp(−2 |logits / c|). Not 1 − ratio²: near the cap that is the rounding error of the ratio.
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def _ranked(logits, mask):
    # Before the cap, which rounds two to one; a NaN is the largest.
    x = tl.where(logits == logits, logits.to(tl.float32), float("inf"))
    return tl.where(mask, x, float("-inf"))


@triton.jit
def _finite(highest):
    # Nothing but −inf so far: without this a difference from it would be NaN, as −inf − (−inf) is.
    return tl.where(highest == float("-inf"), 0.0, highest)


# Chunks are slices of what belongs to all rows, which start anywhere.
@triton.jit(
    do_not_specialize_on_alignment=["targets", "scales", "losses", "log_sums", "log_sums_of_last", "classes"],
)
def cross_entropy_kernel(
    logits,  # [rows, vocabulary], read, and written where GRADIENT
    of_last,  # [rows, vocabulary], the last depth's, or None: no KL
    to_last,  # [rows, vocabulary] float32, added to where GRADIENT, or None
    targets,  # [rows] int64
    scales,  # [rows] float32, read where GRADIENT
    losses,  # [rows] float32, written where LOSS
    log_sums,  # [rows] float32, written where LOSS, else read
    log_sums_of_last,  # [rows] float32, read where the first sweep is left out, or None
    classes,  # [rows] int64, written where LOSS, or None
    vocabulary,
    logits_row_stride,
    of_last_row_stride,
    to_last_row_stride,
    ignore_index,
    softcap,
    smoothing,
    share,
    FIRST: tl.constexpr,  # whether there is a sweep before that of the gradient
    LOSS: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row_stride
    if of_last is not None:
        of_last += row * of_last_row_stride
    if to_last is not None:
        to_last += row * to_last_row_stride
    target = tl.load(targets + row)
    ignored = target == ignore_index
    inside = (target >= 0) & (target < vocabulary)
    offsets = tl.arange(0, COLUMNS)
    highest, highest_of_last, difference, log_sum_of_last = 0.0, 0.0, 0.0, 0.0
    if FIRST:
        highest = tl.full([], float("-inf"), tl.float32)
        exponentials = tl.zeros([COLUMNS], tl.float32)
        values = tl.zeros([COLUMNS], tl.float32)
        if of_last is not None:
            highest_of_last = tl.full([], float("-inf"), tl.float32)
            exponentials_of_last = tl.zeros([COLUMNS], tl.float32)
            differences = tl.zeros([COLUMNS], tl.float32)
        if classes is not None:
            largest = tl.full([], float("-inf"), tl.float32)
            largest_start = 0
        # An ignored row is not read at all.
        for start in range(0, tl.where(ignored, 0, vocabulary), COLUMNS):
            mask = start + offsets < vocabulary
            x = tl.load(logits + start + offsets, mask=mask, other=0.0)
            if classes is not None:
                # Of the block alone, which is read again in the end: a place a column would take its registers.
                of_block = tl.max(_ranked(x, mask), 0)
                largest_start = tl.where(of_block > largest, start, largest_start)
                largest = tl.maximum(largest, of_block)
            x = _capped(x, softcap, HAS_SOFTCAP)
            if HAS_SMOOTHING:
                values += tl.where(mask, x, 0.0)
            x = tl.where(mask, x, float("-inf"))
            raised = tl.maximum(highest, tl.max(x, 0))
            raised_finite = _finite(raised)
            if of_last is not None:
                z = _capped(tl.load(of_last + start + offsets, mask=mask, other=0.0), softcap, HAS_SOFTCAP)
                z = tl.where(mask, z, float("-inf"))
                raised_of_last = tl.maximum(highest_of_last, tl.max(z, 0))
                z -= _finite(raised_of_last)
                decay = tl.exp(highest_of_last - _finite(raised_of_last))
                # What the differences so far are of other maxima.
                moved = _finite(highest_of_last) - _finite(raised_of_last) - (_finite(highest) - raised_finite)
                differences = decay * (differences + exponentials_of_last * moved)
                exponential = tl.exp(z)
                # A class that cannot be at the last depth adds nothing, also where it cannot be at this one.
                differences = tl.where(decay == 0.0, 0.0, differences)
                differences += tl.where(exponential == 0.0, 0.0, exponential * (z - (x - raised_finite)))
                exponentials_of_last = exponentials_of_last * decay + exponential
                highest_of_last = raised_of_last
            exponentials = exponentials * tl.exp(highest - raised_finite) + tl.exp(x - raised_finite)
            highest = raised
        highest = _finite(highest)
        above = tl.log(tl.sum(exponentials, 0))
        log_sum = highest + above
        if of_last is not None:
            highest_of_last = _finite(highest_of_last)
            summed = tl.sum(exponentials_of_last, 0)
            log_sum_of_last = highest_of_last + tl.log(summed)
            difference = tl.sum(differences, 0) / summed
        if LOSS:
            at_target = tl.load(logits + target, mask=inside & (target != ignore_index), other=0.0)
            # Not from log_sum: beside large logits that has lost the digits that a small loss consists of.
            loss = above + (1.0 - smoothing) * (highest - _capped(at_target, softcap, HAS_SOFTCAP))
            if HAS_SMOOTHING:
                loss += smoothing * (highest - tl.sum(values, 0) / vocabulary)
            if of_last is not None:
                kl = difference + (above - tl.log(summed))
                # Alone it is finite also where the cross-entropy is not.
                loss = tl.where(share == 1.0, kl, (1.0 - share) * loss + share * kl)
            loss = tl.where(inside, loss, float("nan"))
            tl.store(losses + row, tl.where(ignored, 0.0, loss))
            tl.store(log_sums + row, tl.where(ignored, 0.0, log_sum))
            if classes is not None:
                columns = largest_start + offsets
                mask = columns < tl.where(ignored, 0, vocabulary)
                x = _ranked(tl.load(logits + columns, mask=mask, other=0.0), mask)
                first = tl.min(tl.where(mask & (x == largest), columns, vocabulary), 0)
                tl.store(classes + row, first.to(tl.int64))
    else:
        log_sum = tl.load(log_sums + row)
        if of_last is not None:
            log_sum_of_last = tl.load(log_sums_of_last + row)
    if GRADIENT:
        if FIRST:
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
            decay = x
            if HAS_SOFTCAP:
                decay = tl.exp(-2.0 * tl.abs(x / softcap))
                x = softcap * _tanh(x / softcap)
            gradient = tl.exp(x - log_sum)
            wanted = 1.0
            if of_last is not None:
                z = tl.load(of_last + columns, mask=columns < read, other=0.0).to(tl.float32)
                decay_of_last = z
                if HAS_SOFTCAP:
                    decay_of_last = tl.exp(-2.0 * tl.abs(z / softcap))
                    z = softcap * _tanh(z / softcap)
                of_kl = share * tl.exp(z - log_sum_of_last)
                gradient -= of_kl
                wanted -= share
                if to_last is not None:
                    added = of_kl * (((z - highest_of_last) - (x - highest)) - difference)
                    added = tl.where(of_kl == 0.0, 0.0, added) * scale
                    if HAS_SOFTCAP:
                        added *= _slope(decay_of_last)
                    added += tl.load(to_last + columns, mask=columns < read)
                    tl.store(to_last + columns, added, mask=columns < read)
            if HAS_SMOOTHING:
                gradient -= wanted * smoothing / vocabulary
            # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
            gradient = tl.where(columns == target, gradient - wanted * (1.0 - smoothing), gradient)
            if HAS_SOFTCAP:
                gradient *= _slope(decay)
            gradient = tl.where(silent, 0.0, gradient * scale)
            tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < vocabulary)


def cross_entropy_(
    rows: SweepArguments,
    *,
    ignore_index: int,
    softcap: float | None,
    smoothing: float,
    share: float = 0.0,
    blocks: Blocks | None = None,
) -> None:
    """Losses, log-sum-exps and classes where `losses` is given; where `out` is, the gradient over the logits.

    Logits, the last depth's too, have any row stride and adjacent columns, all else is contiguous; the numbers of a row
    are float32. With `to_last` there is an `out`. The share is α, of the KL.
    """
    number, vocabulary = rows.logits.shape
    table = LAYERWISE_CROSS_ENTROPY if rows.of_last is rows.classes is None else LAYERWISE_CROSS_ENTROPY_KL
    blocks = blocks or table.blocks(rows.logits, vocabulary)
    matrices = (rows.logits, rows.of_last, rows.to_last)
    assert all(matrix is None or matrix.stride(1) == 1 or vocabulary == 1 for matrix in matrices)
    vectors = (rows.losses, rows.log_sums, rows.scales, rows.log_sums_of_last, rows.to_last)
    assert all(vector is None or vector.dtype == torch.float32 for vector in vectors)
    gradient, has_kl = rows.out is not None, rows.of_last is not None
    # What the last depth gets is a difference from the KL, which nobody keeps.
    first = rows.losses is not None or rows.to_last is not None
    scales = torch.ones_like(rows.log_sums) if gradient and rows.scales is None else rows.scales
    arguments: dict[str, Any] = {
        **{name: tensor for name, tensor in rows._asdict().items() if name != "out"},
        "scales": rows.log_sums if scales is None else scales,
        "losses": rows.log_sums if rows.losses is None else rows.losses,
        "log_sums_of_last": None if first else rows.log_sums_of_last,
        "vocabulary": vocabulary,
        "ignore_index": ignore_index,
        "softcap": 1.0 if softcap is None else softcap,
        "smoothing": smoothing,
        "share": share if has_kl else None,
    }
    constants = {
        "FIRST": first,
        "LOSS": rows.losses is not None,
        "GRADIENT": gradient,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SMOOTHING": smoothing != 0.0,
    }
    # The rows that a card has in flight are larger than its L2 cache: the second sweep reads them from memory again.
    passes = {"logits": first + 2 * gradient, "of_last": first + gradient, "to_last": 2}
    Launch(cross_entropy_kernel, (number,), blocks, arguments, constants, passes=passes).run()
