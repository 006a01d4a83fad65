"""Penalty-barrier multipliers and the growing gain of the controller: their formulas, and the toy problem."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tests.constraints.constraint_cases import TOY_MULTIPLIERS, TOY_POINT, feed, plain, run_toy, toy_constraints


def barrier_slope(relative: float) -> float:
    """φ′ of the quadratic-logarithmic penalty, no more than 2."""
    return min(2.0, 1 + relative if relative >= -0.5 else -0.25 / relative)


@pytest.mark.parametrize("resilience", [None, "decay"])
def test_penalty_barrier_is_its_formula(resilience: Any) -> None:
    options: dict[str, Any] = {"dual": "barrier", "dual_lr": 0.4, "barrier_width": 0.7, "resilience": resilience}
    constraints = plain(1, 0.0, 1.0, **options)
    multiplier, generator = 0.0, torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(300):
        violation = 3 * torch.randn((), generator=generator, dtype=torch.float64).item()
        feed(constraints, [1.0 + violation, 1.0 + violation])
        decay = multiplier if resilience == "decay" else 0.0
        slope = barrier_slope((violation - decay) / 0.7)
        seen.add(slope == 2.0 if slope >= 0.5 else "log")
        started = max(multiplier, 1e-4)
        multiplier = min(max(started * (1 + 0.4 * (slope - 1)), 1e-4), 100.0)
        assert constraints.multipliers[0].item() == pytest.approx(multiplier, rel=1e-12)
    assert seen == {True, False, "log"}


def test_the_slope_of_the_barrier_is_smooth() -> None:
    """Its two branches meet in value and in derivative."""
    step = 1e-6
    assert barrier_slope(-0.5 - step) == pytest.approx(barrier_slope(-0.5 + step) - 2 * step, abs=1e-9)


def test_a_barrier_starts_with_the_first_update_and_comes_down_fast() -> None:
    constraints = plain(1, 0.0, 1.0, dual="barrier", dual_lr=1.0, resilience=None, warmup_steps=2)
    feed(constraints, [3.0, 3.0], [3.0, 3.0])
    assert constraints.weights().tolist() == [0.0, 1.0]
    for _ in range(40):
        feed(constraints, [3.0, 3.0])
    assert constraints.multipliers[0] == 100.0
    for _ in range(10):
        feed(constraints, [0.0, 0.0])  # g = −1: divided by four each time
    assert constraints.multipliers[0].item() == pytest.approx(max(100 / 4**10, 1e-4))
    feed(constraints, [0.0, 0.0], [1e6, math.nan])
    assert constraints.multipliers[0] == 1e-4


@pytest.mark.parametrize("resilience", ["slack", "decay"])
def test_barrier_on_the_infeasible_toy_rests_at_the_resilient_solution(resilience: Any) -> None:
    constraints = toy_constraints(dual="barrier", dual_lr=0.1, resilience=resilience)
    point, _ = run_toy(constraints, 3000)
    torch.testing.assert_close(point, TOY_POINT, rtol=0, atol=1e-3)
    # The last entry, the objective's, is at its lower end.
    torch.testing.assert_close(constraints.multipliers, TOY_MULTIPLIERS, rtol=0, atol=1e-3)


def test_barrier_on_the_feasible_toy() -> None:
    point, peak = run_toy(toy_constraints(dual="barrier", dual_lr=0.1, resilience=None), 3000, feasible=True)
    assert point.tolist() == pytest.approx([1.0, 1.0, 0.0], abs=1e-3)
    assert peak[2] > 1


def test_the_gain_grows_where_the_violation_stays() -> None:
    options: dict[str, Any] = {"dual": "pi", "proportional_gain": 0.5, "resilience": None}
    constraints = plain(2, 0.0, 1.0, **options, gain_growth=2.0, gain_limit=3.0)
    multipliers, smoothed = [0.0] * 3, [0.0] * 3
    gains, before, period = [0.5] * 3, [0.0] * 3, [0.0] * 3
    seen = []
    for step in range(400):
        # Depth 0 stays violated, layer 1 falls by a fifth a period, layer 2 is never violated.
        losses = [1.5 + 0.01 * (step % 3), 1.5 + 0.8 ** (step / 50), 1.0]
        violations = [losses[0] - 1, losses[1] - losses[0], losses[2] - losses[1]]
        feed(constraints, losses)
        for index, error in enumerate(violations):
            change = 0.01 * error + gains[index] * (error - smoothed[index])
            multipliers[index], smoothed[index] = max(0.0, multipliers[index] + change), error
            period[index] += max(0.0, error)
            if step % 50 == 49:
                if before[index] > 0 and period[index] > 0.9 * before[index]:
                    gains[index] = min(2 * gains[index], 3.0)
                before[index], period[index] = period[index], 0.0
        assert constraints.multipliers.tolist() == pytest.approx(multipliers, rel=1e-10)
        seen.append(list(gains))
    assert [gain for gain, _ in itertools.groupby(entry[0] for entry in seen)] == [0.5, 1.0, 2.0, 3.0]
    assert {entry[1] for entry in seen} == {entry[2] for entry in seen} == {0.5}


def test_a_growing_gain_solves_the_toy_and_a_growth_of_one_is_the_controller() -> None:
    options: dict[str, Any] = {"dual": "pi", "dual_lr": 0.05, "resilience": None}
    point, _ = run_toy(toy_constraints(**options, gain_growth=1.5), 1500, feasible=True)
    assert point.tolist() == pytest.approx([1.0, 1.0, 0.0], abs=1e-5)
    same = [toy_constraints(**options, **changes) for changes in ({}, {"gain_growth": 1.0})]
    for constraints in same:
        run_toy(constraints, 50, feasible=True)
    assert torch.equal(same[0].multipliers, same[1].multipliers)
    assert "gain_growths" not in same[1].state_dict()


def test_the_gain_grows_with_a_small_violation_too() -> None:
    constraints = plain(1, 0.0, 1.0, dual="pi", proportional_gain=0.5, gain_growth=2.0, gain_limit=9.0, resilience=None)
    feed(constraints, *[[1.001, 1.001]] * 100)
    assert constraints.state_dict()["gain_growths"].tolist() == [1.0, 0.0]
    feed(constraints, *[[1.0001, 1.0001]] * 50)
    assert constraints.state_dict()["gain_growths"].tolist() == [1.0, 0.0]


def test_a_gain_may_be_at_its_limit() -> None:
    constraints = plain(1, 0.0, 1.0, dual="pi", proportional_gain=0.5, gain_growth=2.0, gain_limit=0.5, resilience=None)
    feed(constraints, *[[2.0, 2.0]] * 120)
    assert constraints.state_dict()["gain_growths"].max() == 0
