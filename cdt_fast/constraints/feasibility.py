"""The verdict on losses: whether they satisfy the constraints, by how much, where not, and what would be met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cdt_fast.constraints.presets import REFERENCE_MEASUREMENTS

Kind = Literal["descent", "bound"]


@dataclass(frozen=True)
class FeasibilityReport:
    """Whether per-depth losses satisfy the constraints. Depth 0 is the reference constraint.

    Attributes:
        feasible: every judged constraint holds within `tolerance`, every loss is finite, and at least one constraint
            was judged.
        finite: every loss is finite.
        violation: g_l for l = 0..L, in units of the loss, positive where violated; None where there is no constraint
            (or where its automatic reference is not fixed yet).
        relative_violation: g_l / |ℓ_{l−1}|; where the bound comes from the reference, g_l over |ε₀| (depth 0, and
            depth 1 of an anchor) or over |ε₀ ∏ r| (coupling "absolute"). None as in `violation`.
        ratio: ℓ_l / ℓ_{l−1} for l = 1..L.
        worst_layer: the depth with the largest relative violation, or None when no constraint was judged.
        worst_violation: the relative violation there; negative: how much is to spare.
        tolerance: the relative violation that still counts as feasible.
        worst_kind: which of its constraints that is: of descent, or a bound on its loss.
        bound_violation, relative_bound_violation: ℓ_k − b_k, and the same over |b_k|, for each depth; empty where there
            are no bounds.
        advice: where the worst constraint is violated, what to ask for in its place.
        unjudged: how many constraints are not in force yet, as the reference or the warm-up's loss that they need is
            not known.
        caveat: where all that is judged holds, which layers lower the loss by less than their rate all the same: the
            bound of those that the reference bounds can be far above the loss of their input.
    """

    feasible: bool
    finite: bool
    violation: list[float | None]
    relative_violation: list[float | None]
    ratio: list[float]
    worst_layer: int | None
    worst_violation: float | None
    tolerance: float
    worst_kind: Kind = "descent"
    bound_violation: list[float | None] = field(default_factory=list)
    relative_bound_violation: list[float | None] = field(default_factory=list)
    advice: str = ""
    unjudged: int = 0
    caveat: str = ""

    @property
    def judged(self) -> int:
        """How many constraints were judged."""
        return len(self._relative())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for `json.dump`. A number that is not finite becomes None: JSON cannot represent it."""
        return {name: _finite_or_none(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        if not self.finite:
            return "Infeasible: not every loss is finite."
        if self.worst_layer is None or self.worst_violation is None:
            if not self.unjudged:
                return "No verdict: there are no constraints."
            return (
                f"No verdict: none of the {self.unjudged} constraints is in force yet: they wait for the warm-up, or "
                f"for the {REFERENCE_MEASUREMENTS} measurements of an automatic reference."
            )
        judged = self._relative()
        total = len(judged) + self.unjudged
        if not self.feasible:
            violated = sum(relative > self.tolerance for relative in judged)
            advice = f"; {self.advice}" if self.advice else ""
            return (
                f"Infeasible: {violated} of {total} constraints {'is' if violated == 1 else 'are'} violated; "
                f"the worst: {self._excess()}{advice}."
            )
        if self.worst_violation > 0:
            margin = f"the worst: {self._excess()}, within the tolerance of {self.tolerance:.2%}"
        else:
            margin = f"the tightest, {self._where()}, has {abs(self.worst_violation):.2%} to spare"
        held = f"the {total} bounds hold" if self.caveat else f"all {total} constraints hold"
        if self.unjudged:
            held = f"{len(judged)} of {total} constraints are judged, and hold"
        return f"Feasible: {held}{self.caveat and f', but {self.caveat}'}; {margin}."

    def _relative(self) -> list[float]:
        parts = (self.relative_violation, self.relative_bound_violation)
        return [relative for part in parts for relative in part if relative is not None]

    def _where(self) -> str:
        if self.worst_kind == "bound":
            return f"the bound of depth {self.worst_layer}"
        return f"layer {self.worst_layer}" if self.worst_layer else "depth 0 (the reference)"

    def _excess(self) -> str:
        assert self.worst_layer is not None
        assert self.worst_violation is not None
        where, violations = self._where(), self.violation
        if self.worst_kind == "bound":
            where, violations = f"depth {self.worst_layer}", self.bound_violation
        absolute = violations[self.worst_layer]
        return f"{where} is above its bound by {absolute:.4g} (relative violation {self.worst_violation:.2%})"


class Group(NamedTuple):
    """Constraints of one kind, an entry a depth, each `[L+1]`.

    Attributes:
        kind: of descent (depth 0 is the reference), or bounds on losses.
        violation: positive where violated.
        scale: what makes it relative.
        active: which are in force, bool; the others have no meaning.
    """

    kind: Kind
    violation: Tensor
    scale: Tensor
    active: Tensor


def judge(
    losses: Tensor,
    groups: Sequence[Group],
    chained: Sequence[bool],
    rates: Tensor,
    tolerance: float,
    unjudged: int = 0,
) -> FeasibilityReport:
    """The verdict on losses.

    Args:
        losses: `[L+1]`.
        groups: of constraints, that of descent first.
        chained: of each depth 0..L, whether its constraint of descent is on the ratio to the depth before.
        rates: α of the layers, `[L]`; NaN: no constraint of descent.
        tolerance: the relative violation that still counts as feasible.
        unjudged: how many constraints are in no group's active entries yet.
    """
    absolute: dict[Kind, list[float | None]] = {}
    relative: dict[Kind, list[float | None]] = {}
    for kind, violation, scale, active in groups:
        # A bound of zero that is met exactly is 0/0.
        judged = torch.where(violation == 0, 0.0, violation / scale)
        for numbers, found in ((violation, absolute), (judged, relative)):
            found[kind] = [n if holds else None for n, holds in zip(numbers.tolist(), active.tolist(), strict=True)]
    entries: list[tuple[float, Kind, int]] = [
        (number, kind, depth)
        for kind, numbers in relative.items()
        for depth, number in enumerate(numbers)
        if number is not None
    ]
    finite = bool(losses.isfinite().all())
    feasible = finite and bool(entries) and all(number <= tolerance for number, *_ in entries)
    ratio: list[float] = (losses[1:] / losses[:-1]).tolist()
    worst_violation: float | None = None
    worst_kind: Kind = "descent"
    worst_layer: int | None = None
    advice = ""
    if entries:
        # NaN is worse than any number.
        worst_violation, worst_kind, worst_layer = max(entries, key=lambda entry: (math.isnan(entry[0]), entry[0]))
        if finite and not feasible:
            advice = _advice(worst_kind, worst_layer, losses.tolist(), ratio, chained[worst_layer], absolute)
    return FeasibilityReport(
        feasible=feasible,
        finite=finite,
        violation=absolute["descent"],
        relative_violation=relative["descent"],
        ratio=ratio,
        worst_layer=worst_layer,
        worst_violation=worst_violation,
        tolerance=tolerance,
        worst_kind=worst_kind,
        bound_violation=absolute.get("bound", []),
        relative_bound_violation=relative.get("bound", []),
        advice=advice,
        unjudged=unjudged,
        caveat=_caveat(ratio, rates.tolist(), chained, tolerance) if feasible else "",
    )


def _advice(
    kind: Kind,
    depth: int,
    losses: list[float],
    ratio: list[float],
    chained: bool,
    absolute: dict[Kind, list[float | None]],
) -> str:
    """What would be met where the worst constraint is not."""
    if kind == "bound":
        return f"a bound of {losses[depth]:.4g} would be met"
    if chained:
        if ratio[depth - 1] <= 1:
            return f"a rate of {math.floor(1000 * (1 - ratio[depth - 1])) / 1000:g} would be met at layer {depth}"
        return f"layer {depth} multiplies the loss by {ratio[depth - 1]:.3g}, so that no rate would be met there"
    return f"a reference of {losses[0]:.4g} would be met" if depth == 0 else "lower the rate, or raise the reference"


def _caveat(ratio: list[float], rates: list[float], chained: Sequence[bool], tolerance: float) -> str:
    """Which layers lower the loss by less than their rate; of a bound that is chained its violation says so."""
    above = [
        f"layer {layer} multiplies the loss by {value:.5g} (its rate allows {1 - rate:.5g})"
        for layer, (value, rate) in enumerate(zip(ratio, rates, strict=True), 1)
        if not chained[layer] and value > (1 - rate) * (1 + tolerance)
    ]
    return " and ".join(above)


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
