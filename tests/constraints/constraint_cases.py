"""Constraints with raw violations, losses to feed them, and a probe for host synchronization."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdt_fast.constraints.descent import DescentConstraints

# The chain, violations as they are, no margin, no reference: what the formulas below are written for.
RAW: dict[str, Any] = {
    "objective": "last",
    "coupling": "chain",
    "reference_mode": "constraint",
    "rate": 0.05,
    "reference": None,
    "dual_lr": 0.01,
    "betas": (0.0, 0.999),
    "slack_cost": 1.0,
    "normalize": False,
    "margin": 0.0,
}


# Every way from violations to weights.
WAYS: dict[str, dict[str, Any]] = {
    "-".join(map(str, way)): dict(zip(("dual", "resilience", "coupling", "reference_mode"), way, strict=True))
    for way in itertools.product(
        ("ascent", "adam"), ("slack", "decay", None), ("chain", "detach", "absolute"), ("constraint", "anchor")
    )
}


def plain(layers: Any, *rate_and_reference: Any, **options: Any) -> DescentConstraints:
    """`DescentConstraints` whose defaults are those of `RAW`."""
    given = dict(zip(("rate", "reference"), rate_and_reference, strict=False))
    return DescentConstraints(layers, **{**RAW, **given, **options})


def feed(constraints: DescentConstraints, *losses: list[float]) -> None:
    """One step a list of mean losses."""
    for values in losses:
        constraints.record(torch.tensor(values, dtype=torch.float64), 4)
        constraints.step()


class NoHostSync(TorchDispatchMode):
    """Refuses what would make the host wait for a value on the device."""

    FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"host synchronization: {name}"
        return func(*args, **(kwargs or {}))


def random_losses() -> Iterator[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        count = int(torch.randint(1, 9, (), generator=generator))
        yield 1 + torch.rand(4, dtype=torch.float64, generator=generator), count


# The toy problem of docs/constraints.md §3: bounds of 1000 on three constraint functions + 1000, the objective last.


def run_toy(constraints: DescentConstraints, steps: int, *, feasible: bool = False) -> tuple[Tensor, Tensor]:
    """min ½‖x − (1, 2, 0)‖²  s.t.  x₁ ≤ −1, x₁ ≥ 1 (both left out if feasible), x₂ ≤ 1. Return x and the peak of λ."""
    target = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    point = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    peak = torch.zeros(4, dtype=torch.float64)
    for _ in range(steps):
        first, second, _ = point
        violations = torch.stack([first + 1, 1 - first, second - 1])
        if feasible:
            violations = violations * torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
        losses = torch.cat([violations + 1000, 0.5 * (point - target).square().sum().view(1)])
        (gradient,) = torch.autograd.grad(constraints.weights() @ losses, point)
        with torch.no_grad():
            point -= 0.05 * gradient
        constraints.record(losses, 1)
        constraints.step()
        peak = torch.maximum(peak, constraints.multipliers)
    return point.detach(), peak


def toy_constraints(**options: Any) -> DescentConstraints:
    return plain(3, 0.0, 1000.0, coupling="absolute", slack_cost=0.5, **options)


TOY_POINT = torch.tensor([0.5, 5 / 3, 0.0], dtype=torch.float64)
TOY_MULTIPLIERS = torch.tensor([0.75, 0.25, 1 / 3, 0.0], dtype=torch.float64)
