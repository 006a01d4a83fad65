"""The constraints against autograd, a closed-form toy problem, torch's own Adam, and themselves under accumulation."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import typing
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
from cdt_fast.constraints.presets import DEFAULTS, REFERENCE_MEASUREMENTS, DescentOptions, options_of
from cdt_fast.errors import InputError
from cdt_fast.tasks import TASKS
from tests.constraints.constraint_cases import (
    TOY_MULTIPLIERS,
    TOY_POINT,
    WAYS,
    NoHostSync,
    feed,
    plain,
    random_losses,
    run_toy,
    toy_constraints,
)

DUALS = ("ascent", "adam")
RESILIENCES = ("slack", "decay", None)
COUPLINGS = ("chain", "detach", "absolute")
MODES = ("constraint", "anchor")
NOT_OPTIONS = ("layers", "device", "dtype")


def set_multipliers(constraints: DescentConstraints, values: list[float]) -> None:
    constraints.multipliers.copy_(torch.tensor(values, dtype=torch.float64))


# The Lagrangian and its weights


def lagrangian(
    losses: Tensor, multipliers: Tensor, rates: list[float], reference: float | None, coupling: str, mode: str
) -> Tensor:
    """docs/constraints.md §2 with its variants, written out term by term."""
    total = losses[-1]
    if reference is not None and mode == "constraint":
        total = total + multipliers[0] * (losses[0] - reference)
    bound = reference
    for layer, rate in enumerate(rates, start=1):
        before = losses[layer - 1]
        if layer == 1 and mode == "anchor":
            before = torch.tensor(reference, dtype=torch.float64)
        if coupling == "detach":
            before = before.detach()
        if coupling == "absolute":
            assert bound is not None
            bound = bound * (1 - rate)
            total = total + multipliers[layer] * (losses[layer] - bound)
        else:
            total = total + multipliers[layer] * (losses[layer] - (1 - rate) * before)
    return total


@pytest.mark.parametrize(
    ("coupling", "mode", "reference"),
    [*itertools.product(COUPLINGS, MODES, [1.7]), ("chain", "constraint", None), ("detach", "constraint", None)],
)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_weights_are_the_gradient_of_the_lagrangian(
    coupling: str, mode: str, reference: float | None, data: st.DataObject
) -> None:
    layers = data.draw(st.integers(1, 5))
    rates = data.draw(st.lists(st.floats(0, 0.9), min_size=layers, max_size=layers))
    values = data.draw(st.lists(st.floats(0, 100), min_size=layers + 1, max_size=layers + 1))
    if reference is None or mode == "anchor":
        values[0] = 0.0  # no such constraint, so no update ever moves its multiplier
    constraints = plain(layers, rates, reference, coupling=coupling, reference_mode=mode)
    set_multipliers(constraints, values)

    losses = torch.linspace(2, 1, layers + 1, dtype=torch.float64, requires_grad=True)
    total = lagrangian(losses, constraints.multipliers.clone(), rates, reference, coupling, mode)
    (gradient,) = torch.autograd.grad(total, losses)
    torch.testing.assert_close(constraints.weights(), gradient, rtol=1e-13, atol=1e-13)


def test_weights_are_new_and_outside_autograd() -> None:
    constraints = plain(2, 0.1, 1.0)
    weights = constraints.weights()
    feed(constraints, [2.0, 2.0, 2.0])
    assert weights.tolist() == [0.0, 0.0, 1.0]
    assert constraints.weights().tolist() != [0.0, 0.0, 1.0]
    assert not weights.requires_grad


@pytest.mark.parametrize(("coupling", "mode"), [*itertools.product(COUPLINGS, MODES)])
def test_ascent_follows_the_gradient_of_the_lagrangian_in_the_multipliers(coupling: str, mode: str) -> None:
    rates, reference = [0.1, 0.3, 0.2], 1.7
    constraints = plain(
        3, rates, reference, coupling=coupling, reference_mode=mode, dual="ascent", dual_lr=0.5, resilience=None
    )
    start = [0.0 if mode == "anchor" else 2.0, 3.0, 4.0, 5.0]
    set_multipliers(constraints, start)
    feed(constraints, [2.0, 1.9, 1.1, 1.2])
    multipliers = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    losses = torch.tensor([2.0, 1.9, 1.1, 1.2], dtype=torch.float64)
    (violation,) = torch.autograd.grad(lagrangian(losses, multipliers, rates, reference, coupling, mode), multipliers)
    torch.testing.assert_close(constraints.multipliers, multipliers.detach() + 0.5 * violation)


@pytest.mark.parametrize("coupling", ["chain", "detach", "absolute"])
@pytest.mark.parametrize("mode", MODES)
def test_a_margin_lowers_every_bound_in_training_and_none_in_the_report(coupling: str, mode: str) -> None:
    rates, losses = [0.1, 0.3], torch.tensor([2.0, 1.9, 1.8], dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"coupling": coupling, "reference_mode": mode}
    with_margin = plain(2, rates, 1.7, margin=0.2, dual="ascent", dual_lr=1.0, resilience=None, **options)
    start = torch.tensor([0.0 if mode == "anchor" else 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    set_multipliers(with_margin, start.tolist())
    before = [losses[0], losses[1]] if coupling == "chain" else [losses[0].detach(), losses[1].detach()]
    bounds = [torch.tensor(1.7), 0.9 * (torch.tensor(1.7) if mode == "anchor" else before[0]), 0.7 * before[1]]
    if coupling == "absolute":
        bounds[1:] = [torch.tensor(1.7 * 0.9), torch.tensor(1.7 * 0.9 * 0.7)]
    violations = [loss - 0.8 * bound for loss, bound in zip(losses, bounds, strict=True)]
    total = losses[-1] + sum(multiplier * g for multiplier, g in zip(start, violations, strict=True))
    weights, moves = torch.autograd.grad(total, (losses, start))
    if mode == "anchor":
        moves[0] = 0.0
    torch.testing.assert_close(with_margin.weights(), weights)
    without = plain(2, rates, 1.7, **options)
    assert with_margin.report(losses.detach()).violation == without.report(losses.detach()).violation
    feed(with_margin, losses.tolist())
    torch.testing.assert_close(with_margin.multipliers, (start + moves).detach())


# The rules


def test_adam_is_torchs_adam() -> None:
    torch.manual_seed(0)
    constraints = plain(2, 0.0, 1.0, dual="adam", dual_lr=0.03, betas=(0.9, 0.99), resilience="decay")
    multipliers = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.Adam([multipliers], lr=0.03, betas=(0.9, 0.99), maximize=True, eps=1e-8)
    for _ in range(200):
        losses = 1 + torch.rand(3, dtype=torch.float64)
        violation = losses - torch.cat([torch.ones(1, dtype=torch.float64), losses[:-1]])
        constraints.record(losses, 1)
        constraints.step()
        multipliers.grad = violation - multipliers.detach()
        optimizer.step()
        multipliers.data.clamp_(min=0)
        torch.testing.assert_close(constraints.multipliers, multipliers.detach(), rtol=0, atol=1e-12)
    assert constraints.multipliers.max() > 0.1


@pytest.mark.parametrize("dual", DUALS)
def test_multipliers_stay_non_negative(dual: str) -> None:
    constraints = plain(2, 0.1, 1.0, dual=dual, dual_lr=0.5)
    feed(constraints, [3.0, 3.0, 3.0], *[[0.5, 0.1, 0.01]] * 20)
    assert constraints.multipliers.tolist() == [0.0, 0.0, 0.0]


def test_slack_lr_defaults_to_a_tenth_of_the_way() -> None:
    constraints = plain(1, 0.0, 1.0, dual="ascent", slack_cost=4.0)
    set_multipliers(constraints, [2.0, 0.0])
    feed(constraints, [1.0, 1.0])
    assert constraints.slacks.tolist() == pytest.approx([0.1 * 2.0 / 4.0, 0.0])


def test_a_slack_that_overshoots_is_projected() -> None:
    constraints = plain(1, 0.0, 1.0, dual="ascent", slack_cost=1.0, slack_lr=1.5)
    constraints.slacks.fill_(2.0)
    feed(constraints, [1.0, 1.0])
    assert constraints.slacks.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("dual", "resilience"), [(dual, resilience) for dual in DUALS for resilience in ("slack", "decay")]
)
def test_infeasible_toy_comes_to_rest_at_the_resilient_solution(dual: str, resilience: str) -> None:
    constraints = toy_constraints(dual=dual, resilience=resilience)
    point, _ = run_toy(constraints, 1500)
    torch.testing.assert_close(point, TOY_POINT, rtol=0, atol=1e-4)
    torch.testing.assert_close(constraints.multipliers, TOY_MULTIPLIERS, rtol=0, atol=1e-4)
    expected = TOY_MULTIPLIERS / 0.5 if resilience == "slack" else torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(constraints.slacks, expected, rtol=0, atol=2e-4)


def test_infeasible_toy_decoupled_decay_rests_elsewhere() -> None:
    """Why the decay is inside the gradient of Adam: the same problem with AdamW on the multipliers."""
    target = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    point = torch.zeros(3, dtype=torch.float64)
    multipliers = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.AdamW([multipliers], lr=0.01, betas=(0.0, 0.999), weight_decay=1 / 0.5, maximize=True)
    for _ in range(3000):
        first, second, _ = point
        multipliers.grad = torch.stack([first + 1, 1 - first, second - 1])
        held = multipliers.detach().clone()
        point = point - 0.05 * (point - target + torch.stack([held[0] - held[1], held[2], 0 * held[2]]))
        optimizer.step()
        multipliers.data.clamp_(min=0)
    assert (multipliers.detach() - TOY_MULTIPLIERS[:3]).abs().max() > 0.1


@pytest.mark.parametrize("dual", DUALS)
def test_infeasible_toy_without_resilience_sends_the_multipliers_off(dual: str) -> None:
    peaks = [run_toy(toy_constraints(dual=dual, resilience=None), steps)[1][:2].min() for steps in (500, 1000)]
    assert peaks[1] > 1.8 * peaks[0] > 5


def test_feasible_toy_dual_momentum_overshoots() -> None:
    peaks = {}
    for name, options in {
        "momentum": {"dual": "adam", "betas": (0.9, 0.999), "dual_lr": 0.05},
        "default": {"dual": "adam", "dual_lr": 0.05},
    }.items():
        _, peak = run_toy(toy_constraints(resilience=None, **options), 800, feasible=True)
        peaks[name] = float(peak[2])
    assert peaks["momentum"] > 1.9
    assert 1 < peaks["default"] < 1.5


def test_feasible_toy_is_solved_without_resilience() -> None:
    constraints = toy_constraints(dual="ascent", dual_lr=0.05, resilience=None)
    point, peak = run_toy(constraints, 1500, feasible=True)
    assert point.tolist() == pytest.approx([1.0, 1.0, 0.0], abs=1e-5)
    assert constraints.multipliers.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0], abs=1e-5)
    assert float(peak[2]) > 1.1


# Warm-up, windows, epochs, accumulation


@pytest.mark.parametrize(("dual", "resilience"), [*itertools.product(DUALS, RESILIENCES)])
def test_accumulation_is_exact_for_unequal_counts(dual: str, resilience: str | None) -> None:
    """1 × 8 against 3 + 1 + 2 + 2 items, through a model: the mean of the micro-batch means would not do."""

    def train(sizes: list[int]) -> tuple[DescentConstraints, Tensor]:
        torch.manual_seed(0)
        model = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        constraints = plain(3, 0.2, 0.5, dual=dual, dual_lr=0.05, resilience=resilience)
        for _ in range(60):
            inputs, target = torch.randn(2, 8, 4, dtype=torch.float64)
            weights = constraints.weights()
            for part, wanted in zip(inputs.split(sizes), target.split(sizes), strict=True):
                hidden = [part]
                for layer in model:
                    hidden.append(hidden[-1] + 0.1 * layer(hidden[-1]).tanh())
                losses = torch.stack([(each - wanted).square().mean() for each in hidden])
                ((weights @ losses) * len(part) / 8).backward()
                constraints.record(losses, torch.tensor(len(part)))
            optimizer.step()
            optimizer.zero_grad()
            constraints.step()
        return constraints, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    whole, whole_parameters = train([8])
    parts, parts_parameters = train([3, 1, 2, 2])
    assert whole.multipliers.max() > 0.1
    torch.testing.assert_close(parts.weights(), whole.weights(), rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.multipliers, whole.multipliers, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts_parameters, whole_parameters, rtol=0, atol=1e-12)


# The reference


def test_auto_reference_is_the_mean_of_the_first_measurements() -> None:
    constraints = plain(1, 0.0, "auto", dual="ascent", dual_lr=1.0, resilience=None, warmup_steps=5)
    values = [1.0 + 0.1 * index for index in range(REFERENCE_MEASUREMENTS)]
    for value in values[:-1]:
        feed(constraints, [value, value - 0.5])
    assert constraints.multipliers.tolist() == [0.0, 0.0]
    assert constraints.report([9.0, 1.0]).violation[0] is None
    feed(constraints, [values[-1], 0.0])
    mean = sum(values) / len(values)
    assert float(constraints.reference_level) == pytest.approx(mean, rel=1e-12)
    assert constraints.multipliers.tolist() == pytest.approx([values[-1] - mean, 0.0])
    feed(constraints, [500.0, 0.0])
    assert float(constraints.reference_level) == pytest.approx(mean, rel=1e-12)
    assert constraints.report([9.0, 1.0]).violation[0] == pytest.approx(9.0 - mean)


def test_adam_takes_a_late_constraint_for_a_new_one() -> None:
    constraints = plain(1, 0.0, "auto", dual_lr=0.01, resilience=None)
    feed(constraints, *[[2.0, 3.0]] * REFERENCE_MEASUREMENTS)
    feed(constraints, [3.0, 3.0])
    # The 20th measurement, with a violation of zero, was its first update, so this is its second.
    assert float(constraints.multipliers[0]) == pytest.approx(0.01 / math.sqrt(0.001 / (1 - 0.999**2)), rel=1e-6)


# Losses that are not finite


@pytest.mark.parametrize("count", [torch.tensor(0), 0])
def test_a_mean_over_nothing_adds_nothing(count: Any) -> None:
    with_it, without = (plain(2, 0.1, 1.0) for _ in range(2))
    for step in range(3):
        with_it.accumulate(torch.full((3,), math.nan), count)
        feed(with_it, [2.0 + step, 3.0, 4.0])
        feed(without, [2.0 + step, 3.0, 4.0])
    assert int(with_it.skipped_updates) == 0
    assert torch.equal(with_it.multipliers, without.multipliers)


def test_what_overflows_on_the_way_is_skipped_too() -> None:
    constraints = plain(2, 0.1, 1.0, dual="ascent", normalize=True)
    feed(constraints, [2.0, 0.0, 1.0])  # g_2 relative to a loss of zero
    constraints.record(torch.zeros(3, dtype=torch.float64), torch.tensor(0))
    constraints.step()
    adam = plain(2, 0.1, 1.0, dual="adam", resilience=None)
    feed(adam, [1e200, 1.0, 1.0])
    assert int(constraints.skipped_updates) == 2
    assert int(adam.skipped_updates) == 1
    assert constraints.multipliers.tolist() == adam.multipliers.tolist() == [0.0, 0.0, 0.0]


# No waiting for the device, no new storage


def test_the_probe_for_host_synchronization_works() -> None:
    value = torch.ones(())
    for read in (float, bool, torch.Tensor.item):
        with pytest.raises(AssertionError, match="host synchronization"), NoHostSync():
            read(value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_cuda() -> None:
    every = [plain(3, 0.1, "auto", normalize=True, device="cuda", **kind) for kind in WAYS.values()]
    losses, count = torch.rand(4, device="cuda"), torch.tensor(2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for constraints, _ in itertools.product(every, range(3)):
            constraints.weights()
            constraints.record(losses, 2)
            constraints.record(losses, count)
            constraints.step()
            constraints.epoch_end()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_state_goes_where_the_first_losses_are_and_stays() -> None:
    constraints = plain(1)
    assert constraints.device.type == "cpu"
    constraints.record(torch.ones(2, device="meta"), 1)
    assert constraints.device.type == "meta"
    assert constraints.weights().device.type == "meta"
    with pytest.raises(InputError, match=r"losses is on cpu; expected meta"):
        constraints.record(torch.ones(2), 1)
    assert plain(1, device="meta").multipliers.device.type == "meta"
    with pytest.raises(InputError, match=r"on meta; expected cpu"):
        plain(1, device="cpu").record(torch.ones(2, device="meta"), 1)


def test_dtype() -> None:
    assert plain(1).weights().dtype == torch.float64
    constraints = plain(1, 0.0, 1.0, dtype=torch.float32)
    feed(constraints, [2.0, 2.0])
    assert constraints.weights().dtype == torch.float32
    assert constraints.multipliers[0] > 0


def test_low_precision_losses_are_accumulated_in_double() -> None:
    constraints = plain(1, 0.0, 1.0, dual="ascent", dual_lr=1.0, resilience=None)
    for _ in range(1000):
        constraints.record(torch.full((2,), 1.5, dtype=torch.bfloat16), 1)
    constraints.step()
    assert constraints.multipliers.tolist() == [0.5, 0.0]


# Saving and restoring


@pytest.mark.parametrize(("dual", "resilience"), [*itertools.product(DUALS, RESILIENCES)])
@pytest.mark.parametrize("stop", [7, 23, 61])  # in the warm-up, before and after the automatic reference is fixed
def test_a_restored_run_continues_bit_for_bit(dual: str, resilience: str | None, stop: int) -> None:
    def make() -> DescentConstraints:
        return plain(3, [0.1, 0.2, 0.3], "auto", dual=dual, resilience=resilience, warmup_steps=9, dual_every=2)

    def run(constraints: DescentConstraints, losses: Iterator[tuple[Tensor, int]], first: int, last: int) -> None:
        for micro_batch in range(first, last):  # two micro-batches a step, so an odd stop is inside an accumulation
            constraints.record(*next(losses))
            if micro_batch % 2:
                constraints.step()

    straight, stopped, restored = make(), make(), make()
    losses = random_losses()
    run(straight, losses, 0, 121)
    losses = random_losses()
    run(stopped, losses, 0, stop)
    state = stopped.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    restored.load_state_dict({**load_tensors(save_tensors(tensors)), **json.loads(json.dumps(rest, allow_nan=False))})
    run(restored, losses, stop, 121)
    for name, expected in straight.state_dict().items():
        actual = restored.state_dict()[name]
        same = torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected
        assert same, name
    assert straight.multipliers.max() > 0


def test_a_state_dict_is_a_copy() -> None:
    constraints = plain(1, 0.1, 1.0)
    state = constraints.state_dict()
    feed(constraints, [2.0, 2.0])
    assert state["multipliers"].tolist() == [0.0, 0.0]


DIFFERENT: dict[str, Any] = {
    "layers": 4,
    "rate": 0.2,
    "reference": 2.0,
    "dual": "ascent",
    "dual_lr": 0.5,
    "betas": (0.5, 0.999),
    "resilience": None,
    "slack_cost": 3.0,
    "slack_lr": 0.01,
    "coupling": "detach",
    "reference_mode": "anchor",
    "normalize": True,
    "margin": 0.1,
    "warmup_steps": 1,
    "dual_every": 2,
    "dtype": torch.float32,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_state_of_other_settings_is_refused(name: str) -> None:
    options: dict[str, Any] = {"layers": 3, "rate": 0.1, "reference": 1.0}
    saved = plain(**{**options, name: DIFFERENT[name]}).state_dict()
    here = plain(**options)
    feed(here, [2.0, 2.0, 2.0, 2.0])
    before = here.multipliers.clone()
    with pytest.raises(InputError, match=f"the saved state has {'first_beta' if name == 'betas' else name} = "):
        here.load_state_dict(saved)
    assert torch.equal(here.multipliers, before)


def test_a_damaged_state_is_refused() -> None:
    constraints = plain(2)
    state = constraints.state_dict()
    with pytest.raises(InputError, match=r"lacks \['slacks'\] and has the unknown \['odd'\]"):
        constraints.load_state_dict({**{name: state[name] for name in state if name != "slacks"}, "odd": 1})
    for wrong in (torch.zeros(7), [0.0, 0.0, 0.0]):
        with pytest.raises(InputError, match=r"the saved multipliers is .* expected a tensor of shape \[3\]"):
            constraints.load_state_dict({**state, "multipliers": wrong})
    for name in ("multipliers", "slacks", "first_moment", "second_moment", "updates"):
        with pytest.raises(InputError, match=f"the saved {name} is .*nan.* expected finite numbers"):
            constraints.load_state_dict({**state, name: torch.tensor([0.0, torch.nan, 0.0])})
    for count in (-1, 1.0, "1", None, True):
        with pytest.raises(InputError, match="the saved steps must be an integer >= 0"):
            constraints.load_state_dict({**state, "steps": count})
    constraints.load_state_dict({**state, "accumulated": torch.full((4,), torch.nan)})


# The report


def test_report_of_a_feasible_solution() -> None:
    report = plain(2, [0.1, 0.2], 1.0).report([1.0, 0.8, 0.6])
    assert report.feasible
    assert report.violation == pytest.approx([0.0, -0.1, -0.04])
    assert report.relative_violation == pytest.approx([0.0, -0.1, -0.05])
    assert report.ratio == pytest.approx([0.8, 0.75])
    assert (report.worst_layer, report.worst_violation) == (0, 0.0)
    assert str(report) == (
        "Feasible: all 3 constraints hold; the tightest, depth 0 (the reference), has 0.00% to spare."
    )


def test_report_of_an_infeasible_solution() -> None:
    report = plain(3, 0.1, 1.0).report(torch.tensor([1.05, 0.9, 0.9, 0.95]))
    assert not report.feasible
    assert report.violation == pytest.approx([0.05, -0.045, 0.09, 0.14], abs=1e-6)
    assert report.relative_violation == pytest.approx([0.05, -0.045 / 1.05, 0.1, 0.14 / 0.9], abs=1e-6)
    assert report.worst_layer == 3
    assert report.worst_violation == pytest.approx(0.14 / 0.9, abs=1e-6)
    assert str(report) == (
        "Infeasible: 3 of 4 constraints are violated; the worst: layer 3 is above its bound by 0.14 "
        "(relative violation 15.56%); layer 3 multiplies the loss by 1.06, so that no rate would be met there."
    )


def test_report_tolerance_is_relative() -> None:
    constraints = plain(1, 0.0)
    assert constraints.report([100.0, 104.0], tolerance=0.05).feasible
    assert not constraints.report([100.0, 104.0], tolerance=0.03).feasible
    assert not constraints.report([100.0, 104.0]).feasible
    assert "by 4 (relative violation 4.00%), within the tolerance of 5.00%" in str(constraints.report([100, 104], 0.05))


def test_report_leaves_out_what_is_no_constraint() -> None:
    report = plain(2, 0.1).report([1.0, 0.8, 0.6])
    assert report.violation[0] is None
    assert report.relative_violation[0] is None
    assert report.feasible
    anchored = plain(2, 0.1, 1.0, reference_mode="anchor").report([9.0, 0.8, 0.6])
    assert anchored.violation == [None, pytest.approx(-0.1), pytest.approx(-0.12)]
    assert anchored.relative_violation == [None, pytest.approx(-0.1), pytest.approx(-0.15)]
    absolute = plain(2, 0.5, 8.0, coupling="absolute").report([9.0, 3.0, 3.0])
    assert absolute.violation == pytest.approx([1.0, -1.0, 1.0])
    assert absolute.relative_violation == pytest.approx([1 / 8, -1 / 4, 1 / 2])
    assert absolute.worst_layer == 2


def test_report_before_the_auto_reference_is_fixed() -> None:
    report = plain(2, 0.1, "auto", coupling="absolute").report([1.0, 0.5, 0.2])
    assert not report.feasible
    assert report.violation == [None, None, None]
    assert (report.worst_layer, report.worst_violation) == (None, None)
    assert str(report) == (
        "No verdict: none of the 3 constraints is in force yet: they wait for the warm-up, or for the 20 measurements "
        "of an automatic reference."
    )
    anchored = plain(2, 0.1, "auto", reference_mode="anchor").report([1.0, 0.5, 0.2])
    assert anchored.feasible
    assert (anchored.judged, anchored.unjudged) == (1, 1)
    assert str(anchored) == (
        "Feasible: 1 of 2 constraints are judged, and hold; the tightest, layer 2, has 50.00% to spare."
    )


def test_report_without_constraints_is_no_verdict() -> None:
    for constraints in (plain(2, None), plain(2, None, "auto", reference_mode="anchor")):
        report = constraints.report([1.0, 1.0, 1.0])
        assert not constraints.any
        assert (report.worst_layer, report.judged, report.unjudged) == (None, 0, 0)
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
    assert report.feasible
    assert report.caveat == caveat
    assert ("all 3" in str(report)) == (not caveat)
    assert caveat in str(report)
    assert not plain(2, 0.05, 12.0, **options).report([20.0, 20.0, 21.0]).caveat  # it is violated


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 20),
        ({"dual_every": 3}, 60),
        ({"dual_every": 3, "warmup_steps": 8}, 44),
        ({"dual_every": 3, "warmup_steps": 20}, 20),
        ({"dual_every": 3, "warmup_steps": 50}, 20),
    ],
)
def test_steps_to_reference_are_those_until_its_constraint_is_judged(options: dict[str, int], steps: int) -> None:
    constraints = plain(1, 0.1, "auto", reference_mode="anchor", **options)
    assert constraints.steps_to_reference() == steps
    for step in range(1, steps + 1):
        constraints.record(torch.tensor([1.0, 0.5]), 1)
        constraints.step()
        assert constraints.report([1.0, 0.5]).judged == (step == steps)
    assert plain(1, None, "auto", reference_mode="anchor").steps_to_reference() == 0
    assert plain(1, 0.1, 1.0).steps_to_reference() == 0


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


def test_report_of_losses_of_zero() -> None:
    report = plain(2, 0.1, 1.0).report([0.0, 0.0, 0.1])
    assert report.relative_violation == [-1.0, 0.0, math.inf]
    assert report.worst_layer == 2
    assert not report.feasible
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["worst_violation"] is None


def test_report_as_dict_holds_every_field() -> None:
    stored = json.loads(json.dumps(plain(2, 0.1).report([1.0, 0.8, 0.6]).as_dict(), allow_nan=False))
    assert stored == {
        "feasible": True,
        "finite": True,
        "violation": [None, pytest.approx(-0.1), pytest.approx(-0.12)],
        "relative_violation": [None, pytest.approx(-0.1), pytest.approx(-0.15)],
        "ratio": [pytest.approx(0.8), pytest.approx(0.75)],
        "worst_layer": 1,
        "worst_violation": pytest.approx(-0.1),
        "tolerance": 0.0,
        "worst_kind": "descent",
        "bound_violation": [],
        "relative_bound_violation": [],
        "advice": "",
        "unjudged": 0,
        "caveat": "",
    }


# Defaults, presets and errors


def test_the_constructor_has_the_defaults_of_the_command_line() -> None:
    parameters = inspect.signature(DescentConstraints).parameters
    options = {name: parameter.default for name, parameter in parameters.items() if name not in NOT_OPTIONS}
    assert options == dataclasses.asdict(DEFAULTS)
    for task, entry in TASKS.items():
        expected, settings = options_of(task), vars(entry.settings().constraints)
        # Settings of their own: on or off, and a warm-up counted in epochs.
        assert set(settings) - set(expected) == {"constrained", "warmup_epochs"}
        assert set(expected) - set(settings) == {"warmup_steps"}
        assert entry.settings().objective == expected.pop("objective")
        for name in set(settings) & set(expected):
            assert settings[name] == (list(expected[name]) if name == "betas" else expected[name]), (task, name)


def test_the_defaults_are_what_they_were_measured_to_be() -> None:
    """What the docs' results are of: where one changes, they do."""
    assert REFERENCE_MEASUREMENTS == 20
    chosen: tuple[tuple[dict[str, Any], float], ...] = (
        ({}, 0.002),
        ({"objective": "log"}, 0.05),
        ({"dual": "ascent"}, 0.05),
        ({"dual_lr": 0.3}, 0.3),
    )
    for options, rate in chosen:
        assert DescentConstraints(2, **options)._duals.settings["dual_lr"] == rate
    assert dataclasses.asdict(DEFAULTS) == {
        "rate": 0.01,
        "reference": "auto",
        "objective": "last",
        "coefficients": None,
        "bounds": None,
        "reference_losses": None,
        "dual": "adam",
        "dual_lr": None,
        "betas": (0.0, 0.9),
        "resilience": "slack",
        "slack_cost": 10.0,
        "slack_lr": None,
        "coupling": "detach",
        "reference_mode": "anchor",
        "normalize": True,
        "margin": 0.02,
        "warmup_steps": 0,
        "dual_every": 1,
    }


