"""Cooper as the oracle: the same training, step for step, from explicit chain constraints and its own optimizers."""

from __future__ import annotations

from typing import Any

import cooper
import pytest
import torch
from torch import Tensor

from cdt_fast.constraints.descent import DescentConstraints

LAYERS, STEPS = 3, 300
RATES, REFERENCE = [0.3, 0.02, 0.4], 0.9
PRIMAL_LR, DUAL_LR = 0.02, 0.05
SLACK_COST, SLACK_LR = 2.0, 0.1


class Chain(torch.nn.Module):
    """Four losses, none of them at its minimum where another is; the rates above cannot all be met."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5, dtype=torch.float64) for _ in range(LAYERS + 1))
        self.inputs, self.target = torch.randn(2, 16, 5, dtype=torch.float64)

    def losses(self) -> Tensor:
        hidden, losses = self.inputs, []
        for layer in self.layers:
            hidden = hidden + 0.3 * layer(hidden).tanh()
            losses.append((hidden - self.target).square().mean())
        return torch.stack(losses)

    def vector(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])


class ChainProblem(cooper.ConstrainedMinimizationProblem):
    """ℓ_L subject to ℓ_0 ≤ ε₀ and ℓ_l ≤ r_l ℓ_{l−1}, each violation less its slack, whose cost is part of the loss."""

    def __init__(self, model: Chain, slacks: Tensor) -> None:
        super().__init__()
        self.model, self.slacks = model, slacks
        self.multiplier = cooper.multipliers.DenseMultiplier(num_constraints=LAYERS + 1, dtype=torch.float64)
        self.chain = cooper.Constraint(cooper.ConstraintType.INEQUALITY, multiplier=self.multiplier)

    def compute_cmp_state(self) -> cooper.CMPState:
        losses = self.model.losses()
        violations = [losses[0] - REFERENCE]
        violations += [losses[layer] - (1 - RATES[layer - 1]) * losses[layer - 1] for layer in range(1, LAYERS + 1)]
        state = cooper.ConstraintState(violation=torch.stack(violations) - self.slacks)
        return cooper.CMPState(losses[-1] + SLACK_COST / 2 * self.slacks.square().sum(), {self.chain: state})


def dual_optimizer(dual: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if dual == "ascent":
        return torch.optim.SGD(parameters, lr=DUAL_LR, maximize=True)
    return torch.optim.Adam(parameters, lr=DUAL_LR, betas=(0.0, 0.9), maximize=True)


@pytest.mark.parametrize("dual", ["ascent", "adam"])
@pytest.mark.parametrize("resilience", [None, "slack"])
def test_trajectory_is_coopers(dual: Any, resilience: Any) -> None:
    theirs, ours = Chain(), Chain()
    slacks = torch.nn.Parameter(torch.zeros(LAYERS + 1, dtype=torch.float64))
    problem = ChainProblem(theirs, slacks if resilience == "slack" else slacks.detach())
    primal_optimizers = [torch.optim.SGD(theirs.parameters(), lr=PRIMAL_LR)]
    if resilience == "slack":
        primal_optimizers.append(torch.optim.SGD([slacks], lr=SLACK_LR))
    simultaneous = cooper.optim.SimultaneousOptimizer(
        cmp=problem,
        primal_optimizers=primal_optimizers,
        dual_optimizers=dual_optimizer(dual, list(problem.multiplier.parameters())),
    )
    options: dict[str, Any] = {"slack_cost": SLACK_COST, "slack_lr": SLACK_LR, "normalize": False, "margin": 0.0}
    constraints = DescentConstraints(
        LAYERS,
        RATES,
        REFERENCE,
        coupling="chain",
        reference_mode="constraint",
        dual=dual,
        dual_lr=DUAL_LR,
        resilience=resilience,
        **options,
    )
    optimizer = torch.optim.SGD(ours.parameters(), lr=PRIMAL_LR)

    start = ours.vector()
    projected = torch.zeros(LAYERS + 1, dtype=torch.bool)
    for step in range(STEPS):
        simultaneous.roll()
        slacks.data.clamp_(min=0)

        losses = ours.losses()
        optimizer.zero_grad()
        (constraints.weights() @ losses).backward()
        constraints.record(losses, 7)
        optimizer.step()
        constraints.step()

        message = f"step {step}"
        torch.testing.assert_close(ours.vector(), theirs.vector(), rtol=0, atol=1e-12, msg=message)
        torch.testing.assert_close(
            constraints.multipliers, problem.multiplier.weight.detach(), rtol=0, atol=1e-12, msg=message
        )
        torch.testing.assert_close(constraints.slacks, slacks.detach(), rtol=0, atol=1e-12, msg=message)
        projected |= constraints.multipliers == 0
    # The problem has to be one where something happens: parameters and multipliers move, and a projection is active.
    assert (ours.vector() - start).abs().max() > 0.1
    assert constraints.multipliers.max() > 0.5
    assert projected.any()
