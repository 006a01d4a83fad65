"""Objectives and results as bounds: against formulas and hand-solved problems."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.constraints.duals import DualAction
from cdt_fast.errors import InputError
from tests.constraints.constraint_cases import WAYS, NoHostSync, feed, plain

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
# Every formulation, each with what else it needs.
KINDS: dict[str, dict[str, Any]] = {
    "depths": {"objective": "depths", "coefficients": [0.5, 0.0, 2.0, 1.0]},
    "log": {"objective": "log"},
    "detach": {"coupling": "detach"},
    "bounds": {"bounds": {1: 0.9, 3: "1.01x"}, "reference_losses": [1.0, 1.0, 0.8, 0.6]},
    "bounds of the warm-up": {"bounds": {3: "0.9x"}, "rate": None, "reference": None},
}


def make(kind: str, **options: Any) -> DescentConstraints:
    given: dict[str, Any] = {"rate": 0.2, "reference": "auto", "warmup_steps": 4, "normalize": True, "dual_lr": 0.05}
    return plain(3, **{**given, **(KINDS | WAYS)[kind], **options})


def step_on(constraints: DescentConstraints, *parts: tuple[Tensor, Tensor]) -> None:
    for losses, count in parts:
        constraints.record(losses, count)
    constraints.step()


def batches(steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Mean losses of a step, `[4]`, falling with depth on the whole, and their number of items."""
    generator = torch.Generator().manual_seed(seed)
    falling = torch.tensor([2.0, 1.7, 1.5, 1.4], dtype=torch.float64)
    for _ in range(steps):
        losses = falling * (0.7 + torch.rand(4, dtype=torch.float64, generator=generator))
        yield losses, torch.randint(1, 6, (), generator=generator)


# Objectives


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_weights_of_an_objective_are_its_gradient(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 5))
    coefficients = data.draw(st.lists(st.floats(0, 5), min_size=layers + 1, max_size=layers + 1).filter(any))
    values = data.draw(st.lists(st.floats(0.01, 100), min_size=layers + 1, max_size=layers + 1))
    losses = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    given = torch.tensor(coefficients, dtype=torch.float64)
    formulas = {"depths": (given * losses).sum(), "log": losses[-1].detach() * (given * losses.log()).sum()}
    for name, value in formulas.items():
        constraints = plain(layers, None, objective=name, coefficients=coefficients)
        assert constraints.weights().tolist() == coefficients  # before the first measurement
        for _ in range(3):
            feed(constraints, values)
        torch.testing.assert_close(constraints.weights(), torch.autograd.grad(value, losses)[0], **EXACT)


def test_a_loss_of_zero_has_a_finite_weight() -> None:
    constraints = plain(2, None, objective="log", coefficients=[1, 1, 1])
    feed(constraints, [0.0, 2.0, 1.0])
    assert constraints.weights().tolist() == [1.0, 0.5, 1.0]


@pytest.mark.parametrize(("objective", "solution"), [("log", 0.0), ("depths", -1 / 3), ("last", -1.0)])
def test_objectives_rest_where_they_should(objective: Any, solution: float) -> None:
    """ℓ_0 = (x − 1)² + 1 and ℓ_1 = 2 ((x + 1)² + 1): log ℓ_0 + log ℓ_1 = log 2 (x⁴ + 4), whatever the factor 2."""
    constraints = plain(1, None, objective=objective, coefficients=None if objective == "last" else [1, 1])
    point = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for _ in range(2000):
        losses = torch.stack([(point - 1).square() + 1, 2 * ((point + 1).square() + 1)])
        (gradient,) = torch.autograd.grad(constraints.weights() @ losses, point)
        with torch.no_grad():
            point -= 0.02 * gradient
        constraints.record(losses.detach(), 1)
        constraints.step()
    # At 0 log ℓ_0 + log ℓ_1 is flat to the third order: x falls as slowly as 1/√n.
    assert float(point.detach()) == pytest.approx(solution, abs=0.12 if objective == "log" else 1e-6)


