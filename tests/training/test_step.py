"""No host synchronization in a training step, shown without a GPU: on tensors that have no values to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.constraints.duals import DualVariables
from cdt_fast.kernels import cards
from cdt_fast.models import DUST
from cdt_fast.ops.shared.registration import OPERATORS
from cdt_fast.training.loop import Trainer
from cdt_fast.training.optimizer import build_optimizer
from cdt_fast.video.settings import VideoSettings
from tests.training.step_checks import HostWaits, NoWaiting, meta_trainer, never_waiting

Config = Callable[..., VideoSettings]

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True, "normalize": True},
    "unconstrained": {"constrained": False},
    "unconstrained tied": {"constrained": False, "tied": True, "clip": None},
    "VideoUT": {"model": "ut", "coupling": "absolute"},
    "VideoUT unconstrained": {"model": "ut", "constrained": False, "readout": "shared"},
    "ascent": {"dual": "ascent", "resilience": "none", "coupling": "detach"},
    "adam": {"dual": "adam", "resilience": "decay", "betas": [0.9, 0.999], "normalize": True},
    "next readout": {"resilience": "slack", "readout": "next"},
    "anchor": {
        "dual": "ascent",
        "resilience": "decay",
        "slack_cost": 10.0,
        "reference": 1.0,
        "reference_mode": "anchor",
    },
    "zero start": {"initial_codes": "zero", "readout": "next", "sequence": "space", "weight_decay": 0.1},
    "accumulation": {"batch": 3, "accumulate": 2, "dual_every": 3, "schedule": "linear"},
    "warm-up": {"warmup_epochs": 9, "reference": "none"},
    "warm-up that measures": {"warmup_epochs": 9},
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["untied", "tied", "unconstrained", "VideoUT", "zero start", "accumulation"])
def test_a_step_on_the_kernels_never_waits_for_the_device(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, dtype: torch.dtype
) -> None:
    """The same with the launchers of the kernels, up to the launch itself."""
    pytest.importorskip("triton")
    from cdt_fast.kernels.aot.case import float32_products
    from cdt_fast.kernels.cards import CARDS
    from cdt_fast.kernels.launch import recording

    monkeypatch.setattr(cards, "unsupported_reason", lambda *_: None)
    config = tiny_config(**{"warmup_epochs": 0, **CASES[case]})
    trainer = meta_trainer(config, tmp_path / "run", monkeypatch, dtype)
    # Without TF32 float32 is multiplied by torch.
    with float32_products(True), recording(CARDS["RTX 3090"]) as launches, never_waiting(monkeypatch):
        take_two_epochs(trainer)
    names = {launch.kernel.__name__ for launch in launches}
    assert any("backward" in name for name in names), names
    assert any("unrolled" in name for name in names) == (dtype == torch.bfloat16), names


def _looks_at_losses(patch: pytest.MonkeyPatch) -> None:
    losses = DUST.layer_losses

    def looking(*arguments: Any) -> tuple[Tensor, Tensor]:
        total, per_layer = losses(*arguments)
        return (total if total > 0 else -total), per_layer

    patch.setattr(DUST, "layer_losses", looking)


def _looks_inside_an_op(patch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS["unrolled_layer_backward"]
    body = operator.forward

    def looking(layer: Any) -> Any:
        layer.next_codes.sum().item()
        return body(layer)

    patch.setattr(operator, "forward", looking)


def _looks_at_the_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda given, _: [float(entry.grad.norm()) for entry in given])


def _counts_losses_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DescentConstraints, "accumulate", lambda self, sums, _: sums.tolist())


def _skips_broken_losses_on_the_host(patch: pytest.MonkeyPatch) -> None:
    update = DualVariables.update
    patch.setattr(DualVariables, "update", lambda self, *given: update(self, *given) if given[-1] else None)


def _selects_the_active(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DualVariables, "update", lambda self, violation, active, _: violation[active])


def _brings_weights_from_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DescentConstraints, "weights", lambda self: torch.tensor([0.0, 0.0, 1.0]))


def _hides_a_copy_in_where(patch: pytest.MonkeyPatch) -> None:
    weights = DescentConstraints.weights
    zero = torch.zeros(())
    patch.setattr(DescentConstraints, "weights", lambda self: torch.where(self._coupling.active, zero, weights(self)))


def _makes_a_tensor_of_numbers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DescentConstraints, "weights", lambda self: torch.tensor([0.0, 0.0, 1.0], device="meta"))


@pytest.mark.parametrize(
    "sabotage",
    [
        _looks_at_losses,
        _looks_inside_an_op,
        _looks_at_the_norm,
        _counts_losses_on_the_host,
        _skips_broken_losses_on_the_host,
        _selects_the_active,
        _brings_weights_from_the_host,
        _hides_a_copy_in_where,
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
    optimizer, schedule = build_optimizer([parameter], 0.5, 0.1, lambda step: 1 / (step + 1), on_device=True)
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
    expected = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], lr=0.5, weight_decay=0.1)
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
