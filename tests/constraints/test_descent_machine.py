"""`DescentConstraints` against a plain float64 model, by random sequences of what a training does with it."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from cdt_fast.constraints.descent import DescentConstraints
from tests.constraints.plain_descent import PlainDescent

USUAL = [0.25, 0.5, 0.8, 1.0, 1.3, 2.0, 7.0]
ODD = [0.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf")]
NUMBERS = st.sampled_from([*USUAL * 6, *ODD])


def drawn_options(data: st.DataObject, layers: int) -> dict[str, Any]:
    """Options that go together, all of them given."""

    def draw(strategy: Any) -> Any:
        return data.draw(strategy)

    def choice(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def numbers(count: int, *values: float) -> list[float]:
        return draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))

    given: dict[str, Any] = {
        "rate": choice(None, 0.1, 0.5, numbers(layers, 0.0, 0.05, 0.3)),
        "reference": choice(None, 0.9, 3.0, "auto"),
        "coupling": choice("chain", "detach", "absolute"),
        "reference_mode": choice("constraint", "anchor"),
        "objective": choice("last", "depths", "log"),
        "coefficients": None,
        "ratio": choice("mean", "sample", "cvar"),
        "tail": choice(0.1, 0.5, 1.0),
        "normalize": choice(True, False),
        "margin": choice(0.0, 0.1),
        "tighten_steps": choice(0, 1, 5),
        "warmup_steps": choice(0, 1, 4),
        "dual_every": choice(1, 1, 3),
        "dual": choice("ascent", "adam", "pi", "barrier"),
        "dual_lr": choice(0.05, 0.5),
        "betas": choice((0.0, 0.9), (0.5, 0.999)),
        "proportional_gain": choice(0.0, 0.2),
        "smoothing": choice(0.0, 0.5),
        "gain_growth": choice(1.0, 2.0),
        "gain_limit": choice(0.5, 10.0),
        "barrier_width": choice(1.0, 0.1),
        "resilience": choice("slack", "decay", None),
        "slack_cost": choice(1.0, 10.0),
        "slack_lr": choice(0.01, 0.15),
        "bounds": None,
        "reference_losses": None,
        "agreement": None,
    }
    if given["ratio"] != "mean" and given["coupling"] == "absolute":
        given["coupling"] = "detach"
    if given["reference"] is None:
        given["reference_mode"] = "constraint"
        given["coupling"] = "chain" if given["coupling"] == "absolute" else given["coupling"]
    if given["objective"] != "last" and choice(True, False):
        given["coefficients"] = [*numbers(layers, 0.0, 0.5, 1.0, 3.0), 1.0]
    depths = st.integers(0, layers)
    if choice(True, False):
        factors = ["1.01x", "0.5x"] if given["warmup_steps"] or choice(True, False) else []
        given["bounds"] = draw(st.dictionaries(depths, st.sampled_from([0.5, 1.5, *factors]), min_size=1))
        if not given["warmup_steps"] and any(isinstance(bound, str) for bound in given["bounds"].values()):
            given["reference_losses"] = numbers(layers + 1, 0.7, 2.0)
    if choice(True, False, False):
        given["agreement"] = draw(st.dictionaries(st.integers(0, layers - 1), st.sampled_from([0.5, 0.9]), min_size=1))
    return given


class Machine(RuleBasedStateMachine):
    """Some ranks of one training, and the model of them all."""

    @initialize(data=st.data(), layers=st.integers(1, 3), ranks=st.integers(1, 3))
    def begin(self, data: st.DataObject, layers: int, ranks: int) -> None:
        self.layers, self.options = layers, drawn_options(data, layers)
        self.ranks = [self._new() for _ in range(ranks)]
        self.plain = PlainDescent(layers, self.options)
        self.recorded = False

    def _new(self) -> DescentConstraints:
        return DescentConstraints(self.layers, **self.options)

    @rule(data=st.data(), columns=st.integers(0, 3))
    def record(self, data: st.DataObject, columns: int) -> None:
        """A micro-batch a rank: mean losses, or a column a sample; with one count or one a sample; some are zero."""
        for rank in self.ranks:
            self._record(rank, data, columns)
        self.recorded = True

    def _record(self, rank: DescentConstraints, data: st.DataObject, columns: int) -> None:
        size = (self.layers + 1) * max(1, columns)
        losses = np.array(data.draw(st.lists(NUMBERS, min_size=size, max_size=size))).reshape(self.layers + 1, -1)
        kind = data.draw(st.sampled_from(["number", "one", "each"] if columns else ["number", "one"]))
        each = st.lists(st.sampled_from([0.0, 1.0, 3.0, 40.0]), min_size=max(1, columns), max_size=max(1, columns))
        counts = np.array(data.draw(each))
        if kind != "each":
            counts[:] = counts[0]
        count: float | Tensor = torch.tensor(counts if kind == "each" else counts[0])
        if kind == "number":
            counts = np.maximum(counts, 1.0)
            count = float(counts[0])
        agreement = None
        if self.options["agreement"] is not None:
            shares = st.lists(
                st.sampled_from([0.0, 0.4, 0.95, 1.0]), min_size=self.layers + 1, max_size=self.layers + 1
            )
            agreement = np.array(data.draw(shares))
        given = torch.tensor(losses if columns else losses[:, 0])
        rank.record(given, count, agreement=None if agreement is None else torch.tensor(agreement))
        self.plain.record(losses, counts, agreement)

    @precondition(lambda self: self.recorded)
    @rule(times=st.sampled_from([1, 1, 1, 2, 25, 60]))
    def step(self, times: int) -> None:
        """An optimizer step, and as many more with losses that stay."""
        for number in range(times):
            if number:
                losses = np.linspace(2.0, 1.5, self.layers + 1).reshape(-1, 1)
                agreement = None if self.options["agreement"] is None else np.full(self.layers + 1, 0.6)
                for rank in self.ranks:
                    shares = None if agreement is None else torch.tensor(agreement)
                    rank.record(torch.tensor(losses[:, 0]), 2, agreement=shares)
                    self.plain.record(losses, np.array([2.0]), agreement)
            sums = torch.stack([rank._measurement.tensors["accumulated"] for rank in self.ranks]).sum(0)
            with (
                mock.patch.object(torch.distributed, "is_initialized", return_value=True),
                mock.patch.object(torch.distributed, "all_reduce", side_effect=partial(Tensor.copy_, other=sums)),
            ):
                for rank in self.ranks:
                    rank.step()
            with np.errstate(all="ignore"):
                self.plain.step()
        self.recorded = False

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

    @rule(data=st.data(), columns=st.integers(0, 3))
    def judge(self, data: st.DataObject, columns: int) -> None:
        size = (self.layers + 1) * max(1, columns)
        given = data.draw(st.lists(st.sampled_from(USUAL), min_size=size, max_size=size))
        losses = np.array(given).reshape(self.layers + 1, -1)
        agreement = None if self.options["agreement"] is None else np.full(self.layers + 1, 0.7)
        report = self.ranks[0].report(
            torch.tensor(losses if columns else losses[:, 0]),
            0.01,
            agreement=None if agreement is None else torch.tensor(agreement),
        )
        found = {
            "descent": (report.violation, report.relative_violation),
            "bounds": (report.bound_violation, report.relative_bound_violation),
            "agreement": (report.agreement_violation, report.agreement_violation),
        }
        judged = [
            (kind, depth, violation, relative)
            for kind, parts in found.items()
            for depth, (violation, relative) in enumerate(zip(*parts, strict=True))
            if violation is not None
        ]
        expected = self.plain.judged(losses, agreement)
        assert [entry[:2] for entry in judged] == [entry[:2] for entry in expected]
        same([number for entry in judged for number in entry[2:]], [n for entry in expected for n in entry[2:]])
        over = [relative for *_, relative in expected]
        if all(abs(relative - 0.01) > 1e-9 for relative in over):
            assert report.feasible == (bool(over) and max(over) <= 0.01)
        same([self.ranks[0].merit(torch.tensor(losses[:, 0]))], [self.plain.merit(losses[:, 0])])

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        plain = self.plain
        for rank in self.ranks:
            groups = {
                "descent": rank.multipliers,
                "bounds": rank.bound_multipliers,
                "agreement": rank.agreement_multipliers,
            }
            for kind, group in groups.items():
                assert (group is not None) == (kind in plain.multipliers)
                if group is not None:
                    same(group.tolist(), plain.multipliers[kind])
            same(rank.slacks.tolist(), plain.slacks["descent"])
            same(rank.weights().tolist(), plain.weights())
            assert rank.skipped_updates.item() == plain.skipped
            if self.options["reference"] is not None:
                same([rank.reference_level.item()], [plain.level])
            known = rank.known_weights()
            if known is not None:
                same(list(known), plain.weights())


def same(given: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(given, float), np.array(expected, float), rtol=1e-9, atol=1e-12)


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestDescentMachine = Machine.TestCase

if __name__ == "__main__":  # a campaign: python -m tests.constraints.test_descent_machine 5000
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=int(sys.argv[1]), stateful_step_count=25, deadline=None, database=None)
    )