@pytest.mark.parametrize("kind", ["depths", "log", "detach"])
def test_the_weights_of_the_warm_up_are_those_of_the_objective(kind: str) -> None:
    constraints = make(kind)
    for number, (losses, count) in enumerate(batches(6)):
        known = constraints.known_weights()
        if kind == "log" or number >= 4:
            assert known is None
        else:
            assert known is not None
            assert constraints.weights().tolist() == list(known)
            assert list(known) == KINDS[kind].get("coefficients", [0.0, 0.0, 0.0, 1.0])
        step_on(constraints, (losses, count))
    assert constraints.multipliers.any()


# Results as bounds


def solve(constraints: DescentConstraints, steps: int = 6000) -> float:
    """min ℓ_1 = ½ (x − 1)² + 1 with ℓ_0 = ½ x² + 1, under the constraints; return x."""
    point = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        losses = torch.stack([0.5 * point.square() + 1, 0.5 * (point - 1).square() + 1])
        (gradient,) = torch.autograd.grad(constraints.weights() @ losses, point)
        with torch.no_grad():
            point -= 0.05 * gradient
        constraints.record(losses.detach(), 1)
        constraints.step()
    return float(point.detach())


@pytest.mark.parametrize("dual", ["ascent"])
def test_a_bound_is_met_by_the_multiplier_that_it_takes(dual: Any) -> None:
    """ℓ_0 ≤ 1.125 means x ≤ ½, where x − 1 + μ x = 0 with μ = 1."""
    constraints = plain(1, None, bounds={0: 1.125}, dual=dual, dual_lr=0.1, resilience=None)
    assert solve(constraints) == pytest.approx(0.5, abs=1e-4)
    assert constraints.bound_multipliers is not None
    assert constraints.bound_multipliers.tolist() == pytest.approx([1.0, 0.0], abs=1e-3)
    assert constraints.multipliers.tolist() == [0.0, 0.0]
    assert constraints.report([1.125, 1.125]).bound_violation == [0.0, None]


def test_a_result_is_asked_for_and_the_rest_is_as_good_as_it_allows() -> None:
    """min log ℓ_0 s.t. ℓ_1 ≤ 1.02 · 1: the last depth may lose two percent, x = 1 − √.04 = .8."""
    constraints = plain(
        1,
        None,
        objective="log",
        coefficients=[1.0, 0.0],
        bounds={1: "1.02x"},
        reference_losses=[9.0, 1.0],
        dual="ascent",
        dual_lr=0.1,
        resilience=None,
    )
    assert solve(constraints) == pytest.approx(0.8, abs=1e-4)
    report = constraints.report([1.3, 1.03])
    assert report.bound_violation == [None, pytest.approx(0.01)]
    assert report.relative_bound_violation == [None, pytest.approx(0.01 / 1.02)]
    assert (report.worst_kind, report.worst_layer, report.feasible) == ("bound", 1, False)
    assert str(report) == (
        "Infeasible: 1 of 1 constraints is violated; the worst: depth 1 is above its bound by 0.01 "
        "(relative violation 0.98%); a bound of 1.03 would be met."
    )


def test_a_factor_is_of_what_the_warm_up_came_to() -> None:
    constraints = plain(1, None, bounds={1: "0.5x"}, warmup_steps=14, dual="ascent", dual_lr=1.0, resilience=None)
    average = 0.0
    for step in range(14):
        assert constraints.report([1.0, 1.0]).worst_layer is (1 if step else None)
        feed(constraints, [9.0, 4.0 - 0.1 * step])
        average += (4.0 - 0.1 * step - average) / min(step + 1, 10)
    for loss in (5.0, 3.0):
        feed(constraints, [9.0, loss])
    assert constraints.bound_multipliers is not None
    assert constraints.bound_multipliers.tolist() == pytest.approx([0.0, 8.0 - average])
    assert constraints.report([1.0, 3.0]).bound_violation == [None, pytest.approx(3.0 - 0.5 * average)]


# What holds for every formulation


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_is_exact(kind: str) -> None:
    """Three micro-batches at once against each by itself, and one that counts for nothing."""
    whole, parts = make(kind), make(kind)
    given, nothing = list(batches(360)), (torch.full((4,), math.nan, dtype=torch.float64), torch.tensor(0))
    for start in range(0, 360, 3):
        pieces = given[start : start + 3]
        total = sum(count for _, count in pieces)
        step_on(whole, (sum(losses * count for losses, count in pieces) / total, total))
        step_on(parts, *pieces, nothing)
        torch.testing.assert_close(parts.weights(), whole.weights(), rtol=0, atol=1e-11)
    assert whole._duals.tensors["multipliers"].max() > 1e-3
    assert int(parts.skipped_updates) == int(whole.skipped_updates) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [2, 5, 30, 61])  # in the warm-up, after it, and after an automatic reference is fixed
