"""The sweep over the logits of a chunk, in place: losses, log-sum-exps, and the gradient over the logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cdt_fast.ops.layerwise_cross_entropy.chunks import Head

# Bytes, in float32, of the rows that the sweep in plain torch takes together: its dozen steps stay in a CPU's cache.
SWEEP_BYTES = 4 * 2**20

# Where the vocabulary is smaller than this, the sweep in plain torch goes along the columns: torch's softmax takes five
# times as long over rows that do not fill a vector register.
FEW_COLUMNS = 16
# Fewer numbers than this are not worth turning.
FEW_NUMBERS = 2**14

# (head, logits, targets, losses, log_sums, scales): losses and log-sum-exps where losses are given, else the latter are
# read; the gradient over the logits where scales are given.
RowSweep = Callable[[Head, Tensor, Tensor, "Tensor | None", Tensor, "Tensor | None"], None]


def sweep_on_triton(
    head: Head, logits: Tensor, targets: Tensor, losses: Tensor | None, log_sums: Tensor, scales: Tensor | None
) -> None:
    """The sweep as one kernel, a program a row."""
    from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_

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
        log_sums: Tensor | None,
        scales: Tensor | None,
        *,
        unscaled: bool = False,
    ) -> None:
        """As a `RowSweep`; with `unscaled` the gradient over the logits, too, and with losses no need for log-sum-exps.

        There must be neither ignored tokens nor targets out of range where the gradient is unscaled.
        """
        count = max(1, SWEEP_BYTES // (4 * logits.shape[1]))
        if logits.shape[0] <= count:
            self._sweep(head, logits, targets, losses, log_sums, scales, unscaled or scales is not None)
            return
        parts = -(-logits.shape[0] // count)
        of_rows = (logits, targets, losses, log_sums, scales)
        split = [[None] * parts if tensor is None else tensor.split(count) for tensor in of_rows]
        for part in zip(*split, strict=True):
            self._sweep(head, *part, gradient=unscaled or scales is not None)

    def _sweep(
        self,
        head: Head,
        logits: Tensor,
        targets: Tensor,
        losses: Tensor | None,
        log_sums: Tensor | None,
        scales: Tensor | None,
        gradient: bool,
    ) -> None:
        vocabulary = logits.shape[1]
        # The dimension of the vocabulary.
        v = 0 if vocabulary < FEW_COLUMNS and logits.numel() >= FEW_NUMBERS else 1
        given = logits.mT if v == 0 else logits
        # On the CPU neither ignored tokens, nor targets out of range, nor switched-off depths get this far.
        if logits.device.type == "cpu":
            ignored = outside = None
            places = targets.unsqueeze(v)
        else:
            ignored = targets == head.ignore_index
            outside = ~ignored & ((targets < 0) | (targets >= vocabulary))
            places = targets.masked_fill(ignored | outside, 0).unsqueeze(v)
        in_place = given.dtype.itemsize >= 4 and given.stride(1) == 1
        x = given if in_place else self._room("wide", given).copy_(given)
        logs, slope = x, None
        if head.softcap is not None:
            x.div_(head.softcap).tanh_()
            if gradient:
                logs, slope = self._room("logs", x).copy_(x), x.square_().neg_().add_(1.0)
            logs.mul_(head.softcap)
        if losses is None:
            assert log_sums is not None  # of a pass before
            probabilities = logs.sub_(log_sums.unsqueeze(v)).exp_()
        else:
            highest = logs.amax(v)
            below = highest - logs.gather(v, places).squeeze(v)
            if head.smoothing:
                below.mul_(1.0 - head.smoothing).add_(highest - logs.mean(v), alpha=head.smoothing)
            probabilities = torch.softmax(logs, v, out=logs)
            # The largest is exp(highest − log_sum): this saves a sum of exponentials of its own.
            above = probabilities.amax(v).log_().neg_()
            if log_sums is not None:
                torch.add(highest, above, out=log_sums)
            torch.add(below, above, out=losses)
            if ignored is not None and outside is not None:
                losses.masked_fill_(ignored, 0.0).masked_fill_(outside, float("nan"))
        if not gradient:
            return
        if head.smoothing:
            probabilities.sub_(head.smoothing / vocabulary)
        # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
        probabilities.scatter_(v, places, head.smoothing - 1.0, reduce="add")
        if slope is not None:
            probabilities.mul_(slope)
        if scales is not None:
            factors = scales if outside is None else scales.masked_fill(outside, float("nan"))
            probabilities.mul_(factors.unsqueeze(v))
            if ignored is not None:
                probabilities.masked_fill_((ignored | (scales == 0)).unsqueeze(v), 0.0)
        if probabilities is not given:
            given.copy_(probabilities)

    def _room(self, name: str, like: Tensor) -> Tensor:
        """Memory of the shape of `like` in at least float32, the same one in every call."""
        count, room = like.numel(), self._rooms.get(name)
        if room is None or len(room) < count:
            dtype = torch.promote_types(like.dtype, torch.float32)
            room = self._rooms[name] = torch.empty(count, dtype=dtype, device=like.device)
        return room[:count].view(like.shape)
