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
from cdt_fast.training.optimizer import build_optimizer, set_rate
from cdt_fast.video.settings import VideoSettings
from tests.training.training_cases import HostWaits, NoWaiting, meta_trainer, never_waiting

Config = Callable[..., VideoSettings]
Waits = (HostWaits, RuntimeError, NotImplementedError)

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True, "normalize": True},
    "unconstrained": {"constrained": False},
    "VideoUT": {"model": "ut", "coupling": "absolute"},
    "anchor": {"betas": "none", "resilience": "decay", "reference": 1.0, "reference_mode": "anchor"},
    "accumulation": {"batch": 3, "accumulate": 2, "schedule": "linear"},
    "warm-up": {"warmup_epochs": 9, "reference": "none"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_never_waits_for_the_device(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """In plain torch: the bodies of the ops, forward and backward, clipping, optimizer, sums and duals."""
    trainer = meta_trainer(tiny_config(**{"warmup_epochs": 0, **CASES[case]}), tmp_path / "run", monkeypatch)
    with never_waiting(monkeypatch):
        for _ in range(2 * trainer.steps_per_epoch):
            trainer._train_step()
            trainer.step += 1
    with pytest.raises(Waits):
        trainer._log_entry(1.0)


LOSSES = DUST.layer_losses


def _looking(*arguments: Any) -> tuple[Tensor, Tensor]:
    total, per_depth = LOSSES(*arguments)
    return (total if total > 0 else -total), per_depth


@pytest.mark.parametrize(
    ("owner", "name", "waiting"),
    [
        (DUST, "layer_losses", _looking),
        (torch.nn.utils, "clip_grad_norm_", lambda given, _: [float(entry.grad.norm()) for entry in given]),
        (DescentConstraints, "record", lambda self, sums, _: sums.tolist()),
        (DescentConstraints, "weights", lambda self: torch.tensor([0.0, 0.0, 1.0], device="meta")),
    ],
)
def test_a_step_that_waits_is_caught(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, waiting: Any
) -> None:
    trainer = meta_trainer(tiny_config(warmup_epochs=0), tmp_path / "run", monkeypatch)
    monkeypatch.setattr(owner, name, waiting)
    with never_waiting(monkeypatch), pytest.raises(Waits):
        trainer._train_step()


def test_the_optimizer_of_a_gpu_keeps_its_numbers_on_the_device() -> None:
    """On a CPU in its place: neither an update nor a new rate reads a tensor."""

    class NoReading(NoWaiting):
        def __torch_dispatch__(self, function: Any, *given: Any) -> Any:
            if function.overloadpacket.__name__ in self.reads:
                raise HostWaits(str(function))
            return super().__torch_dispatch__(function, *given)

    parameter, copy = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = build_optimizer([parameter], 0.5, on_device=True)
    (group,) = optimizer.param_groups
    rate = group["lr"]
    parameter.grad = copy.grad = torch.ones(4)
    with NoReading():
        for number in range(1, 4):
            optimizer.step()
            set_rate(optimizer, 0.5 / (number + 1))
        with pytest.raises(HostWaits):
            rate.item()
    assert group["lr"] is rate
    assert rate.item() == 0.125
    expected = torch.optim.AdamW([copy], lr=0.5, weight_decay=0.0)
    for step in range(3):
        expected.param_groups[0]["lr"] = 0.5 / (step + 1)
        expected.step()
    torch.testing.assert_close(parameter, copy, rtol=1e-6, atol=1e-6)
