"""The gate, the round_robin, the floor and the fits."""

from __future__ import annotations

import math

import pytest
import torch

from cdt_fast.bench import measure as measuring
from cdt_fast.bench.case import Case, Implementation, Step
from cdt_fast.bench.ceilings import Ceilings, Probe, floor_seconds
from cdt_fast.bench.clock import Rounds, calls_a_reading, round_robin
from cdt_fast.bench.measure import Refused, disagreement, measure, median_ratio
from tests.bench.bench_cases import case_of, fails, steady, unavailable

CPU = torch.device("cpu")


def no_memory(case: Case, candidate: Implementation, step: Step) -> str:
    return "not asked for"


def measured(case: Case, rounds: int = 3) -> dict[str, dict[str, object]]:
    return measure(case, CPU, Rounds(rounds, rounds, 0.0), Ceilings(CPU, "toy"), no_memory)["implementations"]


def test_what_differs_fails_or_is_missing_is_reported_and_not_timed() -> None:
    candidates = measured(
        case_of(
            Implementation("eager", "eager", steady(1.0)),
            Implementation("wrong", "peer", steady(1.01)),
            Implementation("fails", "peer", fails),
            Implementation("missing", "peer", unavailable),
            Implementation("ours", "ours", steady(1.0005)),
        )
    )
    assert [candidate["status"] for candidate in candidates.values()] == [
        "timed",
        "wrong",
        "failed",
        "unavailable",
        "timed",
    ]
    assert candidates["wrong"]["reason"] == "differs from the formula by 1.0e-02, more than 1e-03: not timed"
    assert candidates["fails"]["reason"] == "RuntimeError: no such kernel and a second line"
    assert candidates["missing"]["reason"] == "no such package"
    assert all("median_seconds" not in candidates[name] for name in ("wrong", "fails", "missing"))
    assert len(candidates["ours"]["seconds"]) == 3  # type: ignore[arg-type]
    assert candidates["ours"]["over_best_peer"] is None  # none was timed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_gate_refuses_what_is_not_finite(bad: float) -> None:
    assert disagreement([torch.tensor([bad, 1.0])], [torch.ones(2)]) == math.inf


def test_the_gate_compares_every_tensor_against_its_own_size() -> None:
    large, small = torch.full((4,), 1e6), torch.full((4,), 1e-6)
    assert disagreement([large, 1.1 * small], [large, small]) == pytest.approx(0.1)
    assert disagreement([torch.zeros(2)], [torch.zeros(2)]) == 0.0
    assert disagreement([torch.full((2,), 1e-9)], [torch.zeros(2)]) == math.inf


@pytest.mark.parametrize("found", [[torch.ones(3), torch.ones(3)], [torch.ones(1)], []])
def test_the_gate_refuses_other_shapes(found: list[torch.Tensor]) -> None:
    with pytest.raises(Refused, match="other shapes"):
        disagreement(found, [torch.ones(3)])


def test_a_way_with_its_own_formula_is_held_to_that() -> None:
    twos = lambda: [torch.full((3,), 2.0)]  # noqa: E731
    case = case_of(Implementation("eager", "eager", steady(2.0), twos), Implementation("ours", "ours", steady(2.0)))
    assert [candidate["status"] for candidate in measured(case).values()] == ["timed", "wrong"]


def test_a_formula_that_fails_lets_no_way_through() -> None:
    def too_large() -> list[torch.Tensor]:
        raise MemoryError("too large")

    (candidate,) = measured(case_of(Implementation("eager", "eager", steady(1.0)), expected=too_large)).values()
    assert (candidate["status"], candidate["reason"]) == (
        "failed",
        "MemoryError: too large",
    )


def test_a_way_that_fails_while_it_is_timed_drops_out() -> None:
    def prepare() -> Step:
        calls = iter([True] * 3)

        def step() -> list[torch.Tensor]:
            if not next(calls, False):
                raise RuntimeError("used up")
            return [torch.ones(3)]

        return step

    candidates = measured(
        case_of(Implementation("eager", "eager", steady(1.0)), Implementation("ours", "ours", prepare)), rounds=50
    )
    assert candidates["eager"]["status"] == "timed"
    assert (candidates["ours"]["status"], candidates["ours"]["reason"]) == ("failed", "RuntimeError: used up")


