"""Parts of both trainers: the constraints of a model, numbers of items, and the losses since the last log."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.constraints.presets import bounds_by_position, options_of
from cdt_fast.models.layer_losses import LayerLosses
from cdt_fast.models.layer_losses.outputs import IGNORED


def constraints_for(
    given: DescentConstraints | Mapping[str, Any], layer_losses: LayerLosses, unconstrained_steps: int
) -> DescentConstraints:
    """Return `given`, or constraints with these options, which may name a `preset`. InputError: it is neither, names an
    unknown option, does not have one loss a depth that is read, or needs a warm-up that has no steps; or the last depth
    is not read."""
    if layer_losses.taps[-1] != layer_losses.layers:
        untrained = f"as layers above the last tap are not trained; got {list(layer_losses.taps)}"
        raise InputError(f"taps must end with the last depth, {layer_losses.layers} or -1, {untrained}")
    if isinstance(given, Mapping):
        options = options_of(**given)
        if isinstance(options["bounds"], Mapping):
            options["bounds"] = bounds_by_position(options["bounds"], layer_losses.taps)
        given = DescentConstraints(layer_losses.num_constraints, **options)
    if not isinstance(given, DescentConstraints):
        expected = "a DescentConstraints or a dictionary of its options"
        raise InputError(f"constraints must be {expected}, got {type(given).__name__}")
    if given.layers != layer_losses.num_constraints:
        why = f"losses are read at {len(layer_losses.taps)} depths ({', '.join(map(str, layer_losses.taps))})"
        expected = f"{layer_losses.num_constraints}, as {why}"
        raise InputError(f"constraints has layers = {given.layers}; expected {expected}")
    given.depths = list(layer_losses.taps)
    if given.needs_warmup and not unconstrained_steps:
        factor = "a factor of the loss at the end of the warm-up"
        raise InputError(f"unconstrained_steps must be at least 1, as bounds holds {factor}, got 0")
    return given


def items_in(layer_losses: LayerLosses, batch: Mapping[str, Any]) -> Tensor:
    """Return how many labels of a batch count, `[]`: those of the model's loss; InputError: the batch has none."""
    shifted = batch.get("shift_labels")
    labels = batch.get("labels") if shifted is None else shifted
    if not isinstance(labels, Tensor):
        raise InputError(f"a batch must hold labels, as the losses of the depths need them; it holds {list(batch)}")
    if shifted is None and layer_losses.shifts_labels:
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum `tensor` in place over the default group, if there is one, and return it; every rank must call this."""
    if _is_distributed():
        torch.distributed.all_reduce(tensor)
    return tensor


def mean_over_ranks(items: Tensor) -> Tensor:
    """Return the mean of a number of items over the ranks, as gradients are averaged over them, or 1 item in all if
    there is none; every rank must call this."""
    return sum_over_ranks(items).clamp(min=1) / (torch.distributed.get_world_size() if _is_distributed() else 1)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class LossSums:
    """Sums of the losses of `taps` and their count, on the device of the constraints, without a host sync."""

    def __init__(self, constraints: DescentConstraints, taps: Sequence[int]) -> None:
        self._constraints, self._taps = constraints, taps
        self._sums = constraints.multipliers.new_zeros(len(taps) + 1)

    @torch.no_grad()
    def add(self, losses: Tensor, count: Tensor) -> None:
        """Add the mean losses of one micro-batch, and their count."""
        self._sums[:-1].add_(losses.to(self._sums.dtype) * count)
        self._sums[-1].add_(count)

    def take(self, prefix: str = "", *, multipliers: bool = False) -> tuple[dict[str, float], int]:
        """Return the entries to log, named by the depth, and the number of items, and start anew: mean losses over all
        ranks, violations, maybe multipliers, and feasibility. Every rank must call this; it waits for the GPU."""
        sums = sum_over_ranks(self._sums.clone())
        self._sums.zero_()
        losses = sums[:-1] / sums[-1]
        report = self._constraints.report(losses)
        columns: dict[str, Sequence[float | None]] = {"layer_loss": losses.tolist(), "violation": report.violation}
        if report.bound_violation:
            columns["bound_violation"] = report.bound_violation
        if multipliers:
            columns["multiplier"] = self._constraints.multipliers.tolist()
            if (pressing := self._constraints.bound_multipliers) is not None:
                columns["bound_multiplier"] = pressing.tolist()
        entries = {
            f"{prefix}{name}_{depth}": value
            for name, values in columns.items()
            for depth, value in zip(self._taps, values, strict=True)
            if value is not None
        }
        return {**entries, f"{prefix}feasible": float(report.feasible)}, int(sums[-1].item())


def measured(layer_losses: LayerLosses, constraints: DescentConstraints) -> tuple[Tensor, Tensor]:
    """Return the losses of the last forward and their count, on the device of the constraints: a model split over
    devices has its head on another one."""
    assert layer_losses.measured is not None
    losses, count = layer_losses.measured
    return losses.to(constraints.device, non_blocking=True), count.to(constraints.device, non_blocking=True)
