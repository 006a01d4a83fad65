"""The kernels of the dual update and of the weights against plain torch, as the constraints run both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import DescentConstraints, ops
from cdt_fast.constraints import fused
from cdt_fast.constraints.presets import PRESETS, REFERENCE_MEASUREMENTS
from cdt_fast.kernels import dual_update as kernels
from cdt_fast.kernels.dual_update import DEPTHS_OF_A_WARP

RAW = {"coupling": "chain", "reference_mode": "constraint", "normalize": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"warmup_steps": 2},
    **{name: {**PRESETS[name], "warmup_steps": 2} for name in ("video", "paper-dust", "paper-llama", "safe")},
    "given anchor": {"reference": 1.4, "betas": (0.9, 0.999), "dual_every": 2},
    "no reference": {**RAW, "reference": None, "resilience": None, "margin": 0.0},
    "decay": {**RAW, "resilience": "decay", "reference": 1.1, "objective": "depths"},
    "no rate": {"rate": None, "reference": None, "objective": "log"},
    "a rate a layer": {"rate": [0.3, 0.0, 0.1, 0.5], "objective": "log", "coefficients": [0, 1, 0, 2, 3]},
}
# A bound on an error: rounding of each of some dozen operations.
OPERATIONS = 50


def losses(depths: int, number: int, device: torch.device) -> list[Tensor]:
    """Means that rise and fall over depths and steps."""
    generator = torch.Generator().manual_seed(depths)
    return [(1 + torch.rand(depths, generator=generator)).to(device) for _ in range(number)]


def train(
    given: list[Tensor], device: torch.device, backend: Any = "triton", **options: Any
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The state of constraints after a step a list of losses, and the weights before each."""
    with ops.use_backend(backend):
        constraints = DescentConstraints(len(given[0]) - 1, **options, device=device)
        weights = []
        for step, measured in enumerate(given):
            weights.append(constraints.weights())
            constraints.record(measured, step % 3 + 1)
            constraints.step()
        return constraints._tensors(), weights


def assert_same(given: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, tensor in right.items():
        if not tensor.is_floating_point():
            assert torch.equal(given[name], tensor), name
        else:
            eps = OPERATIONS * torch.finfo(torch.float64).eps
            torch.testing.assert_close(given[name], tensor, rtol=eps, atol=eps, msg=lambda text, name=name: name + text)


@pytest.mark.emulated
@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_is_that_of_plain_torch(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(kernels.Launch, "run", _noting(launched))
    given = losses(5, 8 if name != "default" else REFERENCE_MEASUREMENTS + 6, device)
    state, weights = train(given, device, **SETTINGS[name])
    assert {*launched} == {"dual_update_kernel", "depth_weights_kernel"}
    right, right_weights = train(given, device, "torch", **SETTINGS[name])
    assert len(launched) <= 2 * len(given)
    assert_same(state, right)
    for one, other in zip(weights, right_weights, strict=True):
        assert_same({"weights": one}, {"weights": other})
    if name not in ("no rate", "safe", "video"):
        assert state["multipliers"].any()


def _noting(launched: list[str]) -> Any:
    run = kernels.Launch.run

    def noting(launch: Any) -> None:
        launched.append(launch.kernel.__name__)
        run(launch)

    return noting


@pytest.mark.parametrize("depths", [2, DEPTHS_OF_A_WARP - 1, DEPTHS_OF_A_WARP, DEPTHS_OF_A_WARP + 1, 300])
def test_any_number_of_depths(depths: int, device: torch.device) -> None:
    given, options = losses(depths, 3, device), {"reference": 1.5, "objective": "log", "coupling": "chain"}
    state, weights = train(given, device, **options)
    right, right_weights = train(given, device, "torch", **options)
    assert_same(state, right)
    assert_same({"weights": weights[-1]}, {"weights": right_weights[-1]})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("depth", [0, 2, 4])
def test_what_is_not_finite_moves_nothing(depth: int, bad: float, device: torch.device) -> None:
    """A loss of zero is the scale of the next violation, and with "log" it takes a weight with it."""
    given = losses(5, 4, device)
    given[1][depth] = bad
    for options in ({"reference": 1.5}, {**RAW, "reference": 1.5, "objective": "log", "normalize": True}):
        state, weights = train(given, device, **options)
        right, right_weights = train(given, device, "torch", **options)
        assert_same(state, right)
        assert_same({"weights": weights[-1]}, {"weights": right_weights[-1]})
        assert all(tensor.isfinite().all() for tensor in state.values())
        assert not state["accumulated"].any()
        assert bad == 0.0 or state["skipped_updates"] == 1


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_what_overflows_on_the_way_moves_nothing(scale: float, device: torch.device) -> None:
    """The square of an error, in the second moment, where error and proposal are finite."""
    given = [scale * loss.double() for loss in losses(5, 3, device)]
    options = {**RAW, "reference": scale}
    assert_same(train(given, device, **options)[0], train(given, device, "torch", **options)[0])


def test_a_run_goes_on_from_a_saved_state_bit_for_bit(device: torch.device) -> None:
    given, options = losses(4, 6, device), {"objective": "log", "reference": 1.5}
    whole, _ = train(given, device, **options)
    first = DescentConstraints(3, **options, device=device)
    for step, measured in enumerate(given):
        if step == 3:
            state = first.state_dict()
            first = DescentConstraints(3, **options, device=device)
            first.load_state_dict(state)
        first.record(measured, step % 3 + 1)
        first.step()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in first._tensors().items())


@pytest.mark.parametrize(
    "options",
    [
        {"dual": "pi"},
        {"tighten_steps": 4},
        {"coupling": "absolute", "reference": 2.0},
        {"ratio": "cvar"},
        {"bounds": {2: 0.5}},
        {"agreement": {1: 0.5}},
        {"dtype": torch.float32},
    ],
)
def test_what_the_kernels_do_not_compute_is_left_to_plain_torch(options: dict[str, Any], device: torch.device) -> None:
    assert DescentConstraints(3, **options, device=device)._fused is None


def test_a_card_that_refuses_the_kernel_has_plain_torch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from cdt_fast.kernels.launch import KernelError
    from cdt_fast.ops.shared import backend

    def refuse(launch: Any) -> None:
        raise KernelError("too large")

    given = losses(4, 3, device)
    right, _ = train(given, device, "torch", reference=1.5)
    monkeypatch.setattr(kernels.Launch, "run", refuse)
    monkeypatch.setattr(backend, "_given_up", set())
    with pytest.warns(RuntimeWarning, match="dual_update is computed by plain torch from now on: too large"):
        state, _ = train(given, device, "auto", reference=1.5)
    assert_same(state, right)
    assert backend._given_up == {fused.NAME}
    monkeypatch.setattr(backend, "_given_up", set())
    with pytest.raises(KernelError, match="too large"):
        train(given, device, reference=1.5)
