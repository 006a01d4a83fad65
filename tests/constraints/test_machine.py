"""`DescentConstraints` against a plain float64 model, by random sequences of what a training does with it."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from torch import Tensor

from cdt_fast.constraints.constraints import DescentConstraints
from tests.constraints.plain_descent import PlainDescent

USUAL = [0.25, 0.5, 0.8, 1.0, 1.3, 2.0, 7.0]
ODD = [0.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf")]
# A seed for all the numbers of a rule: drawn one by one, most of them would be the first of their list.
SEEDS = st.integers(0, 2**32).map(random.Random)


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


class Machine(RuleBasedStateMachine):
    """Some ranks of one training, and the model of them all."""

    @initialize(chance=SEEDS, ranks=st.integers(1, 3))
    def begin(self, chance: random.Random, ranks: int) -> None:
        self.layers = chance.randint(1, 3)
        self.options = drawn_options(chance, self.layers)
        self.ranks = [self._new() for _ in range(ranks)]
        self.plain = PlainDescent(self.layers, self.options)
        self.warmup, self.steps = chance.choice([0, 1, 4]), 0
        self.train(chance)

    def _new(self) -> DescentConstraints:
        return DescentConstraints(self.layers, **self.options)

    @rule(chance=SEEDS)
    def record(self, chance: random.Random) -> None:
        """A micro-batch a rank; some counts are zero."""
        for rank in self.ranks:
            self._record(rank, chance)

    def _record(self, rank: DescentConstraints, chance: random.Random) -> None:
        losses = np.array(chance.choices(USUAL, k=self.layers + 1))
        if chance.random() < 0.05:
            losses[chance.randrange(self.layers + 1)] = chance.choice(ODD)
        number = chance.random() < 0.5
        count = chance.choice([1.0, 3.0, 40.0] if number else [0.0, 1.0, 3.0, 40.0])
        rank.record(torch.tensor(losses), count if number else torch.tensor(count))
        self.plain.record(losses, count)

    @rule(chance=SEEDS)
    def train(self, chance: random.Random) -> None:
        """Some optimizer steps; the first may have more micro-batches, recorded before."""
        for _ in range(chance.choice([1, 2, 6, 25, 60])):
            for _ in range(chance.randint(1, 2)):
                self.record(chance)
            update = self.steps >= self.warmup
            sums = torch.stack([rank.accumulated for rank in self.ranks]).sum(0)
            with (
                mock.patch.object(torch.distributed, "is_initialized", return_value=True),
                mock.patch.object(torch.distributed, "all_reduce", side_effect=partial(Tensor.copy_, other=sums)),
            ):
                for rank in self.ranks:
                    rank.step() if update else rank.measure()
            with np.errstate(all="ignore"):
                self.plain.step(update)
            self.steps += 1
            self.all_is_as_in_the_model()

    @rule()
    def end_epoch(self) -> None:
        for rank in self.ranks:
            rank.epoch_end()
        self.plain.epoch_end()

    @rule()
    def save_and_load(self) -> None:
        """Also with sums that wait."""
        restored = [self._new() for _ in self.ranks]
        for old, new in zip(self.ranks, restored, strict=True):
            new.load_state_dict(old.state_dict())
        self.ranks = restored

    @rule(chance=SEEDS)
    def judge(self, chance: random.Random) -> None:
        losses = np.array(chance.choices(USUAL, k=self.layers + 1))
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

    @invariant()
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


def walk(seed: int) -> None:
    """The same by one seed: hypothesis repeats itself in what it draws, so that few combinations of options occur."""
    chance = random.Random(seed)
    machine = Machine()
    machine.begin(chance, chance.randint(1, 3))
    for _ in range(chance.randint(1, 5)):
        name = chance.choice(["train", "record", "judge", "save_and_load", "end_epoch"])
        given = {"chance": chance} if name in ("train", "record", "judge") else {}
        getattr(machine, name)(**given)
        machine.all_is_as_in_the_model()


Machine.TestCase.settings = settings(max_examples=20, stateful_step_count=5, deadline=None)
TestDescentMachine = Machine.TestCase


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(start, start + 20), marks=pytest.mark.slow if start else []) for start in range(0, 80, 20)],
    ids=str,
)
def test_many_trainings(seeds: range) -> None:
    for seed in seeds:
        walk(seed)


if __name__ == "__main__":  # a campaign: python -m tests.constraints.test_machine 5000
    for seed in range(int(sys.argv[1])):
        try:
            walk(seed)
        except Exception as error:
            raise SystemExit(f"seed {seed}: {error}") from error
