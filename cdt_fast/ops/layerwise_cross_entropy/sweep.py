"""The sweep over a chunk of logits: losses, log-sum-exps and, in their place, the gradient; by a kernel or by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.ops.layerwise_cross_entropy.chunked import CrossEntropyArguments
from cdt_fast.ops.shared.products import budget

# Bytes, in float32, of the rows that the sweep in torch takes together: its dozen steps stay in a CPU's cache.
SWEEP_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
# Rows of fewer columns than this are swept with the classes first: torch's loops over so few take several times longer.
FEW_COLUMNS = 32
# Fewer numbers than this are not worth turning.
FEW_NUMBERS = 2**13


def sweep(
    loss: CrossEntropyArguments,
    logits: Tensor,
    targets: Tensor,
    losses: Tensor | None,
    log_sums: Tensor,
    scales: Tensor | None,
    out: Tensor | None,
) -> None:
    """From logits `[rows, V]`, which are overwritten, to losses and the gradient over the logits.

    Args:
        targets, losses, log_sums: `[rows]`. Where losses are given they and the log-sum-exps are written, else the
            latter are read.
        scales: `[rows]`, what the gradients are multiplied by; None: by one.
        out: where the gradient goes, which may be `logits`; None: nowhere.
    """
    if loss.backend == "triton":
        from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_

        if out is not None and scales is None:
            scales = torch.ones_like(log_sums)
        cross_entropy_(
            logits,
            targets,
            losses,
            log_sums,
            scales,
            ignore_index=loss.ignore_index,
            softcap=loss.softcap,
            smoothing=loss.label_smoothing,
        )
        if out is not None and out.data_ptr() != logits.data_ptr():
            out.copy_(logits)
        return
    count = max(1, budget(SWEEP_BYTES, logits) // (4 * logits.shape[1]))
    if logits.shape[0] <= count:
        _sweep_rows(loss, logits, targets, log_sums, losses, scales, out)
        return
    optional = [[None] * -(-logits.shape[0] // count) if t is None else t.split(count) for t in (losses, scales, out)]
    for part in zip(logits.split(count), targets.split(count), log_sums.split(count), *optional, strict=True):
        _sweep_rows(loss, *part)


def _sweep_rows(
    loss: CrossEntropyArguments,
    logits: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    losses: Tensor | None,
    scales: Tensor | None,
    out: Tensor | None,
) -> None:
    smoothing, vocabulary = loss.label_smoothing, logits.shape[1]
    ignored, outside, places = _places(loss, targets, vocabulary)
    v = 0 if vocabulary < FEW_COLUMNS and logits.numel() >= FEW_NUMBERS else 1  # the dimension of the vocabulary
    places = places.unsqueeze(v)
    # In at least float32; what is written over the logits is written over `out` where it has room for that.
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x if v else x.mT.contiguous()
    room = out if v and out is not None and out.dtype == x.dtype else x
    slope = None
    if loss.softcap is not None:
        x.div_(loss.softcap).tanh_()
        slope = None if out is None else 1.0 - x.square()
        x.mul_(loss.softcap)
    if losses is None:
        probabilities = torch.exp(x.sub_(log_sums.unsqueeze(v)), out=room)
    else:
        highest = x.amax(v)
        below = highest - x.gather(v, places).squeeze(v)
        if smoothing:
            below.mul_(1.0 - smoothing).add_(highest - x.mean(v), alpha=smoothing)
        probabilities = torch.softmax(x, v, out=room)
        # The largest is exp(highest − log_sum): this saves a sum of exponentials of its own.
        above = probabilities.amax(v).log_().neg_()
        torch.add(highest, above, out=log_sums)
        torch.add(below, above, out=losses)
        if ignored is not None and outside is not None:
            losses.masked_fill_(ignored, 0.0).masked_fill_(outside, float("nan"))
    if out is None:
        return
    if smoothing:
        probabilities.sub_(smoothing / vocabulary)
    # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
    probabilities.scatter_(v, places, smoothing - 1.0, reduce="add")
    if slope is not None:
        probabilities.mul_(slope)
    if ignored is not None and outside is not None:
        scales = torch.ones_like(log_sums) if scales is None else scales
        scales = scales.masked_fill(outside, float("nan"))
        probabilities.mul_(scales.unsqueeze(v)).masked_fill_((ignored | (scales == 0)).unsqueeze(v), 0.0)
    elif scales is not None:
        probabilities.mul_(scales.unsqueeze(v))
    if probabilities is not out:
        out.copy_(probabilities if v else probabilities.mT)


def sweep_kl(
    loss: CrossEntropyArguments,
    logits: Tensor,
    of_last: Tensor,
    targets: Tensor,
    losses: Tensor | None,
    log_sums: Tensor,
    scales: Tensor | None,
    to_last: Tensor | None,
) -> None:
    """`sweep` for an inner depth whose loss has a share of the KL from the last depth's distribution; in torch.

    Args:
        logits: `[rows, V]`, overwritten by their gradient where scales are given.
        of_last: the logits of the last depth at the same tokens, read.
        targets, losses, log_sums, scales: as there; the log-sum-exps are written with the losses, and not read.
        to_last: `[rows, V]` in at least float32; the gradient over `of_last` is added to it.
    """
    count = max(1, budget(SWEEP_BYTES, logits) // (4 * logits.shape[1]))
    rows = (logits, of_last, targets, losses, log_sums, scales, to_last)
    number = -(-logits.shape[0] // count)
    for part in zip(*([None] * number if row is None else row.split(count) for row in rows), strict=True):
        _sweep_kl_rows(loss, *part)


def _sweep_kl_rows(
    loss: CrossEntropyArguments,
    logits: Tensor,
    of_last: Tensor,
    targets: Tensor,
    losses: Tensor | None,
    log_sums: Tensor,
    scales: Tensor | None,
    to_last: Tensor | None,
) -> None:
    share, smoothing = loss.inner_kl, loss.label_smoothing
    ignored, outside, places = _places(loss, targets, logits.shape[1])
    x, slope = _capped(loss, logits)
    last, slope_of_last = _capped(loss, of_last)
    log_p, log_q = torch.log_softmax(x, 1), torch.log_softmax(last, 1)
    q = log_q.exp()
    # A class that cannot be at the last depth adds nothing, also where it cannot be at this one: no −inf − (−inf).
    difference = torch.where(q == 0, 0.0, log_q.sub_(log_p))
    kl = torch.linalg.vecdot(q, difference)
    if losses is not None:
        of_rows = share * kl
        if share < 1:
            wanted = (1 - smoothing) * log_p.gather(1, places.unsqueeze(1)).squeeze(1)
            wanted = wanted + smoothing * log_p.mean(1) if smoothing else wanted
            of_rows.sub_(wanted, alpha=1 - share)
        if ignored is not None and outside is not None:
            of_rows.masked_fill_(ignored, 0.0).masked_fill_(outside, float("nan"))
        losses.copy_(of_rows)
        torch.sub(x.amax(1), log_p.amax(1), out=log_sums)
    if scales is None:
        return
    silent = None
    if ignored is not None and outside is not None:
        scales = scales.masked_fill(outside, float("nan"))
        silent = (ignored | (scales == 0)).unsqueeze(1)
    scales = scales.unsqueeze(1)
    gradient = log_p.exp_().sub_(q, alpha=share)
    if share < 1:
        gradient.scatter_(1, places.unsqueeze(1), -(1 - share) * (1 - smoothing), reduce="add")
        if smoothing:
            gradient.sub_((1 - share) * smoothing / logits.shape[1])
    for of_logits, slopes, out in (
        (gradient, slope, logits),
        (None if to_last is None else difference.sub_(kl.unsqueeze(1)).mul_(q).mul_(share), slope_of_last, to_last),
    ):
        if of_logits is None or out is None:
            continue
        of_logits.mul_(scales)
        if slopes is not None:
            of_logits.mul_(slopes)
        if silent is not None:
            of_logits.masked_fill_(silent, 0.0)
        if out is logits:
            out.copy_(of_logits)
        else:
            out.add_(of_logits)


def _capped(loss: CrossEntropyArguments, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """The logits in at least float32 within the softcap, and its slope there."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if loss.softcap is None:
        return x, None
    ratio = torch.tanh(x / loss.softcap)
    return loss.softcap * ratio, 1.0 - ratio.square()


def _places(
    loss: CrossEntropyArguments, targets: Tensor, vocabulary: int
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Which targets are ignored and which are out of range, and the columns of the others.

    None and None on a CPU, where neither gets this far.
    """
    if targets.device.type == "cpu":
        return None, None, targets
    ignored = targets == loss.ignore_index
    outside = ~ignored & ((targets < 0) | (targets >= vocabulary))
    return ignored, outside, targets.masked_fill(ignored | outside, 0)
