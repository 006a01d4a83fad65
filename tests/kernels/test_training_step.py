"""On a GPU, torch itself says when the host waits for the device: in a training step it never does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdt_fast import ops
from tests.kernels.step_cases import ACCUMULATED, CONSTRAINTS, MODELS, Steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error wherever torch would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.fixture(autouse=True)
def _as_in_training(_triton: None) -> Iterator[None]:
    """A layer that no kernel holds is composed of ops, as for a user."""
    with ops.use_backend("auto"):
        yield


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
def test_a_step_of_the_trainer_never_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """With the choice of windows, their way to the device and their noise."""
    for package in ("accelerate", "tqdm", "tomli_w"):
        pytest.importorskip(package)
    from tests.kernels.trainer_cases import trainer_on_gpu

    trainer = trainer_on_gpu(tmp_path, monkeypatch, changes)
    for step in range(3 * trainer.steps_per_epoch):
        if step < trainer.steps_per_epoch:
            trainer._train_step()
        else:
            with no_waiting():
                trainer._train_step()
        trainer.step += 1
    assert np.isfinite(trainer._log_entry(1.0)["loss"]).all()
