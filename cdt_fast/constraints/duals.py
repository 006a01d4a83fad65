"""The dual player: multipliers λ ≥ 0 and slacks u ≥ 0, moved by gradient ascent or Adam (docs/constraints.md §3)."""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError, check_choice, check_fraction, check_positive
from cdt_fast.constraints.presets import DUAL_LR, OTHER_DUAL_LR, DescentOptions, Resilience

# As in torch.optim.Adam: it keeps the step finite where the gradient has always been zero.
ADAM_EPSILON = 1e-8
# A slack closes a tenth of its distance to λ/β a step, faster than a multiplier moves: the pair does not oscillate.
SLACK_RELAXATION = 0.1


class DualVariables(nn.Module):
    """λ and u of some constraints, the first two rows of `state`, and the moments of Adam."""

    def __init__(self, size: int, options: DescentOptions) -> None:
        super().__init__()
        self.betas = options.betas
        if self.betas is not None:
            if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
                raise InputError(f"betas must be two numbers in [0, 1), or None for ascent, got {self.betas!r}")
            first, second = (check_fraction(f"betas[{index}]", beta) for index, beta in enumerate(self.betas))
            self.betas = first, second
        default = DUAL_LR if self.betas is not None and options.objective == "last" else OTHER_DUAL_LR
        self.dual_lr = check_positive("dual_lr", default if options.dual_lr is None else options.dual_lr)
        self.resilience = check_choice("resilience", options.resilience, (*get_args(Resilience), None))
        self.slack_cost = check_positive("slack_cost", options.slack_cost)
        limit = (2 if self.resilience == "decay" else 1) * self.slack_cost
        if self.resilience is not None and self.betas is None and self.dual_lr >= limit:
            limited = f"2 × slack_cost = {limit:g}" if self.resilience == "decay" else f"slack_cost = {limit:g}"
            expected = f'less than {limited} with resilience="{self.resilience}" and ascent'
            raise InputError(f"dual_lr is {self.dual_lr!r}; expected {expected}, or the multipliers never come to rest")
        # Adam's rows: both moments, and the number of updates of each constraint, as some start late or are skipped.
        self.state = nn.Buffer(torch.zeros(2 if self.betas is None else 5, size, dtype=torch.float64))
        self.skipped_updates = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def update(self, violation: Tensor, active: Tensor, finite: Tensor) -> None:
        """Move λ and u of active constraints once, both from the values before, by a violation (all `[size]`). Unless
        the losses and every active proposal are finite nothing moves, and `skipped_updates` grows by one."""
        multipliers, slacks, *moments = self.state
        cost = self.slack_cost
        gradient = violation - slacks if self.resilience == "slack" else violation
        if self.resilience == "decay":
            # Inside the gradient that Adam normalizes: decoupled, as in AdamW, it leads to another point.
            gradient = gradient - multipliers / cost
        if self.betas is None:
            multipliers = multipliers + self.dual_lr * gradient
        else:
            (first_beta, second_beta), (first, second, updates) = self.betas, moments
            updates = updates + 1
            first = first_beta * first + (1 - first_beta) * gradient
            second = second_beta * second + (1 - second_beta) * gradient.square()
            mean = first / (1 - first_beta**updates)
            scale = (second / (1 - second_beta**updates)).sqrt() + ADAM_EPSILON
            multipliers, moments = multipliers + self.dual_lr * mean / scale, [first, second, updates]
        if self.resilience == "slack":
            slacks = slacks - SLACK_RELAXATION / cost * (cost * slacks - self.state[0])
        proposed = torch.stack([multipliers, slacks, *moments])
        # Judged before the projection, which would turn −∞ into a plausible zero.
        accepted = finite & (proposed.isfinite() | ~active).all()
        proposed[:2].clamp_(min=0)
        self.state.copy_(torch.where(active & accepted, proposed, self.state))
        self.skipped_updates.add_(~accepted)
