"""Two processes that hold unequal shares of each batch against one process that holds it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdt_fast.constraints.constraints import DescentConstraints
from tests.ranks import in_ranks

SHARES = ((5, 1), (2, 6), (7, 3))  # items of the two ranks in the micro-batches of a step


# Descent alone, and with all that is measured besides the mean losses.
KINDS: list[dict[str, Any]] = [{}, {"objective": "log", "coupling": "detach", "bounds": {2: "0.9x"}, "betas": None}]


def make(kind: int) -> DescentConstraints:
    chain = {"coupling": "chain", "reference_mode": "constraint", "dual_lr": 0.05}
    return DescentConstraints(2, 0.1, "auto", **{**chain, **KINDS[kind]})


def items(step: int, micro_batch: int, rank: int) -> Tensor:
    """The losses of one rank's items, (items, 3), different for every argument."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    scale = torch.tensor([2.0, 2.1, 1.5], dtype=torch.float64) * (1 + rank)
    return scale + torch.rand(SHARES[micro_batch][rank], 3, dtype=torch.float64, generator=generator)


def train(kind: int, ranks: tuple[int, ...]) -> tuple[DescentConstraints, Tensor]:
    """Forty steps; return the multipliers after each, (40, 3) or (40, 6)."""
    constraints, history = make(kind), []
    for step in range(40):
        for micro_batch in range(len(SHARES)):
            losses = torch.cat([items(step, micro_batch, rank) for rank in ranks])
            constraints.record(losses.mean(0), len(losses))
        if step == 30:
            # One rank alone meets a NaN: all must skip, or they drift apart.
            broken = torch.full((3,), torch.nan if 1 in ranks else 1.0, dtype=torch.float64)
            constraints.record(broken, 1)
        constraints.step(update=step >= 3)
        history.append(constraints.duals.state[0].clone())
    return constraints, torch.stack(history)


def work(rank: int, folder: str) -> list[tuple[Tensor, ...]]:
    results = []
    for kind in range(len(KINDS)):
        constraints, history = train(kind, (rank,))
        results.append((history, constraints.reference_level, constraints.weights(), constraints.skipped_updates))
    return results


def test_two_processes_are_one(tmp_path: Path) -> None:
    for kind, (first, second) in enumerate(zip(*in_ranks(work, tmp_path), strict=True)):
        alone, history = train(kind, (0, 1))
        assert history[-1].max() > 0.1
        assert history[10, 1] > 0
        assert (history[-1].reshape(-1, 3).amax(1) > 0).all(), "a multiplier of each group moves"
        for shared, other in zip(first, second, strict=True):
            assert torch.equal(shared, other)
        torch.testing.assert_close(first[0], history, rtol=0, atol=1e-12)
        torch.testing.assert_close(first[1], alone.reference_level, rtol=0, atol=1e-12)
        torch.testing.assert_close(first[2], alone.weights(), rtol=0, atol=1e-12)
        assert int(first[3]) == 1
