"""The rules that move the multipliers: ascent and Adam.

Each proposes from λ, the error e and the decay κλ (docs/constraints.md §3), and is at rest where e = κλ. A rule is a
pure function of tensors: `DualVariables` projects its proposal and commits it, with the rule's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

# As in torch.optim.Adam: it keeps the step finite where the gradient has always been zero.
ADAM_EPSILON = 1e-8

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
