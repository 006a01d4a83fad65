"""What a dual update sees: means over the items of all micro-batches and ranks, exactly, and averages over updates.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import check_number
from cdt_fast.errors import InputError

# The average follows the last this many measurements; fewer while there have not been so many.
AVERAGED = 10


class Measurement:
    """Sums of losses and the count of their items since the last update, in one buffer.

    Attributes:
        tensors: "accumulated", `[L+2]`, the sums of this rank and behind them their count.
    """

    def __init__(self, layers: int, dtype: torch.dtype) -> None:
        self.tensors = {"accumulated": torch.zeros(layers + 2, dtype=dtype)}

    @property
    def dtype(self) -> torch.dtype:
        """Of the sums where they are now: float32 on a device without float64."""
        return self.tensors["accumulated"].dtype

    def add(self, losses: Tensor, count: float | Tensor) -> None:
        """Add means with their count; see `DescentConstraints.record`. What has a count of 0 adds nothing."""
        accumulated = self.tensors["accumulated"]
        if not isinstance(count, Tensor):
            if count:
                accumulated[:-1].add_(losses, alpha=count)
                accumulated[-1].add_(count)
            return
        count = count.to(accumulated.dtype)
        # The mean of nothing may be NaN.
        accumulated[:-1].add_(torch.where(count > 0, losses.to(accumulated.dtype) * count, 0.0))
        accumulated[-1].add_(count)

    def reduce(self) -> None:
        """Add up the sums of all ranks: one all-reduce on the default group where torch.distributed is initialized;
        every rank must call this."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.tensors["accumulated"])

    def means(self) -> Tensor:
        """The mean losses `[L+1]`."""
        accumulated = self.tensors["accumulated"]
        return accumulated[:-1] / accumulated[-1]

    def clear(self) -> None:
        """Forget the sums."""
        self.tensors["accumulated"].zero_()


class AverageLosses:
    """A running mean of the losses over measurements: of all of them up to 10, then following the last ten.

        ā ← ā + (ℓ − ā) / min(n, 10)        at the n-th measurement

    A measurement with a loss that is not finite leaves no trace.

    Args:
        name: what the tensors are called by in a state.
    """

    def __init__(self, name: str, layers: int, dtype: torch.dtype) -> None:
        self._losses, self._updates = f"{name}_losses", f"{name}_updates"
        self.tensors = {
            self._losses: torch.zeros(layers + 1, dtype=dtype),
            self._updates: torch.zeros((), dtype=torch.int64),
        }

    @property
    def losses(self) -> Tensor:
        """ā, `[L+1]`, live; zeros before the first measurement."""
        return self.tensors[self._losses]

    @property
    def updates(self) -> Tensor:
        """How many measurements there were, `[]`, live."""
        return self.tensors[self._updates]

    @property
    def known(self) -> Tensor:
        """Whether there has been a measurement, `[]` bool."""
        return self.updates > 0

    def update(self, losses: Tensor) -> None:
        """Take in one measurement, `[L+1]`."""
        average, updates = self.losses, self.updates
        finite = losses.isfinite().all()
        updates += finite
        moved = average + (losses - average) / updates.clamp(min=1, max=AVERAGED)
        average.copy_(torch.where(finite, moved, average))


def check_record(losses: Any, count: Any, layers: int) -> tuple[Tensor, float | Tensor]:
    """What `DescentConstraints.record` is given; a count of one element as `[]`.

    Raises:
        InputError: a shape or the count is wrong.
    """
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (layers + 1,):
        given = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InputError(f"losses is {given}; expected a tensor of shape ({layers + 1},), a mean per depth")
    if not isinstance(count, Tensor):
        return losses, check_number("count", count, "a number > 0", lambda number: number > 0)
    if count.numel() != 1:
        raise InputError(f"count has shape {tuple(count.shape)}; expected one element, the number of items")
    return losses, count.reshape(())