def test_a_restored_run_continues_bit_for_bit(kind: str, stop: int) -> None:
    straight, stopped, restored = (make(kind, dual_every=2) for _ in range(3))
    given = list(batches(120))
    for losses, count in given:
        step_on(straight, (losses, count))
    for losses, count in given[:stop]:
        step_on(stopped, (losses, count))
    state = stopped.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    restored.load_state_dict({**load_tensors(save_tensors(tensors)), **json.loads(json.dumps(rest, allow_nan=False))})
    for losses, count in given[stop:]:
        step_on(restored, (losses, count))
    for name, expected in straight.state_dict().items():
        actual = restored.state_dict()[name]
        assert torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_formulation_is_refused(kind: str) -> None:
    saved = make(kind).state_dict()
    with pytest.raises(InputError, match=r"the saved state has \w+ = "):
        make(kind, **{name: None for name in ("bounds", "reference_losses") if name in KINDS[kind]} | {
            "objective": "last", "coefficients": None, "dual": "adam", "coupling": "chain",
        }).load_state_dict(saved)  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, *WAYS])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_waits_for_the_device(kind: str, device: str) -> None:
    constraints = make(kind, device=device, dual_every=2)
    losses, count = torch.rand(4, device=device), torch.tensor(3, device=device)
    with NoHostSync():
        for _ in range(60):
            constraints.weights()
            constraints.known_weights()
            constraints.record(losses, 2)
            constraints.record(losses, count)
            constraints.step()
        constraints.epoch_end()
    assert constraints.weights().device.type == device


@pytest.mark.parametrize("kind", [*KINDS, *WAYS])
def test_the_state_keeps_its_storage(kind: str) -> None:
    constraints = make(kind)

    def storages() -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in constraints._tensors().items()}

    before, saved = storages(), constraints.state_dict()
    for losses, count in batches(60):
        step_on(constraints, (losses, count))
    constraints.epoch_end()
    constraints.load_state_dict(saved)
    assert storages() == before


