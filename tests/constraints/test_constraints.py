"""The constraints against hand-solved problems, and against themselves when accumulated, restored and interrupted."""

from __future__ import annotations

import dataclasses
import inspect
import io
import itertools
import math
import shutil
import typing
from typing import Any

import numpy as np
import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.constraints.presets import DEFAULTS, REFERENCE_MEASUREMENTS, DescentOptions, options_of
from cdt_fast.tasks import TASKS
from tests.constraints.constraint_cases import DUALS, KINDS, WARMUP, NoHostSync, batches, feed, make, plain, step_on
from tests.runs import flat

# Each coupling and resilience once, where all combinations would take long.
SOME_KINDS = [*list(KINDS)[:4], *list(KINDS)[4::7]]


def test_weights_are_new_and_outside_autograd() -> None:
    constraints = plain(2, 0.1, 1.0)
    weights = constraints.weights()
    feed(constraints, [2.0, 2.0, 2.0])
    assert weights.tolist() == [0.0, 0.0, 1.0]
    assert constraints.weights().tolist() != [0.0, 0.0, 1.0]
    assert not weights.requires_grad
    of_objectives = [make(kind).objective_weights() for kind in ("depths", "log", "bounds")]
    assert of_objectives == [(0.5, 0.0, 2.0, 1.0), None, (0.0, 0.0, 0.0, 1.0)]


def test_a_loss_of_zero_has_a_finite_weight() -> None:
    constraints = plain(2, None, objective="log")
    feed(constraints, [0.0, 2.0, 1.0])
    assert constraints.weights().tolist() == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("dual", DUALS)
