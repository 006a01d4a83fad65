"""Constraints with raw violations, losses to feed them, and a probe for host synchronization."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdt_fast.constraints.constraints import DescentConstraints

# The chain, violations as they are, no margin, no reference: what the formulas of the tests are written for.
RAW: dict[str, Any] = {"objective": "last", "coupling": "chain", "normalize": False, "margin": 0.0}
RAW |= {"rate": 0.05, "reference": None, "reference_mode": "constraint"}
RAW |= {"dual_lr": 0.01, "betas": (0.0, 0.999), "slack_cost": 1.0}
COUPLINGS = ("chain", "detach", "absolute")
MODES = ("constraint", "anchor")
DUALS = {"ascent": None, "adam": (0.0, 0.999)}

# Every way from violations to weights, and every other formulation with what else it needs.
KINDS: dict[str, dict[str, Any]] = {
    "depths": {"objective": "depths", "coefficients": [0.5, 0.0, 2.0, 1.0]},
    "log": {"objective": "log"},
    "bounds": {"bounds": {1: 0.9, 3: 0.606}},
    "warm-up bounds": {"bounds": {3: "0.9x"}, "rate": None, "reference": None},
    **{
        f"{dual}-{resilience}-{coupling}-{mode}": {
            "betas": DUALS[dual],
            "resilience": resilience,
            "coupling": coupling,
            "reference_mode": mode,
        }
        for dual, resilience, coupling, mode in itertools.product(DUALS, ("slack", "decay", None), COUPLINGS, MODES)
    },
}
WARMUP = 4


def plain(layers: Any, *rate_and_reference: Any, **options: Any) -> DescentConstraints:
    """`DescentConstraints` whose defaults are those of `RAW`."""
    given = dict(zip(("rate", "reference"), rate_and_reference, strict=False))
    return DescentConstraints(layers, **{**RAW, **given, **options})


def make(kind: str) -> DescentConstraints:
    """The constraints of three layers of one of `KINDS`."""
    given: dict[str, Any] = {"rate": 0.2, "reference": "auto", "normalize": True, "dual_lr": 0.05}
    return plain(3, **{**given, **KINDS[kind]})


def feed(constraints: DescentConstraints, *losses: list[float]) -> None:
    """One step a list of mean losses."""
    for values in losses:
        constraints.record(torch.tensor(values, dtype=torch.float64), 4)
        constraints.step()


def step_on(constraints: DescentConstraints, number: int, *parts: tuple[Tensor, Any]) -> None:
    """Record micro-batches and take step `number`, of which the first few are a warm-up."""
    for losses, count in parts:
        constraints.record(losses, count)
    constraints.step(update=number >= WARMUP)


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mean losses of a step, `[4]`, falling with depth on the whole, and their number of items."""
    generator = torch.Generator().manual_seed(0)
    falling = torch.tensor([2.0, 1.7, 1.5, 1.4], dtype=torch.float64)
    for _ in range(steps):
        losses = falling * (0.7 + torch.rand(4, dtype=torch.float64, generator=generator))
        yield losses, torch.randint(1, 6, (), generator=generator)


class NoHostSync(TorchDispatchMode):
    """Refuses what would make the host wait for a value on the device."""

    READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.READS, f"host synchronization: {name}"
        return func(*args, **(kwargs or {}))
