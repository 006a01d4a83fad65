"""The sweep over the logits of a chunk, in place: losses, log-sum-exps, and the gradient over the logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cdt_fast.ops.cross_entropy_chunks import Head

# Bytes, in float32, of the rows that the sweep in plain torch takes together: its dozen steps stay in a CPU's cache.
SWEEP_BYTES = 4 * 2**20

# (head, logits, targets, losses, log_sums, scales): losses and log-sum-exps where losses are given, else the latter are
# read; the gradient over the logits where scales are given.
RowSweep = Callable[[Head, Tensor, Tensor, "Tensor | None", Tensor, "Tensor | None"], None]


def sweep_on_triton(
    head: Head, logits: Tensor, targets: Tensor, losses: Tensor | None, log_sums: Tensor, scales: Tensor | None
) -> None:
    """The sweep as one kernel, a program a row."""
    from cdt_fast.kernels.cross_entropy import cross_entropy_

    cross_entropy_(
        logits,
        targets,
        losses,
        log_sums,
        scales,
        ignore_index=head.ignore_index,
        softcap=head.softcap,
        smoothing=head.smoothing,
    )


class TorchSweep:
    """The sweep in plain torch, in place and in at least float32; keeps what it needs beside the logits."""

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def __call__(
        self,
        head: Head,
        logits: Tensor,
        targets: Tensor,
        losses: Tensor | None,
        log_sums: Tensor,
        scales: Tensor | None,
    ) -> None:
        count = max(1, SWEEP_BYTES // (4 * logits.shape[1]))
        arguments = (logits, targets, losses, log_sums, scales)
        if logits.shape[0] <= count:
            self._sweep(head, *arguments)
            return
        parts = [
            [None] * -(-logits.shape[0] // count) if tensor is None else tensor.split(count) for tensor in arguments
        ]
        for part in zip(*parts, strict=True):
            self._sweep(head, *part)

    def _sweep(
        self,
        head: Head,
        logits: Tensor,
        targets: Tensor,
        losses: Tensor | None,
        log_sums: Tensor,
        scales: Tensor | None,
    ) -> None:
        # On the CPU neither ignored tokens, nor targets out of range, nor switched-off depths get this far.
        if logits.device.type == "cpu":
            ignored = outside = None
            places = targets.unsqueeze(1)
        else:
            ignored = targets == head.ignore_index
            outside = ~ignored & ((targets < 0) | (targets >= logits.shape[1]))
            places = targets.masked_fill(ignored | outside, 0).unsqueeze(1)
        x = logits if logits.dtype.itemsize >= 4 else self._room("wide", logits).copy_(logits)
        logs, slope = x, None
        if head.softcap is not None:
            x.div_(head.softcap).tanh_()
            if scales is not None:
                logs, slope = self._room("logs", x).copy_(x), x.square_().neg_().add_(1.0)
            logs.mul_(head.softcap)
        if losses is None:
            probabilities = logs.sub_(log_sums.unsqueeze(1)).exp_()
        else:
            highest = logs.amax(1)
            below = highest - logs.gather(1, places).squeeze(1)
            if head.smoothing:
                below.mul_(1.0 - head.smoothing).add_(highest - logs.mean(1), alpha=head.smoothing)
            probabilities = torch.softmax(logs, 1, out=logs)
            # The largest is exp(highest − log_sum): this saves a sum of exponentials of its own.
            above = probabilities.amax(1).log_().neg_()
            torch.add(highest, above, out=log_sums)
            torch.add(below, above, out=losses)
            if ignored is not None and outside is not None:
                losses.masked_fill_(ignored, 0.0).masked_fill_(outside, float("nan"))
        if scales is None:
            return
        if head.smoothing:
            probabilities.sub_(head.smoothing / logits.shape[1])
        # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
        probabilities.scatter_(1, places, head.smoothing - 1.0, reduce="add")
        if slope is not None:
            probabilities.mul_(slope)
        if ignored is None or outside is None:
            probabilities.mul_(scales.unsqueeze(1))
        else:
            probabilities.mul_(scales.masked_fill(outside, float("nan")).unsqueeze(1))
            probabilities.masked_fill_((ignored | (scales == 0)).unsqueeze(1), 0.0)
        if probabilities is not logits:
            logits.copy_(probabilities)

    def _room(self, name: str, like: Tensor) -> Tensor:
        """Memory of the shape of `like` in at least float32, the same one in every call."""
        room = self._rooms.get(name)
        if room is None or len(room) < len(like):
            dtype = torch.promote_types(like.dtype, torch.float32)
            room = self._rooms[name] = torch.empty(like.shape, dtype=dtype, device=like.device)
        return room[: len(like)]