@pytest.mark.parametrize("resilience", ["slack", "decay"])
def test_infeasible_toy_comes_to_rest_at_the_resilient_solution(dual: str, resilience: str) -> None:
    """min ½‖x − (1, 2, 0)‖²  s.t.  x₁ ≤ −1, x₁ ≥ 1, x₂ ≤ 1: bounds of 1000 on these + 1000, the objective last."""
    options: dict[str, Any] = {"betas": DUALS[dual], "resilience": resilience, "coupling": "absolute"}
    constraints = plain(3, 0.0, 1000.0, slack_cost=0.5, **options)
    point = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for _ in range(1500):
        first, second, third = point
        distance = (first - 1).square() + (second - 2).square() + third.square()
        losses = torch.stack([first + 1001, 1001 - first, second + 999, 0.5 * distance])
        (gradient,) = torch.autograd.grad(constraints.weights() @ losses, point)
        point.data -= 0.05 * gradient
        constraints.record(losses.detach(), 1)
        constraints.step()
    assert point.tolist() == pytest.approx([0.5, 5 / 3, 0.0], abs=1e-4)
    rest = torch.tensor([0.75, 0.25, 1 / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(constraints.multipliers, rest, rtol=0, atol=1e-4)
    slacks = rest / 0.5 if resilience == "slack" else torch.zeros_like(rest)
    torch.testing.assert_close(constraints.slacks, slacks, rtol=0, atol=2e-4)


def test_a_factor_is_of_what_the_warm_up_came_to() -> None:
    constraints = plain(1, None, bounds={1: "0.5x"}, betas=None, dual_lr=1.0, resilience=None)
    assert constraints.needs_warmup
    losses = [4.0 - 0.1 * step for step in range(14)]
    for step, loss in enumerate(losses):
        assert constraints.report([1.0, 1.0]).worst_layer is (1 if step else None)
        constraints.record(torch.tensor([9.0, loss], dtype=torch.float64), 1)
        constraints.step(update=False)
        constraints.record(torch.tensor([math.nan, 1.0], dtype=torch.float64), 1)  # not finite: not counted
        constraints.step(update=False)
    assert not constraints.needs_warmup
    average = sum(losses[-10:]) / 10
    feed(constraints, [9.0, 5.0], [9.0, 3.0])
    assert constraints.bound_multipliers is not None
    assert constraints.bound_multipliers.tolist() == pytest.approx([0.0, 8.0 - average])
    assert not constraints.multipliers.any()
    assert constraints.report([1.0, 3.0]).bound_violation == [None, pytest.approx(3.0 - 0.5 * average)]


# The reference


def test_auto_reference_is_the_mean_of_the_first_measurements() -> None:
    constraints = plain(1, 0.0, "auto", betas=None, dual_lr=1.0, resilience=None)
    values = [1.0 + 0.1 * index for index in range(REFERENCE_MEASUREMENTS)]
    for number, value in enumerate(values[:-1]):
        step_on(constraints, number, (torch.tensor([value, value - 0.5], dtype=torch.float64), 4))
    assert constraints.multipliers.tolist() == [0.0, 0.0]
    assert constraints.report([9.0, 1.0]).violation[0] is None
    feed(constraints, [values[-1], 0.0])
    mean = sum(values) / len(values)
    assert float(constraints.reference_level) == pytest.approx(mean, rel=1e-12)
    assert constraints.multipliers.tolist() == pytest.approx([values[-1] - mean, 0.0])
    feed(constraints, [500.0, 0.0])
    assert float(constraints.reference_level) == pytest.approx(mean, rel=1e-12)
    assert constraints.report([9.0, 1.0]).violation[0] == pytest.approx(9.0 - mean)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_compiled_record_follows_its_count() -> None:
    constraints = plain(1)
    record = torch.compile(constraints.record, backend="inductor")
    for count in (4.0, 5.0, 6.5, 7.0, 8):
        record(torch.tensor([3.0, 2.0]), count)
    assert constraints.accumulated.tolist() == [91.5, 61.0, 30.5]


@pytest.mark.parametrize("options", [{}, {"objective": "log", "bounds": {1: "0.9x"}}])
def test_a_compiled_step_is_the_eager_one(options: dict[str, Any]) -> None:
    eager, compiled = (plain(1, 0.1, "auto", **options) for _ in range(2))

    def end(constraints: DescentConstraints, losses: torch.Tensor, update: bool) -> None:
        constraints.record(losses, 1)
        constraints.step(update)

    for step in range(REFERENCE_MEASUREMENTS + 4):
        losses = torch.tensor([3.0 - 0.01 * step, 2.9], dtype=torch.float64)
        end(eager, losses, step > 2)
        torch.compile(end, backend="aot_eager")(compiled, losses, step > 2)
    state = eager.state_dict()
    for name, value in compiled.state_dict().items():
        assert value == state[name] if isinstance(value, dict) else torch.equal(value, state[name]), name
    assert compiled.multipliers.max() > 0


def test_adam_takes_a_late_constraint_for_a_new_one() -> None:
    constraints = plain(1, 0.0, "auto", dual_lr=0.01, resilience=None)
    feed(constraints, *[[2.0, 3.0]] * REFERENCE_MEASUREMENTS, [3.0, 3.0])
    # The 20th measurement, with a violation of zero, was its first update, so this is its second.
    assert float(constraints.multipliers[0]) == pytest.approx(0.01 / math.sqrt(0.001 / (1 - 0.999**2)), rel=1e-6)


# Accumulation


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_accumulation_is_exact_for_unequal_counts(kind: str) -> None:
    """Three micro-batches at once against each by itself, and two that count for nothing."""
    whole, parts = make(kind), make(kind)
    nothing = [(torch.full((4,), math.nan), count) for count in (0, torch.tensor(0))]  # means over no items
    given = list(batches(360))
    for number in range(120):
        pieces = given[3 * number : 3 * number + 3]
        losses, counts = map(torch.stack, zip(*pieces, strict=True))
        step_on(whole, number, (counts.double() @ losses / counts.sum(), counts.sum()))
        step_on(parts, number, *pieces, *nothing)
        torch.testing.assert_close(parts.weights(), whole.weights(), rtol=0, atol=1e-11)
        torch.testing.assert_close(parts.duals.state, whole.duals.state, rtol=0, atol=1e-11)
    assert whole.duals.state.any()
    assert int(parts.skipped_updates) == int(whole.skipped_updates) == 0


def test_low_precision_losses_are_accumulated_in_double() -> None:
    constraints = plain(1, 0.0, 1.0, betas=None, dual_lr=1.0, resilience=None)
    for _ in range(1000):
        constraints.record(torch.full((2,), 1.5, dtype=torch.bfloat16), 1)
    constraints.step()
    assert constraints.multipliers.tolist() == [0.5, 0.0]


# Losses that are not finite


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_leaves_no_trace(kind: str, broken: float) -> None:
    clean, hit = make(kind), make(kind)
    for number, (losses, count) in enumerate(batches(60)):
        step_on(clean, number, (losses, count))
        step_on(hit, number, (losses, count))
        if number > WARMUP and number % 7 == 0:
            worse = losses.clone()
            worse[2] = broken
            step_on(hit, number, (worse, count))
    assert int(hit.skipped_updates) == 8
    clean.skipped_updates.fill_(8)
    assert flat(hit.state_dict()) == flat(clean.state_dict())


def test_what_overflows_on_the_way_is_skipped_too() -> None:
    constraints = plain(2, 0.1, 1.0, betas=None, normalize=True)
    feed(constraints, [2.0, 0.0, 1.0])  # g_2 relative to a loss of zero
    constraints.record(torch.zeros(3, dtype=torch.float64), torch.tensor(0))
    constraints.step()
    adam = plain(2, 0.1, 1.0, resilience=None)
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_device(kind: str, device: str) -> None:
    constraints = make(kind).to(device)
    losses, count = torch.rand(4, device=device), torch.tensor(3, device=device)
    with NoHostSync():
        for number in range(30):
            constraints.weights()
            constraints.objective_weights()
            step_on(constraints, number, (losses, 2), (losses, count))
        constraints.epoch_end()
    assert constraints.weights().device.type == device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_cuda() -> None:
    every = [make(kind).to("cuda") for kind in KINDS]
    losses, count = torch.rand(4, device="cuda"), torch.tensor(2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for constraints, number in itertools.product(every, range(2 * WARMUP)):
            constraints.weights()
            step_on(constraints, number, (losses, 2), (losses, count))
            constraints.epoch_end()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_the_state_keeps_its_storage(kind: str) -> None:
    """A captured step writes where the state was at its capture."""
    constraints = make(kind)
    before = {name: buffer.data_ptr() for name, buffer in constraints.named_buffers()}
    saved = make(kind).state_dict()
    for number, part in enumerate(batches(60)):
        step_on(constraints, number, part)
    constraints.epoch_end()
    constraints.load_state_dict(saved)
    assert {name: buffer.data_ptr() for name, buffer in constraints.named_buffers()} == before


# Saving and restoring


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("stop", [5, 23, 61])  # in the warm-up, before and after the automatic reference is fixed
def test_a_restored_run_continues_bit_for_bit(kind: str, stop: int) -> None:
    """Two micro-batches a step, so that an odd stop is inside an accumulation."""
    straight, stopped, restored = (make(kind) for _ in range(3))

    def run(constraints: DescentConstraints, first: int, last: int) -> None:
        for number, part in enumerate(batches(121)):
            if first <= number < last:
                constraints.record(*part)
                if number % 2:
                    step_on(constraints, number // 2)

    run(straight, 0, 121)
    run(stopped, 0, stop)
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    run(restored, stop, 121)
    assert flat(restored.state_dict()) == flat(straight.state_dict())
    assert straight.duals.state.any()


DIFFERENT: dict[str, Any] = {
    "layers": 4,
    "rate": 0.2,
    "reference": 2.0,
    "objective": "log",
    "coefficients": [1.0, 0.0, 1.0, 1.0],
    "bounds": {2: 0.5},
    "dual_lr": 0.5,
    "betas": (0.5, 0.999),
    "resilience": None,
    "slack_cost": 3.0,
    "coupling": "detach",
    "reference_mode": "anchor",
    "normalize": True,
    "margin": 0.1,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_state_of_other_settings_is_refused(name: str) -> None:
    assert set(DIFFERENT) == {"layers", *dataclasses.asdict(DEFAULTS)}
    options: dict[str, Any] = {"layers": 3, "rate": 0.1, "reference": 1.0}
    if name == "coefficients":
        options["objective"] = "log"
    saved = plain(**{**options, name: DIFFERENT[name]}).state_dict()
    here = plain(**options)
    feed(here, [2.0, 2.0, 2.0, 2.0])
    before = here.multipliers.clone()
    with pytest.raises(InputError, match=f"the saved state has {name} = .*; expected .*, as constructed here"):
        here.load_state_dict(saved)
    assert torch.equal(here.multipliers, before)


def test_numbers_of_another_kind_are_saved_as_numbers() -> None:
    given: dict[str, Any] = {"slack_cost": np.float64(3), "margin": np.float32(0.5), "bounds": {2: 1}}
    file = io.BytesIO()
    torch.save(plain(3, **given).state_dict(), file)
    file.seek(0)
    plain(3, slack_cost=3, margin=0.5, bounds={2: 1.0}).load_state_dict(torch.load(file, weights_only=True))


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(InputError, match="the saved state has layers = None; expected 2, as constructed here"):
        plain(2).load_state_dict({"multipliers": torch.zeros(3), "rate": "0.1, 0.1"})


# Defaults, presets and errors


def test_the_constructor_has_the_defaults_of_the_command_line() -> None:
    parameters = inspect.signature(DescentConstraints).parameters
    assert len(parameters) <= 16
    hints = typing.get_type_hints(DescentConstraints.__init__)
    for name, kind in typing.get_type_hints(DescentOptions).items():
        assert (hints[name], parameters[name].default) == (kind, getattr(DEFAULTS, name)), name
    assert set(parameters) == {"layers", *dataclasses.asdict(DEFAULTS)}
    for task, entry in TASKS.items():
        expected, found = options_of(task), vars(entry.settings().constraints)
        # Settings of their own: on or off, and a warm-up counted in epochs.
        assert set(found) - set(expected) == {"constrained", "warmup_epochs"}
        assert entry.settings().objective == expected.pop("objective")
        assert set(expected) - set(found) == {"coefficients"}
        for name, value in expected.items():
            assert name not in found or found[name] == (list(value) if name == "betas" else value), (task, name)


def test_the_defaults_are_what_they_were_measured_to_be() -> None:
    """What the docs' results are of: where one changes, they do."""
    assert REFERENCE_MEASUREMENTS == 20
    chosen: tuple[tuple[dict[str, Any], float], ...] = (
        ({}, 0.002),
        ({"objective": "log"}, 0.05),
        ({"betas": None}, 0.05),
        ({"dual_lr": 0.3}, 0.3),
    )
    for options, rate in chosen:
        assert DescentConstraints(2, **options).options.dual_lr == rate
    numbers = (0.01, "auto", "last", None, None, None, (0.0, 0.9), "slack", 10.0, "detach", "anchor", True, 0.02)
    assert tuple(vars(DEFAULTS).values()) == numbers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("safe", {"reference_mode": "constraint", "betas": (0.0, 0.999), "resilience": "decay", "dual_lr": 0.002}),
        ("video", {"objective": "log", "margin": 0.01, "dual_lr": 0.05}),
        ("text", {"reference": 0.9, "dual_lr": 0.05}),
        ("lm", {"rate": 0.05, "dual_lr": 0.05}),
    ],
)
def test_presets(name: Any, options: dict[str, Any]) -> None:
    expected = {**dataclasses.asdict(DEFAULTS), **options}
    expected["rate"] = [expected["rate"]] * 2
    assert dataclasses.asdict(DescentConstraints.preset(name, 2).options) == expected


def test_overrides_win_over_a_preset() -> None:
    options = DescentConstraints.preset("paper-dust", 2, rate=[0.1, 0.2], betas=None).options
    assert (options.rate, options.betas, options.reference, options.coupling) == ([0.1, 0.2], None, 6.5, "chain")


LOG: dict[str, Any] = {"objective": "log"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"layers": 0}, "layers must be an integer >= 1, got 0"),
    ({"layers": 2.0}, "layers must be an integer >= 1, got 2.0"),
    ({"rate": 1.0}, r"rate must be a number in \[0, 1\), or a sequence of 3 of them, one a layer, got 1.0"),
    ({"rate": "0.1"}, "rate must be .*, got '0.1'"),
    ({"rate": [0.1, 0.2]}, "rate has 2 entries; expected a number, or a sequence of 3, one a layer"),
    ({"rate": [0.1, 0.2, math.nan]}, r"rate\[2\] must be a number in \[0, 1\), got nan"),
    ({"reference": 0.0}, 'reference must be a finite number > 0, "auto" or None, got 0.0'),
    ({"reference": "first"}, "reference must be .*, got 'first'"),
    ({"reference": None, "coupling": "absolute"}, 'reference is None; coupling="absolute" needs one'),
    ({"reference": None, "reference_mode": "anchor"}, 'reference is None; reference_mode="anchor" needs one'),
    ({"objective": "first"}, "objective must be one of 'last', 'depths', 'log', got 'first'"),
    ({"coefficients": [1.0] * 4}, 'coefficients are for objective="depths" and "log"; "last" has none'),
    ({**LOG, "coefficients": [1.0]}, r"coefficients must be 4 numbers >= 0, one a depth, or None, got \[1.0\]"),
    ({**LOG, "coefficients": [1, 1, -1, 1]}, r"coefficients\[2\] must be a finite number >= 0, got -1"),
    ({**LOG, "coefficients": [0, 0, 0, 0]}, "coefficients must not all be zero"),
    ({"bounds": {4: 0.9}}, "bounds holds depth 4, which is not read: the depths are 0 to 3"),
    ({"bounds": {"3": 0.9}}, "bounds holds depth '3', which is not read"),
    ({"bounds": {}}, r"bounds must be a dictionary of depths, such as \{3: 0.9\}, or None, got \{\}"),
    ({"bounds": [0.9]}, r"bounds must be a dictionary of depths, .* got \[0.9\]"),
    ({"bounds": {3: 0.0}}, r'bounds\[3\] must be a finite number > 0, or a factor such as "1.01x", got 0.0'),
    ({"bounds": {3: "1.01y"}}, r"bounds\[3\] must be a finite number > 0, or a factor .*, got '1.01y'"),
    ({"bounds": {3: "0x"}}, r"bounds\[3\] must be a finite number > 0, or a factor"),
    ({"dual_lr": 0}, "dual_lr must be a finite number > 0, got 0"),
    ({"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\), or None for ascent, got \(0.9,\)"),
    ({"betas": 0.9}, "betas must be .*, got 0.9"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\] must be a number in \[0, 1\), got 1.0"),
    ({"resilience": "slacks"}, "resilience must be one of 'slack', 'decay', None, got 'slacks'"),
    ({"slack_cost": 0.0}, "slack_cost must be a finite number > 0, got 0.0"),
    ({"betas": None, "resilience": "decay", "dual_lr": 1.0, "slack_cost": 0.5}, r"1.0; expected less than .* = 1 with"),
    ({"betas": None, "dual_lr": 0.5, "slack_cost": 0.4}, "0.5; expected less than slack_cost = 0.4 with"),
    ({"coupling": "none"}, "coupling must be one of 'chain', 'input', 'detach', 'absolute', got 'none'"),
    (
        {"coupling": "input", "reference_mode": "anchor"},
        'coupling="input" needs reference_mode="constraint", got "anch',
    ),
    ({"reference_mode": "hold"}, "reference_mode must be one of 'constraint', 'anchor', got 'hold'"),
    ({"margin": 1.0}, r"margin must be a number in \[0, 1\), got 1.0"),
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
        (torch.zeros(3), -2.0, "count must be a number >= 0, got -2.0"),
        (torch.zeros(3), math.nan, "count must be .*, got nan"),
        (torch.zeros(3), "8", "count must be .*, got '8'"),
        (torch.zeros(3), torch.ones(2), r"count has shape \(2,\); expected one element"),
        (torch.zeros(3, device="meta"), 1, r"losses is on meta; expected cpu: move the constraints with \.to"),
    ],
)
def test_wrong_records(losses: Any, count: Any, message: str) -> None:
    constraints = plain(2)
    with pytest.raises(InputError, match=message):
        constraints.record(losses, count)
    with pytest.raises(InputError, match=r"nothing was recorded since the last step\(\); expected record"):
        constraints.step()


def test_step_needs_a_record_every_time() -> None:
    constraints, restored = plain(2), plain(2)
    feed(constraints, [1.0, 1.0, 1.0])
    restored.load_state_dict(constraints.state_dict())
    for each in (constraints, restored):
        with pytest.raises(InputError, match="nothing was recorded since the last step"):
            each.step()