def test_the_types_of_the_options_are_those_of_the_constructor() -> None:
    constructor = typing.get_type_hints(DescentConstraints.__init__)
    for name, kind in typing.get_type_hints(DescentOptions).items():
        assert constructor[name] == kind, name


@pytest.mark.parametrize(
    ("name", "rate", "margin", "reference", "mode", "betas", "resilience", "coupling"),
    [
        ("paper-dust", 0.25, 0.0, 6.5, "constraint", (0.9, 0.999), "slack", "chain"),
        ("paper-text-ut", 0.1, 0.0, 0.9, "anchor", (0.9, 0.999), "slack", "chain"),
        ("paper-llama", 0.05, 0.0, 12.0, "anchor", (0.9, 0.999), "slack", "chain"),
        ("safe", 0.01, 0.02, "auto", "constraint", (0.0, 0.999), "decay", "detach"),
        ("video", 0.01, 0.01, "auto", "anchor", (0.0, 0.9), "slack", "detach"),
        ("text", 0.01, 0.02, 0.9, "anchor", (0.0, 0.9), "slack", "detach"),
        ("lm", 0.05, 0.02, "auto", "anchor", (0.0, 0.9), "slack", "detach"),
    ],
)
def test_presets(
    name: Any,
    rate: float,
    margin: float,
    reference: Any,
    mode: str,
    betas: tuple[float, float],
    resilience: str,
    coupling: str,
) -> None:
    state = DescentConstraints.preset(name, 2).state_dict()
    assert (state["rate"], state["margin"]) == (f"{rate}, {rate}", margin)
    assert (state["reference"], state["reference_mode"]) == (reference, mode)
    assert (state["dual"], state["first_beta"], state["second_beta"]) == ("adam", *betas)
    assert (state["resilience"], state["coupling"]) == (resilience, coupling)
    assert state["normalize"] == (not name.startswith("paper"))
    assert state["warmup_steps"] == 0


