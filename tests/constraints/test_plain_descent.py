"""`DescentConstraints` against a plain float64 model, by random sequences of what a training does with it."""

from __future__ import annotations

import random
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from cdt_fast.constraints.constraints import DescentConstraints
from tests.constraints.plain_descent import PlainDescent

USUAL = [0.25, 0.5, 0.8, 1.0, 1.3, 2.0, 7.0]
ODD = [0.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf")]


def drawn_options(chance: random.Random, layers: int) -> dict[str, Any]:
    """Options that go together, all of them given."""

    def choice(*values: Any) -> Any:
        return chance.choice(values)

    def numbers(count: int, *values: float) -> list[float]:
        return chance.choices(values, k=count)

    def depths(most: int) -> list[int]:
        return sorted(chance.sample(range(most + 1), chance.randint(1, most + 1)))

    given: dict[str, Any] = {
        "rate": choice(None, 0.1, 0.5, numbers(layers, 0.0, 0.05, 0.3)),
        "reference": choice(None, 0.9, 3.0, "auto", "auto"),
        "coupling": choice("chain", "detach", "absolute"),
        "reference_mode": choice("constraint", "anchor"),
        "objective": choice("last", "depths", "log"),
        "coefficients": None,
        "normalize": choice(True, False),
        "margin": choice(0.0, 0.1),
        "dual_lr": choice(0.05, 0.5),
        "betas": choice(None, (0.0, 0.9), (0.5, 0.999)),
        "resilience": choice("slack", "decay", None),
        "slack_cost": choice(1.0, 10.0),
        "bounds": None,
        "reference_losses": None,
    }
    if given["reference"] is None:
        given["reference_mode"] = "constraint"
        given["coupling"] = "chain" if given["coupling"] == "absolute" else given["coupling"]
    if given["objective"] != "last" and choice(True, False):
        given["coefficients"] = [*numbers(layers, 0.0, 0.5, 1.0, 3.0), 1.0]
    if choice(True, False):
        given["bounds"] = {depth: choice(0.5, 1.5, "1.01x", "0.5x") for depth in depths(layers)}
        if choice(True, False) and any(isinstance(bound, str) for bound in given["bounds"].values()):
            given["reference_losses"] = numbers(layers + 1, 0.7, 2.0)
    return given


class Walk:
    """Some ranks of one training, and the model of them all."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.layers = self.chance.randint(1, 3)
        self.options = drawn_options(self.chance, self.layers)
        self.ranks = [self._new() for _ in range(self.chance.randint(1, 3))]
        self.plain = PlainDescent(self.layers, self.options)
        self.warmup, self.steps = self.chance.choice([0, 1, 4]), 0

    def _new(self) -> DescentConstraints:
        return DescentConstraints(self.layers, **self.options)

    def record(self) -> None:
        """Record a micro-batch on each rank; some counts are zero, some losses not finite."""
        chance = self.chance
        for rank in self.ranks:
            losses = np.array(chance.choices(USUAL, k=self.layers + 1))
            if chance.random() < 0.05:
                losses[chance.randrange(self.layers + 1)] = chance.choice(ODD)
            count = chance.choice([0.0, 1.0, 3.0, 40.0])
            rank.record(torch.tensor(losses), count if chance.random() < 0.5 else torch.tensor(count))
            self.plain.record(losses, count)

    def train(self) -> None:
        """Take some optimizer steps; the first may have more micro-batches, recorded before."""
        for _ in range(self.chance.choice([1, 2, 6, 25, 60])):
            for _ in range(self.chance.randint(1, 2)):
                self.record()
            update = self.steps >= self.warmup
            sums = torch.stack([rank.accumulated for rank in self.ranks]).sum(0)
            with (
                mock.patch.object(torch.distributed, "is_initialized", return_value=True),
                mock.patch.object(torch.distributed, "all_reduce", side_effect=partial(Tensor.copy_, other=sums)),
            ):
                for rank in self.ranks:
                    rank.step(update)
            with np.errstate(all="ignore"):
                self.plain.step(update)
            self.steps += 1
            self.all_is_as_in_the_model()

    def end_epoch(self) -> None:
        for rank in self.ranks:
            rank.epoch_end()
        self.plain.epoch_end()

    def save_and_load(self) -> None:
        """Also with sums that wait."""
        restored = [self._new() for _ in self.ranks]
        for old, new in zip(self.ranks, restored, strict=True):
            new.load_state_dict(old.state_dict())
        self.ranks = restored

    def judge(self) -> None:
        losses = np.array(self.chance.choices(USUAL, k=self.layers + 1))
        report = self.ranks[0].report(torch.tensor(losses), 0.01)
        found = {
            "descent": (report.violation, report.relative_violation),
            "bounds": (report.bound_violation, report.relative_bound_violation),
        }
        judged = [
            (kind, depth, violation, relative)
            for kind, parts in found.items()
            for depth, (violation, relative) in enumerate(zip(*parts, strict=True))
            if violation is not None
        ]
        expected = self.plain.judged(losses)
        assert [entry[:2] for entry in judged] == [entry[:2] for entry in expected]
        same([number for entry in judged for number in entry[2:]], [n for entry in expected for n in entry[2:]])
        over = [relative for *_, relative in expected]
        if all(abs(relative - 0.01) > 1e-9 for relative in over):
            assert report.feasible == (bool(over) and max(over) <= 0.01)
        same([self.ranks[0].merit(torch.tensor(losses))], [self.plain.merit(losses)])

    def all_is_as_in_the_model(self) -> None:
        plain = self.plain
        weights = plain.weights()
        for rank in self.ranks:
            groups = {"descent": rank.multipliers, "bounds": rank.bound_multipliers}
            for kind, group in groups.items():
                assert (group is not None) == (kind in plain.multipliers)
                if group is not None:
                    same(group.tolist(), plain.multipliers[kind])
            same(rank.slacks.tolist(), plain.slacks["descent"])
            same(rank.weights().tolist(), weights)
            assert rank.skipped_updates.item() == plain.skipped
            if self.options["reference"] is not None:
                same([rank.reference_level.item()], [plain.level])
            known = rank.objective_weights()
            assert (known is None) == (self.options["objective"] == "log")
            if known is not None and self.steps <= self.warmup:
                same(list(known), weights)


def same(given: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(given, float), np.array(expected, float), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow if s >= 30 else []) for s in range(100)])
def test_a_training_is_as_in_the_model(seed: int) -> None:
    walk = Walk(seed)
    walk.train()
    for _ in range(walk.chance.randint(1, 5)):
        walk.chance.choice([walk.train, walk.record, walk.judge, walk.save_and_load, walk.end_epoch])()
        walk.all_is_as_in_the_model()
