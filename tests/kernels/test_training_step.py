"""Training steps at toy size on a GPU: captured ones are the eager ones, and the host never waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cdt_fast import models, ops
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.cuda_graph import CapturedStep, CudaGraphs
from cdt_fast.training.loop import Trainer
from cdt_fast.training.optimizer import TrainingStep, build_optimizer, set_rate
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.networks import ReconstructionLosses
from tests.graph_fakes import EagerGraphs
from tests.runs import new_trainer, settings_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PATCH, CODES, LAYERS, TIME = 64, 96, 3, 20
# The sequences of the micro-batches of a step: the third is the smaller one that ends an epoch.
EPOCH = ((12,), (12,), (5,))
ACCUMULATED = ((8, 4), (8, 4), (5,))

MODELS: dict[str, tuple[type[models.DUST], dict[str, Any]]] = {
    "tied": (models.DUST, {"tied": True, "sparsity": 0.02}),
    "untied": (models.DUST, {"sparsity": 0.02, "readout": "next"}),
    "VideoUT": (models.VideoUT, {"readout": "own"}),
}
CONSTRAINTS: dict[str, dict[str, Any] | None] = {
    "unconstrained": None,
    "adam": {"reference": "auto", "normalize": True},
    "ascent": {"reference": 0.5, "betas": None, "resilience": "decay"},
    "absolute": {"reference": 0.5, "betas": None, "coupling": "absolute", "slack_cost": 5.0},
}
WARMUP = 4


@dataclass
class Steps:
    """A small training on the current GPU.

    Args:
        model: of `MODELS`.
        constraints: of `CONSTRAINTS`.
        captured: as CUDA graphs, else eagerly.
        precision: "fp32" or "bf16".
        epoch: `EPOCH` or `ACCUMULATED`.
    """

    model: str
    constraints: str
    captured: bool
    precision: str = "fp32"
    epoch: tuple[tuple[int, ...], ...] = EPOCH

    def __post_init__(self) -> None:
        device = torch.device("cuda")
        kind, options = MODELS[self.model]
        self.network = kind(PATCH, CODES, LAYERS, **options).to(device)
        self.optimizer = build_optimizer(self.network.parameters(), 1e-3, on_device=True)
        settings = CONSTRAINTS[self.constraints]
        self.duals = None if settings is None else DescentConstraints(LAYERS, 0.5, **settings).to(device)
        self.logged_sums = torch.zeros(LAYERS + 2, dtype=torch.float64, device=device)
        self.step = TrainingStep(
            losses=ReconstructionLosses(self.network, torch.bfloat16 if self.precision == "bf16" else None),
            optimizer=self.optimizer,
            logged_sums=self.logged_sums,
            constraints=self.duals,
        )
        self.replays = CapturedStep(self._on_buffers, CudaGraphs(torch.device("cuda", 0))) if self.captured else None
        self.generator = torch.Generator(device).manual_seed(0)
        self.deviation = torch.zeros(1, device=device)  # of noise, which these networks are not told
        self.taken = 0

    def _on_buffers(self, *buffers: Tensor, counts: tuple[int, ...], update: bool) -> None:
        known = (*[0.0] * LAYERS, 1.0) if self.duals is None else None
        batches = ((noisy, clean, self.deviation) for noisy, clean in zip(buffers[::2], buffers[1::2], strict=True))
        self.step.run(batches, counts, known, update)

    def _tokens(self, sequences: tuple[int, ...]) -> Iterator[Tensor]:
        """Patches that change slowly, noisy and clean."""
        for number in sequences:
            still = torch.rand((number, 1, PATCH), device="cuda", generator=self.generator)
            shape = (number, TIME, PATCH)
            clean = still + 0.02 * torch.randn(shape, device="cuda", generator=self.generator)
            yield clean + 0.1 * torch.randn(shape, device="cuda", generator=self.generator)
            yield clean

    def take(self, number: int) -> None:
        """That many steps."""
        for _ in range(number):
            sequences = self.epoch[self.taken % len(self.epoch)]
            counts = tuple(TIME * entry for entry in sequences)
            update = self.taken >= WARMUP
            if self.replays is None:
                self._on_buffers(*self._tokens(sequences), counts=counts, update=update)
            else:
                self.replays(*self._tokens(sequences), counts=counts, update=update)
            self.taken += 1
            set_rate(self.optimizer, 1e-3 / (self.taken + 1))

    def state(self) -> dict[str, Tensor]:
        """Weights, the optimizer's state, the duals and the sums of the losses, as copies."""
        found: dict[str, Tensor] = {"logged_sums": self.logged_sums, **self.network.state_dict()}
        for number, parameter in enumerate(self.network.parameters()):
            found |= {f"{number}.{name}": value for name, value in self.optimizer.state[parameter].items()}
        if self.duals is not None:
            duals = self.duals.state_dict()
            found |= {name: value for name, value in duals.items() if isinstance(value, Tensor)}
        return {name: value.detach().clone() for name, value in found.items()}


