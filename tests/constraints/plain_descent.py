"""The descent constraints written down plainly, in float64 and loops over layers: what `DescentConstraints` is held to.

Made from what its docstrings say and docs/constraints.md, not from its code: no tensors, no groups, no state but lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Number = np.float64 | float
Vector = list[Number]


def vector(size: int) -> Vector:
    return [np.float64(0) for _ in range(size)]


class PlainDescent:
    """One model for all ranks. `options` are those of the constructor, each of them given."""

    def __init__(self, layers: int, options: dict[str, Any]) -> None:
        self.layers, self.options = layers, options
        self.depths = layers + 1
        kinds = ["descent", *(["bounds"] if options["bounds"] is not None else [])]
        self.multipliers = {kind: vector(self.depths) for kind in kinds}
        self.slacks = {kind: vector(self.depths) for kind in kinds}
        self.memory = {kind: [{} for _ in range(self.depths)] for kind in kinds}  # of the rule, for each multiplier
        self.skipped = 0
        self.recorded: list[tuple[np.ndarray, float]] = []
        self.measurements = 0
        self.level = options["reference"] if isinstance(options["reference"], float) else np.float64(0)
        self.averages = {name: (vector(self.depths), 0) for name in ("objective", "warm-up")}

    def record(self, losses: np.ndarray, count: float) -> None:
        self.recorded.append((losses, count))

    def step(self, update: bool = True) -> None:
        """End a step; without `update` it is one of a warm-up."""
        losses, self.recorded = self._measured(), []
        finite = bool(np.isfinite(losses).all())
        if self.options["reference"] == "auto" and self.measurements < 20 and finite:
            self.measurements += 1
            self.level += (losses[0] - self.level) / self.measurements
        if self.options["objective"] == "log":
            self._average("objective", losses)
        if not update and self._relative_bounds():
            self._average("warm-up", losses)
        if update:
            self._update(losses, finite)

    def epoch_end(self) -> None:
        self.slacks = {kind: vector(self.depths) for kind in self.slacks}

    def _relative_bounds(self) -> bool:
        given = self.options["bounds"] or {}
        return self.options["reference_losses"] is None and any(isinstance(bound, str) for bound in given.values())

    def _measured(self) -> np.ndarray:
        total, items = np.zeros(self.depths), np.float64(0)
        for losses, count in self.recorded:
            if count > 0:
                total = total + losses * count
                items += count
        return total / items

    def _average(self, name: str, losses: np.ndarray) -> None:
        average, number = self.averages[name]
        if np.isfinite(losses).all():
            number += 1
            average = [old + (loss - old) / min(number, 10) for old, loss in zip(average, losses, strict=True)]
        self.averages[name] = average, number

    # The constraints.

    def kept(self) -> list[float]:
        """r of each layer."""
        rate = self.options["rate"]
        numbers = [rate] * self.layers if isinstance(rate, float) else rate
        return [1 - number for number in numbers]

    def active(self) -> dict[str, list[bool]]:
        """Which constraints are in force."""
        rate, reference = self.options["rate"] is not None, self.options["reference"]
        known = isinstance(reference, float) or (reference == "auto" and self.measurements >= 20)
        anchored = self.options["reference_mode"] == "anchor"
        descent = [reference is not None and not anchored and known]
        for layer in range(1, self.depths):
            needs_reference = self.options["coupling"] == "absolute" or (anchored and layer == 1)
            descent.append(rate and (known or not needs_reference))
        given = self.options["bounds"] or {}
        bounds = []
        for depth in range(self.depths):
            waits = self._relative_bounds() and isinstance(given.get(depth), str)
            bounds.append(depth in given and not (waits and not self.averages["warm-up"][1]))
        return {"descent": descent, "bounds": bounds}

    def violations(self, losses: np.ndarray, training: bool) -> dict[str, list[tuple[Any, Any]]]:
        """Of each constraint the violation and its scale."""
        lowered = 1 - self.options["margin"] if training else 1.0
        level = np.float64(self.level) if self.options["reference"] is not None else np.float64("nan")
        descent = [(losses[0] - lowered * level, abs(level))]
        bound = level
        for layer in range(1, self.depths):
            if self.options["rate"] is None:
                descent.append((np.float64("nan"), np.float64("nan")))
                continue
            rate = self.kept()[layer - 1]
            bound = bound * rate
            if self.options["coupling"] == "absolute":
                descent.append((losses[layer] - lowered * bound, abs(bound)))
            elif layer == 1 and self.options["reference_mode"] == "anchor":
                descent.append((losses[1] - lowered * rate * level, abs(level)))
            else:
                descent.append((losses[layer] - lowered * rate * losses[layer - 1], abs(losses[layer - 1])))
        found = {"descent": descent}
        if "bounds" in self.multipliers:
            levels = [self._bound(depth) for depth in range(self.depths)]
            found["bounds"] = [(loss - level, abs(level)) for loss, level in zip(losses, levels, strict=True)]
        return found

    def _bound(self, depth: int) -> Number:
        bound = self.options["bounds"].get(depth, 0.0)
        if not isinstance(bound, str):
            return np.float64(bound)
        of = self.options["reference_losses"]
        return float(bound[:-1]) * np.float64(self.averages["warm-up"][0][depth] if of is None else of[depth])

    # The multipliers.

    def _update(self, losses: np.ndarray, finite: bool) -> None:
        active, found = self.active(), self.violations(losses, training=True)
        proposals: list[tuple[str, int, Number, Number, dict[str, Any]]] = []
        accepted = finite
        for kind, multipliers in self.multipliers.items():
            for depth in range(self.depths):
                if not active[kind][depth]:
                    continue
                violation, scale = found[kind][depth]
                if self.options["normalize"]:
                    violation = violation / scale
                multiplier, slack = multipliers[depth], self.slacks[kind][depth]
                cost = self.options["slack_cost"]
                error = violation - slack if self.options["resilience"] == "slack" else violation
                decay = multiplier / cost if self.options["resilience"] == "decay" else np.float64(0)
                proposal, memory = self._rule(multiplier, error, decay, dict(self.memory[kind][depth]))
                if self.options["resilience"] == "slack":
                    slack = slack - 0.1 / cost * (cost * slack - multiplier)
                accepted = accepted and bool(np.isfinite([error, proposal, slack, *memory.values()]).all())
                proposals.append((kind, depth, proposal, slack, memory))
        if not accepted:
            self.skipped += 1
            return
        for kind, depth, proposal, slack, memory in proposals:
            self.multipliers[kind][depth] = max(proposal, np.float64(0))
            self.slacks[kind][depth] = max(slack, np.float64(0))
            self.memory[kind][depth] = memory

    def _rule(self, multiplier: Any, error: Any, decay: Any, memory: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        options = self.options
        rate = options["dual_lr"]
        if options["betas"] is None:
            return multiplier + rate * (error - decay), {}
        first, second = options["betas"]
        number = memory.get("updates", 0) + 1
        mean = first * memory.get("mean", 0.0) + (1 - first) * (error - decay)
        square = second * memory.get("square", 0.0) + (1 - second) * (error - decay) ** 2
        change = mean / (1 - first**number) / (np.sqrt(square / (1 - second**number)) + 1e-8)
        return multiplier + rate * change, {"updates": number, "mean": mean, "square": square}

    # What comes out.

    def weights(self) -> Vector:
        own = self.multipliers["descent"]
        weights = []
        for depth, base in enumerate(self._objective_weights()):
            weight = base + own[depth]
            after = depth + 1
            anchored = after == 1 and self.options["reference_mode"] == "anchor"
            if after < self.depths and self.options["coupling"] == "chain" and not anchored:
                kept = self.kept()[depth] if self.options["rate"] is not None else 0.0
                weight -= (1 - self.options["margin"]) * kept * own[after]
            if "bounds" in self.multipliers:
                weight += self.multipliers["bounds"][depth]
            weights.append(weight)
        return weights

    def _objective_weights(self) -> Vector:
        coefficients = self._coefficients()
        if self.options["objective"] != "log":
            return [np.float64(number) for number in coefficients]
        average, number = self.averages["objective"]
        ratios = [average[-1] / one if number else np.float64(1) for one in average]
        return [c * (ratio if np.isfinite(ratio) else 1.0) for c, ratio in zip(coefficients, ratios, strict=True)]

    def _coefficients(self) -> list[float]:
        if self.options["objective"] == "last":
            return [0.0] * self.layers + [1.0]
        return self.options["coefficients"] or [1.0] * self.depths

    def merit(self, losses: np.ndarray) -> Number:
        coefficients = self._coefficients()
        if self.options["objective"] == "log":
            average, number = self.averages["objective"]
            terms = [c * np.log(loss) for c, loss in zip(coefficients, losses, strict=True) if c]
            merit = (average[-1] if number else 1.0) * sum(terms)
        else:
            merit = sum(c * loss for c, loss in zip(coefficients, losses, strict=True))
        active = self.active()
        for kind, entries in self.violations(losses, training=False).items():
            for holds, (violation, scale) in zip(active[kind], entries, strict=True):
                if holds and violation > 0:
                    merit += self.options["slack_cost"] / 2 * violation**2 / (scale if self.options["normalize"] else 1)
        return np.float64(merit)

    def judged(self, losses: np.ndarray) -> list[tuple[str, int, Any, Any]]:
        """Kind, depth, violation and relative violation of each constraint that is judged."""
        found, active = self.violations(losses, training=False), self.active()
        entries = []
        for kind, pairs in found.items():
            for depth, (violation, scale) in enumerate(pairs):
                if active[kind][depth]:
                    relative = violation / scale if violation != 0 else np.float64(0)
                    entries.append((kind, depth, violation, relative))
        return entries
