"""The verdict on losses: whether they satisfy the constraints, by how much, and where they do not."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from cdt_fast.constraints.presets import REFERENCE_MEASUREMENTS


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
    """

    feasible: bool
    finite: bool
    violation: list[float | None]
    relative_violation: list[float | None]
    ratio: list[float]
    worst_layer: int | None
    worst_violation: float | None
    tolerance: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for `json.dump`. A number that is not finite becomes None: JSON has no word for it."""
        return {name: _finite_or_none(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        if not self.finite:
            return "Infeasible: not every loss is finite."
        if self.worst_layer is None or self.worst_violation is None:
            return (
                "No verdict: there is no constraint to judge by; one that needs an automatic reference has none until "
                f"its {REFERENCE_MEASUREMENTS} measurements are there."
            )
        where = f"layer {self.worst_layer}" if self.worst_layer else "depth 0 (the reference)"
        excess = (
            f"{where} is above its bound by {self.violation[self.worst_layer]:.4g} "
            f"(relative violation {self.worst_violation:.2%})"
        )
        judged = [relative for relative in self.relative_violation if relative is not None]
        if not self.feasible:
            violated = sum(relative > self.tolerance for relative in judged)
            return (
                f"Infeasible: {violated} of {len(judged)} constraints {'is' if violated == 1 else 'are'} violated; "
                f"the worst: {excess}{self._remedy()}."
            )
        if self.worst_violation > 0:
            margin = f"the worst: {excess}, within the tolerance of {self.tolerance:.2%}"
        else:
            margin = f"the tightest, {where}, has {abs(self.worst_violation):.2%} to spare"
        return f"Feasible: all {len(judged)} constraints hold; {margin}."

    def _remedy(self) -> str:
        """What the worst layer does, as the rate that it would meet."""
        ratio = self.ratio[self.worst_layer - 1] if self.worst_layer else math.nan
        if not math.isfinite(ratio):
            return ""
        if ratio >= 1:
            return f", as it multiplies the loss by {ratio:.3g}"
        return f", as it removes {1 - ratio:.1%} of the loss"


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
