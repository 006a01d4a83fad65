"""The dual player: multipliers λ ≥ 0, slacks u ≥ 0, and the rules that move them.

    λ ← [rule(λ, e, κλ)]₊        rule: ascent, Adam or a PI controller, all at rest where e = κλ
    u ← [u − η_u (β u − λ)]₊
    slack: e = g − u, κ = 0          decay: e = g, κ = 1/β          none: e = g, κ = 0, u = 0

A rule proposes, `DualVariables.update` disposes: it projects the proposal and commits it, with the rule's state, only
where a constraint is active and only when everything is finite. So a rule is a pure function of tensors, and nothing
here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import ClassVar, get_args

import torch
from torch import Tensor

from cdt_fast.checks import check_choice, check_fraction, check_non_negative, check_positive
from cdt_fast.constraints.presets import Dual, Resilience
from cdt_fast.errors import InputError

# As in torch.optim.Adam: it keeps the step finite where the gradient has always been zero.
ADAM_EPSILON = 1e-8


# The default slack_lr is this over slack_cost: a slack then closes a tenth of its distance to λ/β a step, faster than
# a multiplier moves at the default dual_lr, so that the pair does not oscillate.
SLACK_RELAXATION = 0.1


class DualAction(Enum):
    """What the end of an optimizer step asks of the duals. The host knows it from counting steps alone."""

    WAIT = "inside a window of steps: the sums add up"
    CLEAR = "warming up: forget the sums"
    MEASURE = "warming up: measure the reference, forget the sums"
    UPDATE = "move the multipliers, forget the sums"


@dataclass(frozen=True)
class Ascent:
    """Gradient ascent, λ ← λ + η (e − κλ), with η = dual_lr.

    This and the other rules: `state_names` names the tensors of shape (L+1,), zero at first, that the rule carries;
    `propose` takes λ, the error e and the decay κλ (0.0: none), returns the next multipliers before projection and
    the next state, and changes no argument. The fields are the settings of the rule.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    dual_lr: float

    def propose(
        self, multipliers: Tensor, error: Tensor, decay: Tensor | float, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return multipliers + self.dual_lr * (error - decay), {}


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015), λ ← λ + η m̂ / (√v̂ + 10⁻⁸), with η = dual_lr; m̂ and v̂ follow e − κλ.

    The decay is part of the gradient that is normalized: decoupled, as in AdamW, it leads to another point.

    The updates are counted per multiplier, on the device: a constraint that becomes active late, or an update that
    was skipped, must not be taken for one with a gradient of zero, or the bias correction would be wrong.
    """

    state_names: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment", "updates")
    dual_lr: float
    first_beta: float
    second_beta: float

    def propose(
        self, multipliers: Tensor, error: Tensor, decay: Tensor | float, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        gradient = error - decay
        updates = state["updates"] + 1
        first = self.first_beta * state["first_moment"] + (1 - self.first_beta) * gradient
        second = self.second_beta * state["second_moment"] + (1 - self.second_beta) * gradient.square()
        mean = first / (1 - self.first_beta**updates)
        scale = (second / (1 - self.second_beta**updates)).sqrt() + ADAM_EPSILON
        proposal = multipliers + self.dual_lr * mean / scale
        return proposal, {"first_moment": first, "second_moment": second, "updates": updates}


@dataclass(frozen=True)
class ProportionalIntegral:
    """The νPI controller (Sohrabi et al., 2024).

        λ ← λ + κ_i (e_t − κλ) + κ_p (ξ_t − ξ_{t−1}),     ξ_t = ν ξ_{t−1} + (1 − ν) e_t,     ξ_{−1} = 0

    with κ_i = dual_lr, κ_p = proportional_gain and ν = smoothing. Without projection and decay λ_t = κ_p ξ_t + κ_i Σ e:
    the proportional part answers a violation at once and lets go when the violation does, which damps the overshoot.
    The decay κλ stays out of ξ: there it would feed the last change of λ back into the next, which diverged at
    κ_p κ = 2.
    """

    state_names: ClassVar[tuple[str, ...]] = ("smoothed_error",)
    dual_lr: float
    proportional_gain: float
    smoothing: float

    def propose(
        self, multipliers: Tensor, error: Tensor, decay: Tensor | float, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        previous = state["smoothed_error"]
        smoothed = self.smoothing * previous + (1 - self.smoothing) * error
        proposal = multipliers + self.dual_lr * (error - decay) + self.proportional_gain * (smoothed - previous)
        return proposal, {"smoothed_error": smoothed}


class DualVariables:
    """λ and u of L+1 constraints, and the state of the rule that moves λ.

    Args:
        size: L+1.
        dtype: of every tensor but the counter.
        dual, dual_lr, betas, proportional_gain, smoothing, resilience, slack_cost, slack_lr: as in
            `cdt_fast.constraints.descent.DescentConstraints`.

    Attributes:
        tensors: by name, "multipliers", "slacks" and the rule's state, each (size,), and the scalar "skipped_updates".
            `update` writes them in place.
        settings: the settings that took effect, plain numbers and strings.

    Raises:
        InputError: a setting is not valid.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        *,
        dual: Dual,
        dual_lr: float,
        betas: Sequence[float],
        proportional_gain: float,
        smoothing: float,
        resilience: Resilience | None,
        slack_cost: float,
        slack_lr: float | None,
    ) -> None:
        # Every setting is checked, that of a rule that was not chosen too: a wrong one is a misunderstanding.
        dual_lr = check_positive("dual_lr", dual_lr)
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise InputError(f"betas must be two numbers in [0, 1), got {betas!r}")
        first_beta, second_beta = (check_fraction(f"betas[{index}]", beta) for index, beta in enumerate(betas))
        gain = check_non_negative("proportional_gain", proportional_gain)
        rules = {
            "ascent": Ascent(dual_lr),
            "adam": Adam(dual_lr, first_beta, second_beta),
            "pi": ProportionalIntegral(dual_lr, gain, check_fraction("smoothing", smoothing)),
        }
        self._rule = rules[check_choice("dual", dual, tuple(rules))]
        self._resilience = check_choice("resilience", resilience, (*get_args(Resilience), None))
        self._slack_cost = check_positive("slack_cost", slack_cost)
        if slack_lr is None:
            slack_lr = SLACK_RELAXATION / self._slack_cost
        self._slack_lr = check_positive("slack_lr", slack_lr)
        if self._slack_lr * self._slack_cost >= 2:
            raise InputError(
                f"slack_lr is {slack_lr!r}; expected less than 2 / slack_cost = {2 / self._slack_cost:g}, "
                "or each step of a slack overshoots by more than the last"
            )
        if resilience == "decay" and dual != "adam" and dual_lr >= 2 * self._slack_cost:
            raise InputError(
                f"dual_lr is {dual_lr!r}; expected less than 2 × slack_cost = {2 * self._slack_cost:g} "
                'with resilience="decay", or each step of the decay overshoots by more than the last'
            )
        self.settings: dict[str, int | float | str] = {
            "dual": dual,
            **asdict(self._rule),
            "resilience": resilience or "none",
            "slack_cost": self._slack_cost,
            "slack_lr": self._slack_lr,
        }
        names = ("multipliers", "slacks", *self._rule.state_names)
        self.tensors = {name: torch.zeros(size, dtype=dtype) for name in names}
        self.tensors["skipped_updates"] = torch.zeros((), dtype=torch.int64)

    def update(self, violation: Tensor, active: Tensor, finite: Tensor) -> None:
        """Move λ and u once, both from the values before the update.

        Args:
            violation: g, or the relative g, (size,).
            active: which constraints are in force, (size,) bool. The others keep their values.
            finite: whether the losses were finite, scalar bool. If not, or if an active proposal is not finite,
                nothing moves and "skipped_updates" grows by one.
        """
        multipliers, slacks = self.tensors["multipliers"], self.tensors["slacks"]
        error = violation - slacks if self._resilience == "slack" else violation
        decay = multipliers / self._slack_cost if self._resilience == "decay" else 0.0

        rule_state = {name: self.tensors[name] for name in self._rule.state_names}
        proposed_multipliers, proposals = self._rule.propose(multipliers, error, decay, rule_state)
        proposals["multipliers"] = proposed_multipliers
        if self._resilience == "slack":
            proposals["slacks"] = slacks - self._slack_lr * (self._slack_cost * slacks - multipliers)

        # Judged before the projection, which would turn −∞ into a plausible zero.
        accepted = finite & (torch.stack(list(proposals.values())).isfinite() | ~active).all()
        for name, proposal in proposals.items():
            projected = proposal.clamp(min=0) if name in ("multipliers", "slacks") else proposal
            self.tensors[name].copy_(torch.where(active & accepted, projected, self.tensors[name]))
        self.tensors["skipped_updates"].add_(~accepted)
