"""What the trainers share: the constraints of a model, the losses since the last log, and the state of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.constraints.presets import options_of
from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses import LayerLosses
from cdt_fast.models.layer_losses.targets import IGNORED

_WAITING = "accumulated"  # the one tensor of a DescentConstraints state that ranks do not share


def constraints_for(given: DescentConstraints | Mapping[str, Any], layer_losses: LayerLosses) -> DescentConstraints:
    """`given`, or the constraints made of it where it is a dictionary of options, which may name a `preset`.

    Raises:
        InputError: it is neither, names an option that there is not, or bounds an agreement.
    """
    if isinstance(given, Mapping):
        given = DescentConstraints(layer_losses.num_constraints, **options_of(**given))
    if not isinstance(given, DescentConstraints):
        raise InputError(
            f"constraints must be a DescentConstraints or a dictionary of its options, got {type(given).__name__}"
        )
    if given.agreement_multipliers is not None:
        raise InputError(
            "agreement needs predictions at every depth, which the fused losses do not form: bound the losses of "
            "those depths (bounds), or call record(…, agreement=…) in a loop of your own"
        )
    return given


def check_layers(constraints: DescentConstraints, layer_losses: LayerLosses) -> None:
    """Require one loss a depth that is read, and that it is the same in training and evaluation where it is judged."""
    if constraints.layers != layer_losses.num_constraints:
        raise InputError(
            f"constraints has layers = {constraints.layers}; expected {layer_losses.num_constraints}, as losses are "
            f"read at {layer_losses.num_constraints + 1} depths ({', '.join(map(str, layer_losses.taps))})"
        )
    constraints.check_inner_kl(layer_losses.inner_kl)


def items_in(layer_losses: LayerLosses, batch: Mapping[str, Any]) -> Tensor:
    """How many labels of a batch count, `[]`: the tokens or rows that the model's loss is a mean over.

    Raises:
        InputError: the batch has no labels.
    """
    shifted = batch.get("shift_labels")
    labels = batch.get("labels") if shifted is None else shifted
    if not isinstance(labels, Tensor):
        raise InputError(f"a batch must hold labels, as the losses of the depths need them; it holds {list(batch)}")
    if shifted is None and layer_losses.shifts_labels:
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()


def number_of_ranks() -> int:
    """Of the default group; 1 where torch.distributed does not run."""
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if running else 1


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """`tensor`, summed in place over the default group, if there is one; every rank must call this."""
    if number_of_ranks() > 1:
        torch.distributed.all_reduce(tensor)
    return tensor


class LossSums:
    """Sums of the losses and their count, on the device of the constraints; to add does not wait for it."""

    def __init__(self, constraints: DescentConstraints) -> None:
        multipliers = constraints.multipliers
        self._sums = multipliers.new_zeros(len(multipliers) + 1)

    @torch.no_grad()
    def add(self, losses: Tensor, count: Tensor) -> None:
        """The mean losses of one micro-batch and their count."""
        self._sums[:-1].add_(losses.to(self._sums.dtype) * count)
        self._sums[-1].add_(count)

    def take(self) -> tuple[Tensor, int]:
        """Mean losses over all ranks `[depths]` and their count; start anew. Every rank must call it; it waits."""
        sums = sum_over_ranks(self._sums.clone())
        self._sums.zero_()
        return sums[:-1] / sums[-1], int(sums[-1].item())


def entries_of(constraints: DescentConstraints, taps: Sequence[int], losses: Tensor) -> dict[str, float]:
    """The losses and what the constraints say of them, one number an entry, named by the depth. This waits."""
    report = constraints.report(losses)
    entries = {f"layer_loss_{depth}": loss for depth, loss in zip(taps, losses.tolist(), strict=True)}
    for depth, violation in zip(taps, report.violation, strict=True):
        if violation is not None:
            entries[f"violation_{depth}"] = violation
    return {**entries, "feasible": float(report.feasible)}


def multipliers_of(constraints: DescentConstraints, taps: Sequence[int]) -> dict[str, float]:
    """λ, one number an entry, named by the depth. This waits."""
    return {f"multiplier_{depth}": value for depth, value in zip(taps, constraints.multipliers.tolist(), strict=True)}


def shared_state(constraints: DescentConstraints) -> dict[str, Any]:
    """The state for one file, whichever rank writes it. Every rank must call this.

    Sums that wait inside a window of `dual_every` steps are each rank's own: they are summed.
    """
    state = constraints.state_dict()
    if state["window_steps"]:
        sum_over_ranks(state[_WAITING])
    return state


def load_shared_state(constraints: DescentConstraints, state: Mapping[str, Any]) -> None:
    """Restore what `shared_state` returned; sums that wait go to the first rank alone, to count once."""
    if number_of_ranks() > 1 and torch.distributed.get_rank() > 0:
        state = {**state, _WAITING: torch.zeros_like(state[_WAITING])}
    constraints.load_state_dict(state)
