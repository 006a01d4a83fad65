"""The dual player: multipliers λ ≥ 0 and slacks u ≥ 0, and their update, which is that of `DescentConstraints`.

A rule proposes, `DualVariables.update` disposes: it projects the proposal and commits it, with the rule's state, only
where a constraint is active and only when everything is finite. So a rule is a pure function of tensors, and nothing
here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import get_args

import torch
from torch import Tensor

from cdt_fast.checks import check_choice, check_fraction, check_positive
from cdt_fast.constraints.presets import DUAL_LR, OTHER_DUAL_LR, DescentOptions, Resilience
from cdt_fast.constraints.rules import Adam, Ascent, Rule
from cdt_fast.errors import InputError

# The default slack_lr is this over slack_cost: a slack then closes a tenth of its distance to λ/β a step, faster than
# a multiplier moves at the default dual_lr, so that the pair does not oscillate.
SLACK_RELAXATION = 0.1


class DualAction(Enum):
    """What the end of an optimizer step asks of the duals. The host knows it from counting steps alone."""

    WAIT = "inside a window of steps: the sums add up"
    CLEAR = "warming up: forget the sums"
    MEASURE = "warming up: measure the reference, forget the sums"
    UPDATE = "move the multipliers, forget the sums"


class DualVariables:
    """λ and u of some constraints, and the state of the rule that moves λ.

    Attributes:
        tensors: by name, "multipliers", "slacks" and the rule's state, each (size,), and the scalar "skipped_updates".
            `update` writes them in place.
        settings: those that took effect, of the rule that was chosen alone.
        rule, resilience: as chosen.
        slack_cost, slack_lr: β and η_u.

    Raises:
        InputError: a setting is not valid.
    """

    def __init__(self, size: int, options: DescentOptions, dtype: torch.dtype) -> None:
        dual, dual_lr, betas = options.dual, options.dual_lr, options.betas
        if dual_lr is None:
            dual_lr = DUAL_LR if (dual, options.objective) == ("adam", "last") else OTHER_DUAL_LR
        # Every setting is checked, that of a rule that was not chosen too: a wrong one is a misunderstanding.
        dual_lr = check_positive("dual_lr", dual_lr)
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise InputError(f"betas must be two numbers in [0, 1), got {betas!r}")
        first_beta, second_beta = (check_fraction(f"betas[{index}]", beta) for index, beta in enumerate(betas))
        rules: dict[str, Rule] = {"ascent": Ascent(dual_lr), "adam": Adam(dual_lr, first_beta, second_beta)}
        self.rule = rules[check_choice("dual", dual, tuple(rules))]
        self.resilience = check_choice("resilience", options.resilience, (*get_args(Resilience), None))
        self.slack_cost = check_positive("slack_cost", options.slack_cost)
        given = SLACK_RELAXATION / self.slack_cost if options.slack_lr is None else options.slack_lr
        self.slack_lr = check_positive("slack_lr", given)
        if self.slack_lr * self.slack_cost >= 2:
            raise InputError(
                f"slack_lr is {given!r}; expected less than 2 / slack_cost = {2 / self.slack_cost:g}, "
                "or each step of a slack overshoots by more than the last"
            )
        if self.resilience == "decay" and dual == "ascent" and dual_lr >= 2 * self.slack_cost:
            raise InputError(
                f"dual_lr is {dual_lr!r}; expected less than 2 × slack_cost = {2 * self.slack_cost:g} "
                'with resilience="decay", or each step of the decay overshoots by more than the last'
            )
        self.settings: dict[str, int | float | str] = {
            "dual": dual,
            **asdict(self.rule),
            "resilience": self.resilience or "none",
            "slack_cost": self.slack_cost,
            "slack_lr": self.slack_lr,
        }
        names = ("multipliers", "slacks", *self.rule.state_names)
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
        error = violation - slacks if self.resilience == "slack" else violation
        decay = multipliers / self.slack_cost if self.resilience == "decay" else 0.0

        rule_state = {name: self.tensors[name] for name in self.rule.state_names}
        proposed_multipliers, proposals = self.rule.propose(multipliers, error, decay, rule_state)
        proposals["multipliers"] = proposed_multipliers
        if self.resilience == "slack":
            proposals["slacks"] = slacks - self.slack_lr * (self.slack_cost * slacks - multipliers)

        # Judged before the projection, which would turn −∞ into a plausible zero, as a rule may turn infinity into one.
        accepted = finite & (torch.stack([error, *proposals.values()]).isfinite() | ~active).all()
        for name, proposal in proposals.items():
            projected = proposal.clamp(min=0) if name in ("multipliers", "slacks") else proposal
            self.tensors[name].copy_(torch.where(active & accepted, projected, self.tensors[name]))
        self.tensors["skipped_updates"].add_(~accepted)