def test_every_way_takes_its_turn_once_a_round_and_first_in_turn() -> None:
    assert list(round_robin(["a", "b", "c"], 4)) == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_as_many_rounds_as_fit_and_no_fewer_than_the_least() -> None:
    rounds = Rounds(least=5, most=15, budget=8.0)
    assert [rounds.fitting(one) for one in (100.0, 1.7, 1.0, 0.8, 0.0)] == [5, 5, 8, 10, 15]
    assert [Rounds(3, 3, 0.0).fitting(one) for one in (100.0, 1e-6)] == [3, 3]


def test_nothing_is_probed_where_no_way_can_run() -> None:
    ceilings = Ceilings(CPU, "toy")
    case = case_of(Implementation("eager", "eager", unavailable), flop=1.0, moved=1.0)
    found = measure(case, CPU, Rounds(2, 2, 0.0), ceilings, no_memory)
    assert found["floor_seconds"] is None
    assert ceilings.as_dict() == {"flop_per_second": {}, "bytes_per_second": {}}


def test_the_ways_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def candidate(name: str, role: str) -> Implementation:
        def step() -> list[torch.Tensor]:
            called.append(name)
            return [torch.ones(3)]

        return Implementation(name, role, lambda: step)

    monkeypatch.setattr(measuring, "calls_a_reading", lambda once, device: 1)
    measured(case_of(candidate("eager", "eager"), candidate("ours", "ours")), rounds=3)
    assert called == ["eager"] * 2 + ["ours"] * 2 + ["eager", "ours", "ours", "eager", "eager", "ours"]


def test_a_drift_cancels_in_the_ratio() -> None:
    # The machine slows down fourfold; ours takes half of eager's time in every round.
    assert median_ratio([1.0, 2.0, 4.0], [0.5, 1.0, 2.0]) == 2.0
    assert median_ratio([1.0, 9.0, 4.0], [0.5, 3.0, 1.0]) == 3.0


def test_short_steps_are_called_several_times_a_reading() -> None:
    assert calls_a_reading(1.0, CPU) == 1
    assert calls_a_reading(0.001, CPU) == 5
    assert calls_a_reading(0.0, CPU) == 100
    assert calls_a_reading(0.001, torch.device("cuda")) == 50


def test_the_floor_is_the_larger_of_compute_and_copy() -> None:
    assert floor_seconds(flop=8.0, moved=2.0, flop_rate=4.0, byte_rate=2.0) == 2.0
    assert floor_seconds(flop=8.0, moved=6.0, flop_rate=4.0, byte_rate=2.0) == 3.0


def test_the_share_of_the_floor_is_of_the_probes_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(CPU, "toy")
    taken = {"product": 2.0, "copy": 1.0, "ours": 4.0}
    monkeypatch.setattr(ceilings, "product", lambda dtype: Probe("", lambda: "product", 8.0, 1.0, 1))
    monkeypatch.setattr(ceilings, "copy", lambda: Probe("", lambda: "copy", 2.0, 1.0, 1))
    monkeypatch.setattr(
        measuring, "seconds", lambda step, device, calls=1: taken[x] if isinstance(x := step(), str) else taken["ours"]
    )
    case = case_of(Implementation("ours", "ours", steady(1.0)), flop=8.0, moved=2.0)
    found = measure(case, CPU, Rounds(2, 2, 0.0), ceilings, no_memory)
    assert (found["floor_seconds"], found["flop_per_second"], found["bytes_per_second"]) == (2.0, 4.0, 2.0)
    assert found["implementations"]["ours"]["share_of_floor"] == 0.5


def test_ceilings_are_of_the_fastest_product() -> None:
    ceilings = Ceilings(CPU, "toy")
    product = ceilings.product("float32")
    rates = ceilings.as_dict()["flop_per_second"]["float32"]
    assert len(rates) == 4
    assert product.rate == max(rates.values()) == rates[product.name]
    assert ceilings.copy().work == 2 * 2**20
    assert ceilings.product("float32") is product
