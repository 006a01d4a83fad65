"""Captured steps against eager ones, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import models, ops
from cdt_fast.training.cuda_graph import EAGER_CALLS, CapturedStep, CudaGraphs
from tests.kernels.step_cases import ACCUMULATED, CODES, CONSTRAINTS, EPOCH, MODELS, PATCH, TIME, Steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# The kernels and their order are the same; a library may still split a sum otherwise where it has other workspace.
ROUNDING = {"fp32": 1e-4, "bf16": 3e-2}


@pytest.fixture(autouse=True)
def _as_in_training(_triton: None) -> Iterator[None]:
    """A layer that no kernel holds is composed of ops, as for a user."""
    with ops.use_backend("auto"):
        yield


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], precision: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.double().abs().max())
        atol = ROUNDING[precision] * scale
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("constraints", CONSTRAINTS)
@pytest.mark.parametrize("model", MODELS)
def test_captured_steps_are_the_eager_ones(model: str, constraints: str, precision: str) -> None:
    """From warm-up to updates, with the smaller batch that ends an epoch."""
    captured, eager = (Steps(model, constraints, captured=captured, precision=precision) for captured in (True, False))
    for _ in range(3):
        captured.take(20)
        eager.take(20)
        assert_same(captured.state(), eager.state(), precision)
    if eager.duals is not None:
        assert eager.duals.multipliers.max() > 0


def test_accumulated_steps_are_the_eager_ones() -> None:
    captured, eager = (Steps("untied", "ascent", captured=captured, epoch=ACCUMULATED) for captured in (True, False))
    captured.take(45)
    eager.take(45)
    assert_same(captured.state(), eager.state(), "fp32")


def test_eager_work_between_replays_disturbs_neither() -> None:
    """As the validation between steps: it allocates, and must not get the memory of the graphs."""
    captured, eager = (Steps("tied", "adam", captured=captured) for captured in (True, False))
    held = []
    for _ in range(45):
        for steps in (captured, eager):
            steps.take(1)
        with torch.no_grad():
            tokens = torch.full((EPOCH[0][0], TIME, PATCH), 0.5, device="cuda")
            held.append(captured.network.layer_losses(tokens, tokens)[1])
        expected = eager.network.layer_losses(tokens, tokens)[1]
        torch.testing.assert_close(held[-1], expected.detach(), rtol=1e-3, atol=1e-5)
    copies = [entry.clone() for entry in held]
    captured.take(9)
    assert all(map(torch.equal, held, copies))


def test_losses_and_gradients_of_a_replay_are_those_of_the_call() -> None:
    """The interface of the bench: a step that returns its losses and gradients."""
    network = models.DUST(PATCH, CODES, 3, tied=True).cuda()
    noisy = torch.rand(12, TIME, PATCH, device="cuda")
    weights = torch.tensor([0.1, -0.2, 0.3, 1.3], device="cuda")

    def step(tokens: Tensor) -> list[Tensor]:
        network.zero_grad(set_to_none=True)
        total, losses = network.layer_losses(tokens, tokens, weights)
        total.backward()
        assert network.dictionary.grad is not None
        return [losses, network.dictionary.grad]

    captured = CapturedStep(step, CudaGraphs(torch.device("cuda", 0)))
    for number in range(EAGER_CALLS + 4):
        found = [entry.clone() for entry in captured(noisy * number)]
        expected = [entry.clone() for entry in step(noisy * number)]
        for left, right in zip(found, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5 * float(right.abs().max() + 1))


@pytest.mark.parametrize("changes", [{}, {"constrained": False, "precision": "bf16"}, {"batch": 2, "accumulate": 2}])
def test_a_captured_training_is_the_eager_one_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """30 steps through the trainer: weights, multipliers and logged losses; and again from the checkpoint at 15."""
    for package in ("accelerate", "tqdm", "tomli_w"):
        pytest.importorskip(package)
    from cdt_fast.training.checkpoint import load_checkpoint
    from tests.kernels.trainer_cases import trainer_on_gpu

    eager = trainer_on_gpu(tmp_path, monkeypatch, changes, "eager")
    captured = trainer_on_gpu(tmp_path, monkeypatch, {**changes, "cuda_graph": True}, "captured")
    resumed = trainer_on_gpu(tmp_path, monkeypatch, {**changes, "cuda_graph": True}, "resumed")
    eager.run(progress=False)
    while captured.step < 15:
        captured._train_step()
        captured.step += 1
    captured._save_checkpoint()
    resumed.load(load_checkpoint(captured.folder.checkpoint))
    captured.run(progress=False)
    resumed.run(progress=False)
    precision = eager.settings.training.precision
    losses = [trainer.folder.read_metrics()[-1]["validation"]["loss"] for trainer in (eager, captured, resumed)]
    for trainer, found in zip((captured, resumed), losses[1:], strict=True):
        assert_same(dict(trainer.model.state_dict()), dict(eager.model.state_dict()), precision)
        assert found == pytest.approx(losses[0], rel=ROUNDING[precision])
        for name in ("multipliers", "slacks"):
            here, there = getattr(trainer.constraints, name), getattr(eager.constraints, name)
            torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-6)
