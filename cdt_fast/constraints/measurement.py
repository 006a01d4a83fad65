"""What a dual update sees: means over the items of all micro-batches and ranks, exactly, and averages over updates.

Everything that is recorded is a sum and a count in one flat buffer, so that one all-reduce gives the means of a single
process with all the items. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdt_fast.checks import check_number
from cdt_fast.constraints.presets import Ratio
from cdt_fast.errors import InputError

# The average follows the last this many measurements; fewer while there have not been so many.
AVERAGED = 10
# By how much a threshold of CVaR moves for a share of samples that is off by 1.
THRESHOLD_STEP = 0.05


class Measured(NamedTuple):
    """Means over all items since the last update.

    Attributes:
        losses: ℓ, `[L+1]`.
        ratios: `[L]`, what takes the place of ℓ_l / ℓ_{l−1}; None: that itself.
    """

    losses: Tensor
    ratios: Tensor | None

    def finite(self) -> Tensor:
        """Whether all of it is, `[]` bool."""
        return torch.stack([part.isfinite().all() for part in self if part is not None]).all()


class Measurement:
    """Sums and counts since the last update.

    The ratios of a sample i are q_l(i) = ℓ_l(i) / ℓ_{l−1}(i). By `ratio`, a layer is judged by

        "mean"      ℓ_l / ℓ_{l−1}, of the mean losses
        "sample"    mean_i q_l(i)
        "cvar"      t_l + mean_i [q_l(i) − t_l]₊ / s, at least the mean of the worst share s of the samples, and equal
                    to it where a share s of them is above t_l (Rockafellar and Uryasev, 2000)

    The threshold t_l starts at 1, and moves once a measurement by 0.05 (P(q_l > t_l) − s), towards that point. It is
    constant in between, so that its statistics are sums over samples, and exact too.

    Attributes:
        tensors: "accumulated", the sums and counts of this rank, and with "cvar" "thresholds" `[L]`.
    """

    def __init__(self, layers: int, dtype: torch.dtype, ratio: Ratio, tail: float) -> None:
        self.ratio, self._tail = ratio, tail
        sizes = {"losses": layers + 1, "count": 1}
        if ratio != "mean":
            sizes |= {"ratios": layers, "samples": 1}
        if ratio == "cvar":
            sizes["above"] = layers
        self._sizes = sizes
        self.tensors = {"accumulated": torch.zeros(sum(sizes.values()), dtype=dtype)}
        if ratio == "cvar":
            self.tensors["thresholds"] = torch.ones(layers, dtype=dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the sums where they are now: float32 on a device without float64."""
        return self.tensors["accumulated"].dtype

    def add(self, losses: Tensor, count: float | Tensor) -> None:
        """Add means with their count; see `DescentConstraints.record`. What has a count of 0 adds nothing."""
        parts = self._parts()
        if not isinstance(count, Tensor):
            if not count:
                return
            if losses.dim() == 1 and len(parts) == 2:  # the usual case, in as few kernels as can be
                parts["losses"].add_(losses, alpha=count)
                parts["count"].add_(count)
                return
            count = torch.full((), count, dtype=parts["losses"].dtype, device=losses.device)
        losses = losses.to(parts["losses"].dtype)
        columns = losses.reshape(len(losses), -1)
        counts = count.to(losses.dtype).expand(columns.shape[1])
        counted = counts > 0  # the mean of nothing may be NaN
        parts["losses"].add_(torch.where(counted, columns * counts, 0.0).sum(1))
        parts["count"].add_(counts.sum())
        if self.ratio != "mean":
            self._add_ratios(parts, columns[1:] / columns[:-1], counted)

    def _add_ratios(self, parts: dict[str, Tensor], ratios: Tensor, counted: Tensor) -> None:
        if self.ratio == "cvar":
            excess = ratios - self.tensors["thresholds"].unsqueeze(1)
            parts["above"].add_((counted & (excess > 0)).sum(1))
            ratios = torch.where(excess <= 0, 0.0, excess)  # NaN stays NaN
        parts["ratios"].add_(torch.where(counted, ratios, 0.0).sum(1))
        parts["samples"].add_(counted.sum())

    def reduce(self) -> None:
        """Add up the sums of all ranks: one all-reduce on the default group where torch.distributed is initialized;
        every rank must call this."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.tensors["accumulated"])

    def means(self) -> Measured:
        """What the sums come to; moves the thresholds."""
        parts = self._parts()
        losses = parts["losses"] / parts["count"]
        ratios = parts["ratios"] / parts["samples"] if self.ratio != "mean" else None
        if self.ratio == "cvar" and ratios is not None:
            thresholds = self.tensors["thresholds"]
            ratios = thresholds + ratios / self._tail
            moved = thresholds + THRESHOLD_STEP * (parts["above"] / parts["samples"] - self._tail)
            thresholds.copy_(torch.where(ratios.isfinite().all() & losses.isfinite().all(), moved, thresholds))
        return Measured(losses, ratios)

    def clear(self) -> None:
        """Forget the sums."""
        self.tensors["accumulated"].zero_()

    def _parts(self) -> dict[str, Tensor]:
        """Views of the buffer by name."""
        pieces = self.tensors["accumulated"].split(list(self._sizes.values()))
        return dict(zip(self._sizes, pieces, strict=True))


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
    columns = losses.shape[1] if isinstance(losses, Tensor) and losses.dim() == 2 else 0
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (layers + 1, columns)[: 1 + bool(columns)]:
        given = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InputError(
            f"losses is {given}; expected a tensor of shape ({layers + 1},), a mean per depth, or "
            f"({layers + 1}, n), a column per sample"
        )
    if not isinstance(count, Tensor):
        return losses, check_number("count", count, "a number > 0", lambda number: number > 0)
    if count.numel() != 1 and (not columns or tuple(count.shape) != (columns,)):
        expected = f", or shape ({columns},), one a sample" if columns else ", the number of items"
        raise InputError(f"count has shape {tuple(count.shape)}; expected one element{expected}")
    return losses, count.reshape(()) if count.numel() == 1 else count


def tail_mean(values: Tensor, share: float) -> Tensor:
    """The mean of the largest `share` of the entries of each row of `[L, n]`, `[L]`: CVaR of a finite sample."""
    ordered = values.sort(-1, descending=True).values
    kept = (share * values.shape[1] - torch.arange(values.shape[1], device=values.device)).clamp(0, 1)
    return (ordered * kept).sum(-1) / kept.sum()
