"""What a report says of held-out losses, and the merit of a model."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from cdt_fast.checks import InputError
from tests.constraints.constraint_cases import MODES, feed, plain


def test_report_of_a_feasible_solution() -> None:
    report = plain(2, [0.1, 0.2], 1.0).report([1.0, 0.8, 0.6])
    assert str(report) == "Feasible: all 3 constraints hold; the tightest, depth 0 (the reference), has 0.00% to spare."
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False)) == {
        "feasible": True,
        "finite": True,
        "violation": pytest.approx([0.0, -0.1, -0.04]),
        "relative_violation": pytest.approx([0.0, -0.1, -0.05]),
        "ratio": pytest.approx([0.8, 0.75]),
        "worst_layer": 0,
        "worst_violation": 0.0,
        "worst_kind": "descent",
        "bound_violation": [],
        "relative_bound_violation": [],
        "unjudged": 0,
        "depths": [0, 1, 2],
        "caveat": "",
    }


def test_a_report_calls_the_depths_as_it_is_told() -> None:
    constraints = plain(2, 0.1, None, bounds={1: 0.5})
    constraints.depths = [0, 4, 8]
    assert "the worst: layer 8 is above its bound by 0.19 (" in str(constraints.report([1.0, 0.4, 0.55]))
    report = constraints.report([1.0, 0.8, 0.6])
    assert (report.worst_kind, report.worst_layer, report.feasible) == ("bound", 4, False)
    assert report.bound_violation == [None, pytest.approx(0.3), None]
    assert report.relative_bound_violation == [None, pytest.approx(0.6), None]
    assert "the worst: depth 4 is above its bound by 0.3 (" in str(report)


def test_report_of_an_infeasible_solution() -> None:
    report = plain(3, 0.1, 1.0).report(torch.tensor([1.05, 0.9, 0.9, 0.95]))
    assert not report.feasible
    assert report.violation == pytest.approx([0.05, -0.045, 0.09, 0.14], abs=1e-6)
    assert report.relative_violation == pytest.approx([0.05, -0.045 / 1.05, 0.1, 0.14 / 0.9], abs=1e-6)
    assert (report.worst_layer, report.worst_violation) == (3, pytest.approx(0.14 / 0.9, abs=1e-6))
    assert str(report) == (
        "Infeasible: 3 of 4 constraints are violated; the worst: layer 3 is above its bound by 0.14 "
        "(relative violation 15.56%)."
    )
    assert str(plain(2, 0.0).report([1.0, 1.0, 2.0])).startswith("Infeasible: 1 of 2 constraints is violated")


@pytest.mark.parametrize(
    ("rate", "options", "losses", "violation", "relative"),
    [
        (0.1, {}, [1.0, 0.8, 0.6], [None, -0.1, -0.12], [None, -0.1, -0.15]),
        (0.1, {"reference": 1.0, "reference_mode": "anchor"}, [9, 0.8, 0.6], [None, -0.1, -0.12], [None, -0.1, -0.15]),
        (0.5, {"reference": 8.0, "coupling": "absolute"}, [9, 3, 3], [1.0, -1.0, 1.0], [1 / 8, -1 / 4, 1 / 2]),
        (0.1, {"reference": 1.0}, [0.0, 0.0, 0.1], [-1.0, 0.0, 0.1], [-1.0, 0.0, math.inf]),
    ],
)
def test_violations(rate: float, options: Any, losses: Any, violation: Any, relative: Any) -> None:
    report = plain(2, rate, **options).report([float(loss) for loss in losses])
    for found, expected in ((report.violation, violation), (report.relative_violation, relative)):
        assert [each is None for each in found] == [each is None for each in expected]
        assert [each for each in found if each is not None] == pytest.approx([e for e in expected if e is not None])
    assert report.feasible == (report.worst_violation is not None and report.worst_violation <= 0)
    json.dumps(report.as_dict(), allow_nan=False)


def test_report_before_the_auto_reference_is_fixed() -> None:
    report = plain(2, 0.1, "auto", coupling="absolute").report([1.0, 0.5, 0.2])
    assert (report.feasible, report.violation, report.worst_layer) == (False, [None] * 3, None)
    assert str(report) == (
        "No verdict: none of the 3 constraints is in force yet: they wait for the warm-up, or for the 20 measurements "
        "of an automatic reference."
    )
    anchored = plain(2, 0.1, "auto", reference_mode="anchor")
    report = anchored.report([1.0, 0.5, 0.2])
    assert (report.feasible, report.unjudged) == (True, 1)
    assert str(report) == (
        "Feasible: 1 of 2 constraints are judged, and hold; the tightest, layer 2, has 50.00% to spare."
    )
    for step in range(20):
        assert anchored.report([1.0, 0.5, 0.2]).unjudged == 1, step
        feed(anchored, [1.0, 0.5, 0.2])
    assert anchored.report([1.0, 0.5, 0.2]).unjudged == 0


def test_a_bound_that_is_no_factor_is_judged_before_the_warm_up_has_ended() -> None:
    report = plain(2, bounds={1: 0.5, 2: "1.5x"}).report([1.0, 0.7, 0.6])
    assert report.bound_violation[1:] == [pytest.approx(0.2), None]


def test_report_without_constraints_is_no_verdict() -> None:
    for constraints in (plain(2, None), plain(2, None, "auto", reference_mode="anchor")):
        report = constraints.report([1.0, 1.0, 1.0])
        assert not constraints.any
        assert (report.worst_layer, report.unjudged) == (None, 0)
        assert str(report) == "No verdict: there are no constraints."
    assert plain(2, None, 1.0).any
    assert plain(2, None, bounds={1: 0.5}).any


@pytest.mark.parametrize(
    ("options", "losses", "caveat"),
    [
        # A bound far above the loss of the input lets the first layer raise it.
        ({"reference_mode": "anchor"}, [7.0, 9.94, 9.0], "layer 1 multiplies the loss by 1.42 (its rate allows 0.95)"),
        ({"reference_mode": "constraint"}, [7.0, 6.6, 6.2], ""),
        ({"coupling": "absolute"}, [7.0, 6.5, 6.4], "layer 2 multiplies the loss by 0.98462 (its rate allows 0.95)"),
        (
            {"coupling": "absolute"},
            [7.0, 7.0, 7.7],
            "layer 1 multiplies the loss by 1 (its rate allows 0.95) and layer 2 multiplies the loss by 1.1 (its rate "
            "allows 0.95)",
        ),
    ],
)
def test_a_report_does_not_say_that_all_hold_where_a_layer_misses_its_rate(
    options: dict[str, Any], losses: list[float], caveat: str
) -> None:
    report = plain(2, 0.05, 12.0, **options).report(losses)
    assert (report.feasible, report.caveat) == (True, caveat)
    assert ("all 3" in str(report)) == (not caveat)
    assert caveat in str(report)
    assert not plain(2, 0.05, 12.0, **options).report([20.0, 20.0, 21.0]).caveat  # it is violated


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_losses_that_are_not_finite_are_infeasible(broken: float, depth: int, mode: str) -> None:
    losses = [1.0, 0.5, 0.2]
    losses[depth] = broken
    report = plain(2, 0.1, 1.0, reference_mode=mode).report(losses)
    assert not report.feasible
    assert str(report) == "Infeasible: not every loss is finite."
    json.dumps(report.as_dict(), allow_nan=False)


def test_wrong_report() -> None:
    with pytest.raises(InputError, match=r"losses has shape \(2,\); expected \(3,\), one a depth"):
        plain(2).report([1.0, 1.0])


# The merit


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("objective", ["last", "depths", "log"])
def test_the_merit_is_the_objective_of_the_resilient_problem(objective: Any, normalize: bool) -> None:
    """The smallest, over slacks u ≥ 0 with ĝ ≤ u, of F + β/2 Σ s u²; by hand from float64 arithmetic."""
    losses = [1.5, 0.9, 0.85, 0.7]
    options: dict[str, Any] = {"objective": objective, "normalize": normalize, "slack_cost": 4.0, "margin": 0.1}
    constraints = plain(3, 0.2, 1.0, bounds={3: 0.5}, **options)
    violated = [(0.5, 1.0), (0.85 - 0.8 * 0.9, 0.9), (0.7 - 0.8 * 0.85, 0.85), (0.2, 0.5)]  # layer 1 is not
    price = 2.0 * sum(violation**2 / (scale if normalize else 1.0) for violation, scale in violated)
    value = {"last": 0.7, "depths": sum(losses), "log": sum(map(math.log, losses))}[objective]
    assert constraints.merit(losses) == pytest.approx(value + price, rel=1e-12)
    assert constraints.merit(losses, priced=False) == pytest.approx(value, rel=1e-12)


def test_the_merit_of_logarithms_is_in_units_of_the_last_loss() -> None:
    constraints = plain(1, 0.2, objective="log", normalize=True, slack_cost=10.0)
    feed(constraints, [4.0, 2.0])
    assert constraints.merit([3.0, 2.5]) == pytest.approx(2 * math.log(3 * 2.5) + 10 / 2 * (2.5 - 2.4) ** 2 / 3.0)
    assert constraints.merit([3.0, 0.0]) == -math.inf
    # A depth without weight has no logarithm.
    without = plain(1, objective="log", coefficients=[0.0, 1.0])
    assert without.merit([0.0, 2.0], priced=False) == pytest.approx(math.log(2.0))