@pytest.mark.parametrize("kind", [*KINDS, *list(WAYS)[::6]])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_leaves_no_trace(kind: str, broken: float) -> None:
    clean, hit = make(kind), make(kind)
    for number, (losses, count) in enumerate(batches(60)):
        step_on(clean, (losses, count))
        step_on(hit, (losses, count))
        if number > 4 and number % 7 == 0:
            worse = losses.clone()
            worse[2] = broken
            before = {name: tensor.clone() for name, tensor in hit._tensors().items()}
            action = hit.count_step()
            hit._steps -= 1
            assert action is DualAction.UPDATE
            hit.accumulate(worse, count)
            hit.apply(action)
            for name, tensor in hit._tensors().items():
                if name != "skipped_updates":
                    assert torch.equal(tensor, before[name]), name
    assert int(hit.skipped_updates) == 8
    torch.testing.assert_close(hit.weights(), clean.weights(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_step_are_the_step(kind: str) -> None:
    whole, apart = make(kind, dual_every=3), make(kind, dual_every=3)
    for losses, count in batches(40):
        step_on(whole, (losses, count))
        action = apart.count_step()
        apart.accumulate(losses, count)
        apart.apply(action)
    for name, expected in whole.state_dict().items():
        actual = apart.state_dict()[name]
        assert torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected, name


@pytest.mark.parametrize(
    ("losses", "options", "advice"),
    [
        ([1.0, 0.963, 0.2], {"rate": 0.1}, "a rate of 0.037 would be met at layer 1"),
        ([1.0, 1.0, 0.5], {"rate": 0.1}, "a rate of 0 would be met at layer 1"),
        ([1.0, 0.5, 0.6], {"rate": 0.1}, "layer 2 multiplies the loss by 1.2, so that no rate would be met there"),
        ([9.0, 0.5, 0.2], {"rate": 0.1, "reference": 1.0}, "a reference of 9 would be met"),
        ([1.0, 0.5, 0.5], {"rate": 0.6, "reference": 1.0, "coupling": "absolute"}, "lower the rate, or raise the refe"),
        ([1.0, 0.9, 0.1], {"rate": 0.6, "reference": 1.0, "coupling": "absolute"}, "lower the rate, or raise the refe"),
    ],
)
def test_a_verdict_says_what_to_change(losses: list[float], options: dict[str, Any], advice: str) -> None:
    report = plain(2, **options).report(losses)
    assert advice in report.advice
    assert report.advice in str(report)
    assert "advice" in report.as_dict()
    assert plain(2, **options).report([1.0, 0.1, 0.01]).advice == ""


# The merit of a model


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


def test_a_constraint_at_the_tolerance_is_not_counted_as_violated() -> None:
    report = plain(2, 0.0).report([1.0, 1.5, 4.0], 0.5)
    assert str(report).startswith("Infeasible: 1 of 2 constraints is violated")


def test_a_bound_that_is_no_factor_is_judged_before_the_warm_up_has_ended() -> None:
    report = plain(2, bounds={1: 0.5, 2: "1.5x"}, warmup_steps=2).report([1.0, 0.7, 0.6])
    assert report.bound_violation[1] == pytest.approx(0.2)
    assert report.bound_violation[2] is None


def test_what_was_asked_for_is_saved() -> None:
    asked = plain(2, objective="depths", coefficients=[0.0, 0.5, 1.0]).state_dict()
    assert asked["coefficients"] == "0.0, 0.5, 1.0"
    assert plain(2, bounds={1: 0.9}).state_dict()["bounds"] == "1: 0.9"
    assert {plain(2).state_dict()[name] for name in ("bounds", "coefficients")} == {"none"}


def test_a_loss_of_zero_at_a_depth_without_weight_has_no_logarithm() -> None:
    constraints = plain(1, objective="log", coefficients=[0.0, 1.0])
    assert constraints.merit([0.0, 2.0], priced=False) == pytest.approx(math.log(2.0))


# Wrong input

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"objective": "first"}, "objective must be one of 'last', 'depths', 'log', got 'first'"),
    ({"coefficients": [1.0] * 4}, 'coefficients weigh the depths of objective="depths" and "log"'),
    ({"objective": "log", "coefficients": [1.0]}, r"coefficients must be 4 numbers >= 0, one a depth, got \[1.0\]"),
    ({"objective": "log", "coefficients": [1, 1, -1, 1]}, r"coefficients\[2\] must be a finite number >= 0, got -1"),
    ({"objective": "depths", "coefficients": [0, 0, 0, 0]}, "coefficients must not all be zero"),
    ({"bounds": {4: 0.9}}, "bounds holds depth 4, which is not read: the depths are 0 to 3"),
    ({"bounds": {-1: 0.9}}, "bounds holds depth -1, which is not read"),
    ({"bounds": {"3": 0.9}}, "bounds holds depth '3', which is not read"),
    ({"bounds": {}}, r"bounds must be a dictionary of depths, such as \{3: 0.9\}, or None, got \{\}"),
    ({"bounds": [0.9]}, r"bounds must be a dictionary of depths, .* got \[0.9\]"),
    ({"bounds": {3: 0.0}}, r'bounds\[3\] must be a finite number > 0, or a factor such as "1.01x", got 0.0'),
    ({"bounds": {3: "1.01y"}}, r"bounds\[3\] must be a finite number > 0, or a factor .*, got '1.01y'"),
    ({"bounds": {3: "-2x"}}, r"bounds\[3\] must be a finite number > 0, or a factor"),
    ({"bounds": {3: "1.01x"}}, r"bounds\[3\] is a factor of the loss at the end of the warm-up, but warmup_steps is 0"),
    ({"bounds": {3: 0.9}, "reference_losses": [1.0] * 4}, "bounds holds no factor"),
    ({"bounds": {3: "1x"}, "reference_losses": [1.0]}, r"reference_losses must be 4 losses, one a depth, or None"),
    ({"bounds": {3: "1x"}, "reference_losses": [1, 1, 0, 1]}, r"reference_losses\[2\] must be a finite number > 0"),
    ({"bounds": {3: "0x"}}, r"bounds\[3\] must be a finite number > 0, or a factor"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plain(3, 0.1, 1.0, **options)
