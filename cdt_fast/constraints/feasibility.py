"""The verdict on losses: whether they satisfy the constraints, by how much, and where not."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cdt_fast.constraints.formulation import Violations
from cdt_fast.constraints.presets import REFERENCE_MEASUREMENTS

Kind = Literal["descent", "bound"]


@dataclass(frozen=True)
class FeasibilityReport:
    """The verdict on per-depth losses: do they satisfy the constraints? Depth 0 is the reference constraint.

    Attributes:
        feasible: at least one constraint was judged, all of them hold, and every loss is finite.
        violation: g_l for l = 0..L, in units of the loss, positive where violated; None where none is in force.
        relative_violation: g_l over |ℓ_{l−1}|, or over the reference or bound in its place.
        ratio: ℓ_l / ℓ_{l−1} for l = 1..L.
        worst_layer, worst_violation: the depth with the largest relative violation, and its value (negative: the
            margin that is left); None when no constraint was judged.
        worst_kind: whether that is a constraint of descent or a bound.
        bound_violation, relative_bound_violation: ℓ_k − b_k, and the same over |b_k|; empty without bounds.
        unjudged: how many constraints are not in force yet: the reference or the warm-up's loss is not known.
        depths: what the text and `worst_layer` call the depths.
        caveat: which layers miss their rate although all that was judged holds: a bound by the reference can be far
            above the loss of the layer's input.
    """

    feasible: bool
    finite: bool
    violation: list[float | None]
    relative_violation: list[float | None]
    ratio: list[float]
    worst_layer: int | None
    worst_violation: float | None
    worst_kind: Kind
    bound_violation: list[float | None]
    relative_bound_violation: list[float | None]
    unjudged: int
    depths: list[int]
    caveat: str

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
        every = self.relative_violation + self.relative_bound_violation
        judged = [relative for relative in every if relative is not None]
        depth, where = self.worst_layer, f"depth {self.worst_layer}"
        tightest, above = f"the bound of {where}", self.bound_violation
        if self.worst_kind == "descent":
            where = tightest = f"layer {depth}" if depth else "depth 0 (the reference)"
            above = self.violation
        size = f"{above[self.depths.index(depth)]:.4g} (relative violation {self.worst_violation:.2%})"
        worst = f"the worst: {where} is above its bound by {size}"
        total = len(judged) + self.unjudged
        if not self.feasible:
            violated = sum(relative > 0 for relative in judged)
            verb = "is" if violated == 1 else "are"
            return f"Infeasible: {violated} of {total} constraints {verb} violated; {worst}."
        held = f"the {total} bounds hold" if self.caveat else f"all {total} constraints hold"
        if self.unjudged:
            held = f"{len(judged)} of {total} constraints are judged, and hold"
        margin = f"the tightest, {tightest}, has {abs(self.worst_violation):.2%} to spare"
        return f"Feasible: {held}{self.caveat and f', but {self.caveat}'}; {margin}."


def judge(
    losses: Tensor, groups: list[Violations], chained: list[bool], rates: Any, total: int, depths: list[int]
) -> FeasibilityReport:
    """Judge losses `[L+1]` by the constraints of descent and the bounds, if there are any, of which there are `total`,
    in force or not yet. `chained` are the positions whose constraint is on the ratio to the previous depth."""
    absolute: dict[Kind, list[float | None]] = {"descent": [], "bound": []}
    relative: dict[Kind, list[float | None]] = {"descent": [], "bound": []}
    entries: list[tuple[float, Kind, int]] = []
    for kind, (violation, scale, active) in zip(absolute, groups, strict=False):
        shares = torch.where(violation == 0, 0.0, violation / scale)  # a bound of zero that is met exactly is 0/0
        rows = zip(violation.tolist(), shares.tolist(), active.tolist(), strict=True)
        for depth, (number, share, judged) in zip(depths, rows, strict=True):
            absolute[kind].append(number if judged else None)
            relative[kind].append(share if judged else None)
            if judged:
                entries.append((share, kind, depth))
    finite = bool(losses.isfinite().all())
    feasible = finite and bool(entries) and all(number <= 0 for number, *_ in entries)
    ratio: list[float] = (losses[1:] / losses[:-1]).tolist()
    # NaN is worse than any number.
    worst, kind, layer = max(entries, key=lambda one: (math.isnan(one[0]), one[0]), default=(None, "descent", None))
    layers = zip(depths[1:], chained[1:], ratio, rates or [math.nan] * len(ratio), strict=True)
    caveats = [
        f"layer {depth} multiplies the loss by {value:.5g} (its rate allows {1 - rate:.5g})"
        for depth, chain, value, rate in layers
        if feasible and not chain and value > 1 - rate
    ]
    return FeasibilityReport(
        feasible=feasible,
        finite=finite,
        violation=absolute["descent"],
        relative_violation=relative["descent"],
        ratio=ratio,
        worst_layer=layer,
        worst_violation=worst,
        worst_kind=kind,
        bound_violation=absolute["bound"],
        relative_bound_violation=relative["bound"],
        unjudged=total - len(entries),
        depths=depths,
        caveat=" and ".join(caveats),
    )


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