# Whole frames on one grid of patches; of the settings all but these are the defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"frames": "resized", "patch_frames": 1, "gamma": 0.15, "size": 32, "patch": 8, "window": 5},
    "model": {"sparsity": 0.2, "scale": 1.0, "code_size": 96, "layers": 2},
    "constraints": {"objective": "last", "rate": 0.9, "margin": 0.1, "reference": "auto", "warmup_epochs": 2},
    "evaluation": {"gammas": [0.15]},
    "training": {"device": "cuda", "steps": 30, "batch": 3, "lr": 1e-3, "validate_every": 10},
}


def trainer_on_gpu(folder: Path, changes: dict[str, Any], name: str = "run", graphs: Any = None) -> Trainer:
    """A new trainer on a clip of 60 frames: eight training windows, so three, three and two a step."""
    clip = folder / "clip.npy"
    if not clip.exists():
        rows, columns = np.mgrid[0:32, 0:32]
        moving = [127 + 90 * np.sin((columns + index) / 3) * np.cos(rows / 5) for index in range(60)]
        np.save(clip, np.stack(moving).astype(np.uint8))
    config = settings_of("video", SETTINGS, clip, **changes)
    run = RunFolder.create(folder / name, config)
    return new_trainer(run, config, graphs)


# Captured steps

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


@pytest.mark.parametrize("changes", [{}, {"constrained": False, "precision": "bf16"}, {"batch": 2, "accumulate": 2}])
def test_a_captured_training_is_the_eager_one_and_resumes(tmp_path: Path, changes: dict[str, Any]) -> None:
    """30 steps through the trainer: weights, multipliers and logged losses; and again from the checkpoint at 15."""
    eager = trainer_on_gpu(tmp_path, changes, "eager", EagerGraphs())
    captured, resumed = (trainer_on_gpu(tmp_path, changes, name) for name in ("captured", "resumed"))
    eager.run(progress=False)
    while captured.step < 15:
        captured._train_step()
        captured.step += 1
    captured._save_checkpoint()
    resumed.load(load_checkpoint(captured.folder.checkpoint))
    captured.run(progress=False)
    resumed.run(progress=False)
    precision = eager.execution.precision
    losses = [trainer.folder.read_metrics()[-1]["validation"]["loss"] for trainer in (eager, captured, resumed)]
    for trainer, found in zip((captured, resumed), losses[1:], strict=True):
        assert_same(dict(trainer.model.state_dict()), dict(eager.model.state_dict()), precision)
        assert found == pytest.approx(losses[0], rel=ROUNDING[precision])
        for name in ("multipliers", "slacks"):
            here, there = getattr(trainer.constraints, name), getattr(eager.constraints, name)
            torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-6)


# torch itself says when the host waits for the device


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error wherever torch would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("constraints", CONSTRAINTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_never_waits(model: str, constraints: str, precision: str, backend: Any) -> None:
    with ops.use_backend(backend):
        steps = Steps(model, constraints, captured=False, precision=precision, epoch=ACCUMULATED)
        steps.take(3)  # compiles kernels, makes the optimizer's state
        with no_waiting():
            steps.take(9)
    assert steps.logged_sums.isfinite().all()


def test_a_replayed_step_never_waits() -> None:
    steps = Steps("tied", "adam", captured=True)
    steps.take(60)
    with no_waiting():
        steps.take(9)
    assert steps.logged_sums.isfinite().all()


def test_waiting_is_an_error() -> None:
    number = torch.ones((), device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        number.item()
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3).to("cuda")


@pytest.mark.parametrize("changes", [{}, {"constrained": False, "tied": True}, {"batch": 2, "accumulate": 2}])
def test_a_step_of_the_trainer_never_waits(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With the choice of windows, their way to the device and their noise."""
    trainer = trainer_on_gpu(tmp_path, changes)
    for step in range(3 * trainer.steps_per_epoch):
        if step < trainer.steps_per_epoch:
            trainer._train_step()
        else:
            with no_waiting():
                trainer._train_step()
        trainer.step += 1
    assert np.isfinite(trainer._log_entry(1.0)["loss"]).all()
