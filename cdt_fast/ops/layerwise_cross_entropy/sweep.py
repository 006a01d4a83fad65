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
    v = 0 if vocabulary < FEW_COLUMNS and logits.numel() >= FEW_NUMBERS else 1  # the dimension of the vocabulary
    ignored = outside = None
    places = targets
    if logits.device.type != "cpu":  # where neither ignored tokens nor targets out of range get this far
        ignored = targets == loss.ignore_index
        outside = ~ignored & ((targets < 0) | (targets >= vocabulary))
        places = targets.masked_fill(ignored | outside, 0)
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
