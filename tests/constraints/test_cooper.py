"""Cooper as the oracle: the same training, step for step, each formulation written out as a Lagrangian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cooper
import pytest
import torch
from torch import Tensor

from cdt_fast.constraints.constraints import DescentConstraints

LAYERS, SAMPLES, STEPS = 3, 16, 200
RATES, REFERENCE = [0.3, 0.02, 0.4], 0.9
PRIMAL_LR, DUAL_LR, SLACK_COST, BETAS = 0.02, 0.05, 2.0, (0.5, 0.9)
KEPT = torch.tensor([1 - rate for rate in RATES], dtype=torch.float64)
COEFFICIENTS = [0.5, 0.0, 2.0, 1.0]


class Chain(torch.nn.Module):
    """Losses of 16 samples at four depths, none at its minimum where another is; the rates cannot all be met."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5, dtype=torch.float64) for _ in range(LAYERS + 1))
        self.inputs, self.target = torch.randn(2, SAMPLES, 5, dtype=torch.float64)

    def losses(self) -> Tensor:
        hidden, losses = self.inputs, []
        for layer in self.layers:
            hidden = hidden + 0.3 * layer(hidden).tanh()
            losses.append((hidden - self.target).square().mean(1))
        return torch.stack(losses)

    def vector(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])


# Objectives and violations of mean losses and their average before the step.


def last(losses: Tensor, average: Tensor) -> Tensor:
    return losses[-1]


def of_depths(losses: Tensor, average: Tensor) -> Tensor:
    return torch.tensor(COEFFICIENTS, dtype=torch.float64) @ losses


def of_logarithms(losses: Tensor, average: Tensor) -> Tensor:
    """The gradient of the logarithm at the average: that of Σ c ā_L ℓ / ā."""
    ratio = average[-1] / average if average.any() else 1.0
    return (torch.tensor(COEFFICIENTS, dtype=torch.float64) * ratio) @ losses


def chain(losses: Tensor) -> Tensor:
    return torch.cat([losses[:1] - REFERENCE, losses[1:] - KEPT * losses[:-1]])


def with_margin(losses: Tensor) -> Tensor:
    return torch.cat([losses[:1] - 0.9 * REFERENCE, losses[1:] - 0.9 * KEPT * losses[:-1]])


def detached(losses: Tensor) -> Tensor:
    return torch.cat([losses[:1] - REFERENCE, losses[1:] - KEPT * losses[:-1].detach()])


def with_free_input(losses: Tensor) -> Tensor:
    return torch.cat([losses[:1] - REFERENCE, chain(losses)[1:2], detached(losses)[2:]])


def anchored(losses: Tensor) -> Tensor:
    return torch.cat([losses[1:2] - KEPT[0] * REFERENCE, losses[2:] - KEPT[1:] * losses[1:-1]])


def absolute(losses: Tensor) -> Tensor:
    return losses - REFERENCE * torch.cat([torch.ones(1, dtype=torch.float64), KEPT]).cumprod(0)


def usual(losses: Tensor) -> Tensor:
    """With anchor, detach and margin."""
    return torch.cat([losses[1:2] - 0.9 * KEPT[0] * REFERENCE, losses[2:] - 0.9 * KEPT[1:] * losses[1:-1].detach()])


def with_bounds(losses: Tensor) -> Tensor:
    return torch.cat([chain(losses), torch.stack([losses[1] - 0.7, losses[3] - 1.01 * 0.5])])


def scales(losses: Tensor) -> Tensor:
    """What the dual steps on relative violations of the chain divide by."""
    return torch.cat([torch.full((1,), REFERENCE, dtype=torch.float64), losses[:-1]])


class Formulation(NamedTuple):
    objective: Callable[[Tensor, Tensor], Tensor]
    violations: Callable[[Tensor], Tensor]
    options: dict[str, Any]
    places: list[int]  # where its constraints are among our multipliers


ALL, DECAY, RELATIVE = list(range(LAYERS + 1)), {"resilience": "decay"}, {"normalize": True}
BOUNDS = {"bounds": {1: 0.7, 3: 0.505}}
FORMULATIONS = {
    "chain": Formulation(last, chain, {}, ALL),
    "normalize": Formulation(last, chain, RELATIVE, ALL),
    "margin": Formulation(last, with_margin, {"margin": 0.1}, ALL),
    "decay": Formulation(last, chain, DECAY, ALL),
    "slack": Formulation(last, chain, {"resilience": "slack"}, ALL),
    "depths": Formulation(of_depths, chain, {"objective": "depths", "coefficients": COEFFICIENTS}, ALL),
    "log": Formulation(of_logarithms, chain, {"objective": "log", "coefficients": COEFFICIENTS}, ALL),
    "detach": Formulation(last, detached, {"coupling": "detach"}, ALL),
    "input": Formulation(last, with_free_input, {"coupling": "input"}, ALL),
    "anchor": Formulation(last, anchored, {"reference_mode": "anchor"}, [1, 2, 3]),
    "absolute": Formulation(last, absolute, {"coupling": "absolute"}, ALL),
    "usual": Formulation(last, usual, {"coupling": "detach", "reference_mode": "anchor", "margin": 0.1}, [1, 2, 3]),
    "low absolute": Formulation(
        last, lambda x: 0.1 * x + 0.9 * absolute(x), {"coupling": "absolute", "margin": 0.1}, ALL
    ),
    "bounds": Formulation(last, with_bounds, BOUNDS, [0, 1, 2, 3, 5, 7]),
}


