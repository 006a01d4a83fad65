"""Cooper as the oracle of objectives, couplings and bounds: each written out as a Lagrangian.

What has no gradient, or whose gradient is not taken, is a strict violation there, with the proxy beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cooper
import pytest
import torch
from torch import Tensor

from cdt_fast.constraints.descent import DescentConstraints

LAYERS, SAMPLES, STEPS = 3, 16, 200
RATES, REFERENCE = [0.3, 0.02, 0.4], 0.9
PRIMAL_LR, DUAL_LR = 0.02, 0.05
KEPT = torch.tensor([1 - rate for rate in RATES], dtype=torch.float64)
COEFFICIENTS = [0.5, 0.0, 2.0, 1.0]


class Chain(torch.nn.Module):
    """Losses of 16 samples at four depths, none at its minimum where another is."""

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


# A problem: step, losses [4, 16], their average before the step -> objective, violations with a gradient, true ones.
Problem = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def chain(losses: Tensor, kept: Tensor = KEPT, detach: bool = False) -> Tensor:
    before = losses[:-1].detach() if detach else losses[:-1]
    return torch.cat([losses[:1] - REFERENCE, losses[1:] - kept * before])


def plain(step: int, losses: Tensor, average: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    violations = chain(losses.mean(1))
    return losses.mean(1)[-1], violations, violations.detach()


def of_depths(step: int, losses: Tensor, average: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, violations, true = plain(step, losses, average)
    return torch.tensor(COEFFICIENTS, dtype=torch.float64) @ losses.mean(1), violations, true


def of_logarithms(step: int, losses: Tensor, average: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, violations, true = plain(step, losses, average)
    # The gradient of the logarithm at the average: that of Σ c ā_L ℓ / ā.
    weights = torch.tensor(COEFFICIENTS, dtype=torch.float64) * (average[-1] / average if average.any() else 1.0)
    return weights @ losses.mean(1), violations, true


def detached(step: int, losses: Tensor, average: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    violations = chain(losses.mean(1), detach=True)
    return losses.mean(1)[-1], violations, violations.detach()


def absolute(step: int, losses: Tensor, average: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bounds = REFERENCE * torch.cat([torch.ones(1, dtype=torch.float64), KEPT]).cumprod(0)
    violations = losses.mean(1) - bounds
    return losses.mean(1)[-1], violations, violations.detach()


def with_bounds(step: int, losses: Tensor, average: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, violations, _ = plain(step, losses, average)
    means = losses.mean(1)
    bounds = torch.stack([means[1] - 0.7, means[3] - 1.01 * 0.5])
    violations = torch.cat([violations, bounds])
    return means[-1], violations, violations.detach()


BOUNDS = {"bounds": {1: 0.7, 3: "1.01x"}, "reference_losses": [1.0, 0.8, 0.6, 0.5]}
# The problem, our options, and where its constraints are among our multipliers.
FORMULATIONS: dict[str, tuple[Problem, dict[str, Any], list[int]]] = {
    "depths": (of_depths, {"objective": "depths", "coefficients": COEFFICIENTS}, [0, 1, 2, 3]),
    "log": (of_logarithms, {"objective": "log", "coefficients": COEFFICIENTS}, [0, 1, 2, 3]),
    "detach": (detached, {"coupling": "detach"}, [0, 1, 2, 3]),
    "absolute": (absolute, {"coupling": "absolute"}, [0, 1, 2, 3]),
    "bounds": (with_bounds, BOUNDS, [0, 1, 2, 3, 5, 7]),
}


class Written(cooper.ConstrainedMinimizationProblem):
    def __init__(self, model: Chain, problem: Problem, constraints: int) -> None:
        super().__init__()
        self.model, self.problem, self.step = model, problem, 0
        self.average = torch.zeros(LAYERS + 1, dtype=torch.float64)
        self.multiplier = cooper.multipliers.DenseMultiplier(num_constraints=constraints, dtype=torch.float64)
        self.constraint = cooper.Constraint(cooper.ConstraintType.INEQUALITY, multiplier=self.multiplier)

    def compute_cmp_state(self) -> cooper.CMPState:
        losses = self.model.losses()
        objective, proxies, true = self.problem(self.step, losses, self.average)
        self.step += 1
        with torch.no_grad():
            self.average += (losses.mean(1) - self.average) / min(self.step, 10)
        state = cooper.ConstraintState(violation=proxies, strict_violation=true)
        return cooper.CMPState(objective, {self.constraint: state})


@pytest.mark.parametrize("name", FORMULATIONS)
@pytest.mark.parametrize("dual", ["ascent", "adam"])
def test_trajectory_is_coopers(name: str, dual: Any) -> None:
    problem, options, places = FORMULATIONS[name]
    theirs, ours = Chain(), Chain()
    written = Written(theirs, problem, len(places))
    parameters = list(written.multiplier.parameters())
    dual_optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, lr=DUAL_LR, maximize=True)
        if dual == "ascent"
        else torch.optim.Adam(parameters, lr=DUAL_LR, betas=(0.0, 0.9), maximize=True)
    )
    simultaneous = cooper.optim.SimultaneousOptimizer(
        cmp=written,
        primal_optimizers=torch.optim.SGD(theirs.parameters(), lr=PRIMAL_LR),
        dual_optimizers=dual_optimizer,
    )
    raw: dict[str, Any] = {"dual_lr": DUAL_LR, "resilience": None, "normalize": False, "margin": 0.0, **options}
    constraints = DescentConstraints(
        LAYERS, RATES, REFERENCE, **{"coupling": "chain", "reference_mode": "constraint", "dual": dual, **raw}
    )
    optimizer = torch.optim.SGD(ours.parameters(), lr=PRIMAL_LR)

    start, moved = ours.vector(), torch.zeros(len(places), dtype=torch.bool)
    for step in range(STEPS):
        simultaneous.roll()

        losses = ours.losses()
        optimizer.zero_grad()
        (constraints.weights() @ losses.mean(1)).backward()
        for part in (losses[:, :5], losses[:, 5:]):  # two micro-batches, of unequal size
            constraints.record(part.detach().mean(1), part.shape[1])
        optimizer.step()
        constraints.step()

        multipliers = constraints._duals.tensors["multipliers"]
        torch.testing.assert_close(ours.vector(), theirs.vector(), rtol=0, atol=1e-12, msg=f"step {step}")
        torch.testing.assert_close(
            multipliers[places], written.multiplier.weight.detach(), rtol=0, atol=1e-12, msg=f"step {step}"
        )
        assert not multipliers[[place for place in range(len(multipliers)) if place not in places]].any()
        moved |= multipliers[places] > 0
    # The problem has to be one where something happens.
    assert (ours.vector() - start).abs().max() > 0.1
    assert moved.sum() >= len(places) - 1, moved