def test_options_can_be_read() -> None:
    constraints = plain(2, 0.1, 1.0, coupling="detach", reference_mode="anchor", margin=0.2, normalize=True)
    assert (constraints.coupling, constraints.reference_mode, constraints.margin) == ("detach", "anchor", 0.2)
    assert (constraints.layers, constraints.reference, constraints.normalize) == (2, 1.0, True)


def test_overrides_win_over_a_preset() -> None:
    state = DescentConstraints.preset("paper-dust", 2, rate=[0.1, 0.2], dual="ascent", warmup_steps=7).state_dict()
    assert (state["rate"], state["dual"], state["warmup_steps"], state["reference"]) == ("0.1, 0.2", "ascent", 7, 6.5)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"layers": 0}, "layers must be an integer >= 1, got 0"),
    ({"layers": 2.0}, "layers must be an integer >= 1, got 2.0"),
    ({"layers": True}, "layers must be an integer >= 1, got True"),
    ({"rate": 1.0}, r"rate must be a number in \[0, 1\), or a sequence of 3 of them, one a layer, got 1.0"),
    ({"rate": -0.1}, "rate must be .*, got -0.1"),
    ({"rate": "0.1"}, "rate must be .*, got '0.1'"),
    ({"rate": [0.1, 0.2]}, "rate has 2 entries; expected a number, or a sequence of 3, one a layer"),
    ({"rate": [0.1, 0.2, math.nan]}, r"rate\[2\] must be a number in \[0, 1\), got nan"),
    ({"reference": 0.0}, 'reference must be a finite number > 0, "auto" or None, got 0.0'),
    ({"reference": math.inf}, "reference must be .*, got inf"),
    ({"reference": "first"}, "reference must be .*, got 'first'"),
    ({"reference": None, "coupling": "absolute"}, 'reference is None; coupling="absolute" needs one'),
    ({"reference": None, "reference_mode": "anchor"}, 'reference is None; reference_mode="anchor" needs one'),
    ({"dual": "sgd"}, "dual must be one of 'ascent', 'adam', got 'sgd'"),
    ({"dual_lr": 0}, "dual_lr must be a finite number > 0, got 0"),
    ({"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\), got \(0.9,\)"),
    ({"betas": 0.9}, "betas must be .*, got 0.9"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\] must be a number in \[0, 1\), got 1.0"),
    ({"resilience": "slacks"}, "resilience must be one of 'slack', 'decay', None, got 'slacks'"),
    ({"slack_cost": 0.0}, "slack_cost must be a finite number > 0, got 0.0"),
    ({"slack_lr": -1.0}, "slack_lr must be a finite number > 0, got -1.0"),
    ({"slack_lr": 0.5, "slack_cost": 5.0}, "slack_lr is 0.5; expected less than 2 / slack_cost = 0.4"),
    ({"slack_lr": 4.0, "slack_cost": 0.5}, "slack_lr is 4.0; expected less than 2 / slack_cost = 4"),
    (
        {"dual": "ascent", "resilience": "decay", "dual_lr": 1.0, "slack_cost": 0.5},
        r'dual_lr is 1.0; expected less than 2 × slack_cost = 1 with resilience="decay"',
    ),
    ({"coupling": "none"}, "coupling must be one of 'chain', 'detach', 'absolute', got 'none'"),
    ({"reference_mode": "hold"}, "reference_mode must be one of 'constraint', 'anchor', got 'hold'"),
    ({"margin": 1.0}, r"margin must be a number in \[0, 1\), got 1.0"),
    ({"warmup_steps": -1}, "warmup_steps must be an integer >= 0, got -1"),
    ({"dual_every": 0}, "dual_every must be an integer >= 1, got 0"),
    ({"dtype": torch.float16}, "dtype must be one of torch.float32, torch.float64, got torch.float16"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plain(**{"layers": 3, "reference": 1.0, **options})


def test_wrong_preset() -> None:
    with pytest.raises(InputError, match=r"preset must be one of video, .* paper-llama, got 'paper-vidoe'"):
        DescentConstraints.preset("paper-vidoe", 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="the constraints have no option 'dual_learning_rate'; known: rate, reference"):
        DescentConstraints.preset("lm", 3, dual_learning_rate=0.1)


@pytest.mark.parametrize(
    ("losses", "count", "message"),
    [
        (torch.zeros(2), 1, r"losses is \(2,\); expected a tensor of shape \(3,\), a mean per depth"),
        ([1.0, 1.0, 1.0], 1, "losses is list; expected a tensor"),
        (torch.zeros(3), 0, "count must be a number > 0, got 0"),
        (torch.zeros(3), -2.0, "count must be .*, got -2.0"),
        (torch.zeros(3), math.nan, "count must be .*, got nan"),
        (torch.zeros(3), "8", "count must be .*, got '8'"),
        (torch.zeros(3), torch.ones(2), r"count has shape \(2,\); expected one element"),
    ],
)
def test_wrong_records(losses: Any, count: Any, message: str) -> None:
    constraints = plain(2)
    with pytest.raises(InputError, match=message):
        constraints.record(losses, count)
    with pytest.raises(InputError, match="nothing was recorded since the last step"):
        constraints.step()


def test_step_needs_a_record_every_time() -> None:
    constraints = plain(2, dual_every=3)
    feed(constraints, [1.0, 1.0, 1.0])
    with pytest.raises(InputError, match=r"nothing was recorded since the last step\(\); expected record"):
        constraints.step()


def test_wrong_report() -> None:
    with pytest.raises(InputError, match=r"losses has shape \(2,\); expected \(3,\), one a depth"):
        plain(2).report([1.0, 1.0])
    with pytest.raises(InputError, match=r"tolerance must be a finite number >= 0, got -0.1"):
        plain(2).report([1.0, 1.0, 1.0], tolerance=-0.1)