class Written(cooper.ConstrainedMinimizationProblem):
    """The formulation, each violation less its slack, whose cost is part of the loss, or less the decay λ/β."""

    def __init__(self, model: Chain, formulation: Formulation, slacks: Tensor) -> None:
        super().__init__()
        self.model, self.formulation, self.slacks, self.steps = model, formulation, slacks, 0
        self.average = torch.zeros(LAYERS + 1, dtype=torch.float64)
        size = len(formulation.places)
        self.multiplier = cooper.multipliers.DenseMultiplier(num_constraints=size, dtype=torch.float64)
        self.constraint = cooper.Constraint(cooper.ConstraintType.INEQUALITY, multiplier=self.multiplier)

    def compute_cmp_state(self) -> cooper.CMPState:
        losses = self.model.losses().mean(1)
        objective = self.formulation.objective(losses, self.average)
        self.steps += 1
        with torch.no_grad():
            self.average += (losses - self.average) / min(self.steps, 10)
        violation = self.formulation.violations(losses) - self.slacks
        decay = self.multiplier.weight.detach() / SLACK_COST if self.formulation.options == DECAY else 0.0
        scale = scales(losses.detach()) if self.formulation.options == RELATIVE else 1.0
        state = cooper.ConstraintState(violation=violation, strict_violation=violation.detach() / scale - decay)
        return cooper.CMPState(objective + SLACK_COST / 2 * self.slacks.square().sum(), {self.constraint: state})


@pytest.mark.parametrize("name", FORMULATIONS)
@pytest.mark.parametrize("dual", ["ascent", "adam"])
def test_trajectory_is_coopers(name: str, dual: str) -> None:
    formulation = FORMULATIONS[name]
    theirs, ours = Chain(), Chain()
    slacks = torch.nn.Parameter(
        torch.zeros(len(formulation.places), dtype=torch.float64), requires_grad=name == "slack"
    )
    written = Written(theirs, formulation, slacks)
    primal_optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(theirs.parameters(), lr=PRIMAL_LR)]
    if name == "slack":
        primal_optimizers.append(torch.optim.SGD([slacks], lr=0.1 / SLACK_COST))
    multipliers = list(written.multiplier.parameters())
    simultaneous = cooper.optim.SimultaneousOptimizer(
        cmp=written,
        primal_optimizers=primal_optimizers,
        dual_optimizers=torch.optim.SGD(multipliers, lr=DUAL_LR, maximize=True)
        if dual == "ascent"
        else torch.optim.Adam(multipliers, lr=DUAL_LR, betas=BETAS, maximize=True),
    )
    options: dict[str, Any] = {"coupling": "chain", "reference_mode": "constraint", "resilience": None}
    options |= {"normalize": False, "margin": 0.0, "slack_cost": SLACK_COST, "dual_lr": DUAL_LR}
    options |= {"betas": None if dual == "ascent" else BETAS, **formulation.options}
    constraints = DescentConstraints(LAYERS, RATES, REFERENCE, **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=PRIMAL_LR)

    start, moved, projected = ours.vector(), torch.zeros(len(formulation.places), dtype=torch.bool), False
    for _ in range(100 if name == "decay" else STEPS):  # at rest Adam divides rounding errors by nearly nothing
        simultaneous.roll()
        slacks.data.clamp_(min=0)

        losses = ours.losses()
        optimizer.zero_grad()
        (constraints.weights() @ losses.mean(1)).backward()
        for part in (losses[:, :5], losses[:, 5:]):  # two micro-batches, of unequal size
            constraints.record(part.detach().mean(1), part.shape[1])
        optimizer.step()
        constraints.step()

        found, found_slacks, *_ = constraints.duals.state
        expected, expected_slacks = torch.zeros(2, len(found), dtype=torch.float64)
        expected[formulation.places] = written.multiplier.weight.detach()
        expected_slacks[formulation.places] = slacks.detach()
        exact: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
        torch.testing.assert_close(ours.vector(), theirs.vector(), **exact)
        torch.testing.assert_close(found, expected, **exact)
        torch.testing.assert_close(found_slacks, expected_slacks, **exact)
        moved |= found[formulation.places] > 0
        projected |= bool((found[formulation.places] == 0).any())
    # The problem has to be one where something happens: parameters and multipliers move, and a projection is active.
    assert (ours.vector() - start).abs().max() > 0.1
    assert moved.sum() >= len(formulation.places) - 1, moved
    assert projected or name != "chain"
    assert name != "slack" or slacks.max() > 0.01
