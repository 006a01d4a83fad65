"""No host synchronization in a training step, shown without a GPU: on tensors that have no values to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.models import DUST
from cdt_fast.training.loop import Trainer
from cdt_fast.training.optimizer import build_optimizer
from cdt_fast.video.settings import VideoSettings
from tests.training.step_checks import HostWaits, NoWaiting, meta_trainer, never_waiting

Config = Callable[..., VideoSettings]

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True, "normalize": True},
    "unconstrained": {"constrained": False},
    "VideoUT": {"model": "ut", "coupling": "absolute"},
    "anchor": {"betas": "none", "resilience": "decay", "reference": 1.0, "reference_mode": "anchor"},
    "space": {"sequence": "space"},
    "accumulation": {"batch": 3, "accumulate": 2, "schedule": "linear"},
    "warm-up": {"warmup_epochs": 9, "reference": "none"},
}


def take_two_epochs(trainer: Trainer) -> None:
    for _ in range(2 * trainer.steps_per_epoch):
        trainer._train_step()
        trainer.step += 1


@pytest.mark.parametrize("case", CASES)
def test_a_step_never_waits_for_the_device(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """In plain torch: the bodies of the ops, forward and backward, clipping, optimizer, sums and duals."""
    config = tiny_config(**{"warmup_epochs": 0, **CASES[case]})
    trainer = meta_trainer(config, tmp_path / "run", monkeypatch, torch.float32)
    with never_waiting(monkeypatch):
        take_two_epochs(trainer)
    with pytest.raises((RuntimeError, NotImplementedError)):
        trainer._log_entry(1.0)


def _looks_at_losses(patch: pytest.MonkeyPatch) -> None:
    losses = DUST.layer_losses

    def looking(*arguments: Any) -> tuple[Tensor, Tensor]:
        total, per_depth = losses(*arguments)
        return (total if total > 0 else -total), per_depth

    patch.setattr(DUST, "layer_losses", looking)


def _looks_at_the_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda given, _: [float(entry.grad.norm()) for entry in given])


def _counts_losses_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DescentConstraints, "record", lambda self, sums, _: sums.tolist())


def _makes_a_tensor_of_numbers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DescentConstraints, "weights", lambda self: torch.tensor([0.0, 0.0, 1.0], device="meta"))


@pytest.mark.parametrize(
    "sabotage",
    [
        _looks_at_losses,
        _looks_at_the_norm,
        _counts_losses_on_the_host,
        _makes_a_tensor_of_numbers,
    ],
)
def test_a_step_that_waits_is_caught(
    tiny_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[pytest.MonkeyPatch], None],
) -> None:
    trainer = meta_trainer(tiny_config(warmup_epochs=0), tmp_path / "run", monkeypatch, torch.float32)
    sabotage(monkeypatch)
    with (
        never_waiting(monkeypatch),
        pytest.raises((HostWaits, RuntimeError, NotImplementedError)),
    ):
        trainer._train_step()


def test_the_optimizer_of_a_gpu_keeps_its_numbers_on_the_device() -> None:
    """On a CPU in its place: neither update nor schedule reads a tensor, and the rate is that of the schedule."""

    class NoReading(NoWaiting):
        def __torch_dispatch__(self, function: Any, *given: Any) -> Any:
            if function.overloadpacket.__name__ in self.reads:
                raise HostWaits(str(function))
            return super().__torch_dispatch__(function, *given)

    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer, schedule = build_optimizer([parameter], 0.5, lambda step: 1 / (step + 1), on_device=True)
    (group,) = optimizer.param_groups
    rate = group["lr"]
    parameter.grad = torch.ones(4)
    with NoReading():
        for _ in range(3):
            optimizer.step()
            schedule.step()
        with pytest.raises(HostWaits):
            rate.item()
    assert group["lr"] is rate
    assert rate.item() == 0.125
    assert all(isinstance(state["step"], Tensor) and state["step"].item() == 3 for state in optimizer.state.values())
    expected = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], lr=0.5, weight_decay=0.0)
    for step in range(3):
        expected.param_groups[0]["lr"] = 0.5 / (step + 1)
        expected.param_groups[0]["params"][0].grad = torch.ones(4)
        expected.step()
    torch.testing.assert_close(parameter, expected.param_groups[0]["params"][0], rtol=1e-6, atol=1e-6)


def test_frames_go_to_a_gpu_from_pinned_memory(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From other memory, or without saying so, the host would wait for the copy."""

    class Frames:
        def __init__(self, frames: Tensor, steps: tuple[Any, ...] = ()) -> None:
            self.frames, self.steps = frames, steps

        def pin_memory(self) -> Frames:
            return Frames(self.frames, (*self.steps, "pinned"))

        def to(self, target: Any, **options: Any) -> Any:
            if isinstance(target, torch.dtype):
                copied.append(self.steps)
                return self.frames.to(target)
            return self if "copied" in self.steps else Frames(self.frames, (*self.steps, options, "copied"))

    copied: list[tuple[Any, ...]] = []
    trainer = meta_trainer(tiny_config(), tmp_path / "run", monkeypatch, torch.float32)
    trainer.device = torch.device("cuda")
    monkeypatch.setattr(
        trainer.data.train, "batch", lambda windows: Frames(torch.zeros((2, 5, 32, 32), dtype=torch.uint8))
    )
    trainer._batch([(0, 1), (1, 2)])
    assert copied == [("pinned", {"non_blocking": True}, "copied")]
