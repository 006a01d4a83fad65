"""How a case is measured: what is let through, taking turns, ratios, and peak memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.bench import measure as measuring
from cdt_fast.bench.case import Case, Implementation, Step
from cdt_fast.bench.measure import Refused, disagreement, measure, median_ratio, peak_memory, round_robin
from tests.bench.bench_cases import case_of, fails, steady, unavailable

CPU = torch.device("cpu")


def measured(case: Case, rounds: int = 3) -> dict[str, dict[str, Any]]:
    return measure(case, CPU, rounds)["implementations"]


def test_what_differs_fails_or_is_missing_is_reported_and_not_timed() -> None:
    found = measured(
        case_of(
            Implementation("eager", "eager", steady(1.0)),
            Implementation("wrong", "peer", steady(1.01)),
            Implementation("fails", "peer", fails),
            Implementation("missing", "peer", unavailable),
            Implementation("ours", "ours", steady(1.0005)),
        )
    )
    assert [one["status"] for one in found.values()] == ["timed", "wrong", "failed", "unavailable", "timed"]
    assert found["wrong"]["reason"] == "differs from the formula by 1.0e-02, more than 1e-03: not timed"
    assert found["fails"]["reason"] == "RuntimeError: no such kernel and a second line"
    assert found["missing"]["reason"] == "no such package"
    assert all("median_seconds" not in found[name] for name in ("wrong", "fails", "missing"))
    assert len(found["ours"]["seconds"]) == 3
    assert found["ours"]["over_best_peer"] is None  # none was timed


def test_every_tensor_is_compared_against_its_own_size_and_must_be_finite() -> None:
    large, small = torch.full((4,), 1e6), torch.full((4,), 1e-6)
    assert disagreement([large, 1.1 * small], [large, small]) == pytest.approx(0.1)
    assert disagreement([torch.zeros(2)], [torch.zeros(2)]) == 0.0
    for wrong, expected in (([1e-9, 1e-9], 0.0), ([math.nan, 1.0], 1.0), ([math.inf, 1.0], 1.0)):
        assert disagreement([torch.tensor(wrong)], [torch.full((2,), expected)]) == math.inf


@pytest.mark.parametrize("found", [[torch.ones(3), torch.ones(3)], [torch.ones(1)], []])
def test_other_shapes_are_refused(found: list[Tensor]) -> None:
    with pytest.raises(Refused, match="other shapes"):
        disagreement(found, [torch.ones(3)])


def test_an_implementation_that_fails_while_it_is_timed_drops_out() -> None:
    def prepare() -> Step:
        calls = iter([True] * 3)

        def step() -> list[Tensor]:
            if not next(calls, False):
                raise RuntimeError("used up")
            return [torch.ones(3)]

        return step

    case = case_of(Implementation("eager", "eager", steady(1.0)), Implementation("ours", "ours", prepare))
    found = measured(case, rounds=50)
    assert found["eager"]["status"] == "timed"
    assert (found["ours"]["status"], found["ours"]["reason"]) == ("failed", "RuntimeError: used up")


def test_all_take_turns_and_each_is_the_first_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(round_robin(["a", "b", "c"], 4)) == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    called: list[str] = []

    def one(name: str, role: str) -> Implementation:
        return Implementation(name, role, lambda: lambda: called.append(name) or [torch.ones(3)])

    monkeypatch.setattr(measuring, "calls_per_reading", lambda once, device: 1)
    measured(case_of(one("eager", "eager"), one("ours", "ours")), rounds=3)
    turns = ["eager", "ours", "ours", "eager", "eager", "ours"]
    pairs = ["eager", "eager", "ours", "ours"]  # first checked and called once, at last for their memory
    assert called == [*pairs, *turns, *pairs]


def test_as_many_rounds_as_fit_and_no_fewer_than_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(Implementation("eager", "eager", steady(1.0)))
    for once, count in ((100.0, 5), (0.9, 8), (1e-6, 25)):
        monkeypatch.setattr(measuring, "seconds", lambda step, device, calls=1, once=once: once)
        assert len(measure(case, CPU)["implementations"]["eager"]["seconds"]) == count


def test_a_drift_cancels_in_the_ratio() -> None:
    # The machine slows down fourfold; ours takes half of eager's time in every round.
    assert median_ratio([1.0, 2.0, 4.0], [0.5, 1.0, 2.0]) == 2.0


def test_short_steps_are_called_several_times_a_reading() -> None:
    assert [measuring.calls_per_reading(once, CPU) for once in (1.0, 0.001, 0.0)] == [1, 5, 100]
    assert measuring.calls_per_reading(0.001, torch.device("cuda")) == 50


def test_peak_memory_is_what_a_step_holds_on_top_of_what_rests() -> None:
    kept = [torch.ones(2**18)]  # 1 MiB that rests between two steps, and is replaced by each

    def step() -> Tensor:
        buffer = torch.ones(2**20)
        del buffer
        kept[:] = [torch.ones(2**18)]
        return torch.ones(2**19)

    for _ in range(2):
        assert peak_memory(step, CPU) == 4 * 2**20
    assert peak_memory(lambda: torch.ones(2**20) + 1, CPU) == pytest.approx(8 * 2**20, abs=100)
