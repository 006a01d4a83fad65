"""No host synchronization in a training step, shown without a GPU: on tensors that have no values to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs import Config
from tests.training.training_cases import HostWaits, meta_trainer, never_waiting

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
    with pytest.raises(Waits):  # the log, which does wait
        trainer._log_entry(1.0)
