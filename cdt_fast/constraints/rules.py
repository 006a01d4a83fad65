"""The rules that move the multipliers: ascent, Adam, a PI controller, and penalty-barrier multipliers.

Each proposes from λ, the error e and the decay κλ (docs/maths.md §4), and is at rest where e = κλ. A rule is a pure
function of tensors: `DualVariables` projects its proposal and commits it, with the rule's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

# As in torch.optim.Adam: it keeps the step finite where the gradient has always been zero.
ADAM_EPSILON = 1e-8
# The gain of the PI controller grows after a period of this many updates in which the violation did not fall below
# this share of that of the period before.
GAIN_PERIOD, GAIN_SHARE = 50, 0.9
# Between these penalty-barrier multipliers stay: one at the lower end weighs next to nothing.
BARRIER_RANGE = (1e-4, 1e2)


State = dict[str, Tensor]


@dataclass(frozen=True)
class Rule(ABC):
    """What moves the multipliers. Its fields are its settings, all but `state_names`: the tensors that it carries, each
    of the shape of λ and zero at first."""

    state_names: ClassVar[tuple[str, ...]] = ()
    dual_lr: float

    @abstractmethod
    def propose(self, multipliers: Tensor, error: Tensor, decay: Tensor | float, state: State) -> tuple[Tensor, State]:
        """The next multipliers before projection, and the next state, of λ, e and κλ (0.0: none); nothing changes."""


class Ascent(Rule):
    """Gradient ascent, λ ← λ + η (e − κλ), with η = dual_lr."""

    def propose(self, multipliers: Tensor, error: Tensor, decay: Tensor | float, state: State) -> tuple[Tensor, State]:
        return multipliers + self.dual_lr * (error - decay), {}


@dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma and Ba, 2015), λ ← λ + η m̂ / (√v̂ + 10⁻⁸), with η = dual_lr; m̂ and v̂ follow e − κλ.

    The decay is part of the gradient that is normalized: decoupled, as in AdamW, it leads to another point.

    The updates are counted per multiplier, on the device: a constraint that becomes active late, or an update that
    was skipped, must not be taken for one with a gradient of zero, or the bias correction would be wrong.
    """

    state_names = ("first_moment", "second_moment", "updates")
    first_beta: float
    second_beta: float

    def propose(self, multipliers: Tensor, error: Tensor, decay: Tensor | float, state: State) -> tuple[Tensor, State]:
        gradient = error - decay
        updates = state["updates"] + 1
        first = self.first_beta * state["first_moment"] + (1 - self.first_beta) * gradient
        second = self.second_beta * state["second_moment"] + (1 - self.second_beta) * gradient.square()
        mean = first / (1 - self.first_beta**updates)
        scale = (second / (1 - self.second_beta**updates)).sqrt() + ADAM_EPSILON
        proposal = multipliers + self.dual_lr * mean / scale
        return proposal, {"first_moment": first, "second_moment": second, "updates": updates}


@dataclass(frozen=True)
class ProportionalIntegral(Rule):
    """The νPI controller (Sohrabi et al., 2024).

        λ ← λ + κ_i (e_t − κλ) + κ_p (ξ_t − ξ_{t−1}),     ξ_t = ν ξ_{t−1} + (1 − ν) e_t,     ξ_{−1} = 0

    with κ_i = dual_lr, κ_p = proportional_gain and ν = smoothing. Without projection and decay λ_t = κ_p ξ_t + κ_i Σ e:
    the proportional part answers a violation at once and lets go when the violation does, which damps the overshoot.
    The decay κλ stays out of ξ: there it would feed the last change of λ back into the next, which diverged at
    κ_p κ = 2.
    """

    state_names = ("smoothed_error",)
    proportional_gain: float
    smoothing: float

    def propose(self, multipliers: Tensor, error: Tensor, decay: Tensor | float, state: State) -> tuple[Tensor, State]:
        previous = state["smoothed_error"]
        smoothed = self.smoothing * previous + (1 - self.smoothing) * error
        proposal = multipliers + self.dual_lr * (error - decay) + self.gain(state) * (smoothed - previous)
        return proposal, {"smoothed_error": smoothed}

    def gain(self, state: State) -> Tensor | float:
        """κ_p."""
        return self.proportional_gain


@dataclass(frozen=True)
class ScheduledProportionalIntegral(ProportionalIntegral):
    """The controller with a proportional gain that grows while the violation does not fall.

    It is gradient descent-ascent on the augmented Lagrangian, with the violation of the step before in the place of
    the present one and κ_p as the coefficient of the penalty (Ramirez and Lacoste-Julien, 2025). So κ_p follows the
    schedule of that method. Over each period k of 50 updates v_k = Σ [e]₊, and at its end

        κ_p ← min(gain_growth κ_p, gain_limit)        where v_{k−1} > 0 and v_k > 0.9 v_{k−1}

    for each multiplier by itself.
    """

    state_names = ("smoothed_error", "gain_growths", "period_updates", "period_violation", "previous_violation")
    gain_growth: float
    gain_limit: float

    def propose(self, multipliers: Tensor, error: Tensor, decay: Tensor | float, state: State) -> tuple[Tensor, State]:
        proposal, after = super().propose(multipliers, error, decay, state)
        updates, violation = state["period_updates"] + 1, state["period_violation"] + error.clamp(min=0)
        before, over = state["previous_violation"], updates >= GAIN_PERIOD
        stays = over & (before > 0) & (violation > GAIN_SHARE * before)
        # No more growths than it takes to reach the limit: the power stays finite.
        grows = stays & (self.gain(state) < self.gain_limit)
        return proposal, {
            **after,
            "gain_growths": state["gain_growths"] + torch.where(grows, 1.0, 0.0),
            "period_updates": torch.where(over, 0.0, updates),
            "period_violation": torch.where(over, 0.0, violation),
            "previous_violation": torch.where(over, violation, before),
        }

    def gain(self, state: State) -> Tensor:
        """κ_p of each multiplier."""
        return (self.proportional_gain * self.gain_growth ** state["gain_growths"]).clamp(max=self.gain_limit)


@dataclass(frozen=True)
class PenaltyBarrier(Rule):
    """Penalty-barrier multipliers (Ben-Tal and Zibulevsky, 1997), which are multiplied and never reach zero.

        λ ← λ (1 + η (φ′((e − κλ) / p) − 1))        φ′(t) = 1 + t for t ≥ −1/2, else −1 / (4t)

    with η = dual_lr ≤ 1 and p = barrier_width. φ′ is the derivative of the quadratic-logarithmic penalty: a violation
    raises λ in proportion to itself, at most to the double of what η lets through, and a constraint with much to spare
    brings it down by nearly η an update. λ starts at 10⁻⁴ with the first update, below which it never falls, and stays
    below 100.
    """

    barrier_width: float

    def propose(self, multipliers: Tensor, error: Tensor, decay: Tensor | float, state: State) -> tuple[Tensor, State]:
        least, most = BARRIER_RANGE
        relative = (error - decay) / self.barrier_width
        # torch.where computes both branches: the second must not divide by zero.
        slope = torch.where(relative >= -0.5, 1 + relative, -0.25 / relative.clamp(max=-0.5)).clamp(max=2.0)
        started = multipliers.clamp(min=least)
        return (started * (1 + self.dual_lr * (slope - 1))).clamp(least, most), {}
