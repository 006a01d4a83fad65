"""The noise of a sample is its own, however a step is cut into micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.training.run_folder import RunFolder
from tests.runs import new_trainer, settings_of
from tests.tiny_text import TINY_LANGUAGE, TINY_TEXT, write_instructions, write_language_model, write_table

# Parts with unequal counts.
UNEQUAL: dict[str, Any] = {"batch": 5, "gamma": 0.5, "warmup_epochs": 0, "validate_every": 8}


@pytest.mark.parametrize("task", ["text", "lm"])
def test_the_losses_of_the_parts_are_those_of_the_batch(task: str, tmp_path: Path) -> None:
    if task == "text":
        config = settings_of(task, TINY_TEXT, write_table(tmp_path / "reviews.tsv", 52), **UNEQUAL)
    else:
        source, model = write_instructions(tmp_path / "alpaca.json", 52), write_language_model(tmp_path / "model")
        config = settings_of(task, TINY_LANGUAGE, source, model=model, **UNEQUAL)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    trainer.model.double()
    weights = torch.ones(trainer.workload.num_constraints + 1, dtype=torch.float64)
    batch = trainer._micro_batches()[0]
    assert len(batch) == 5

    def sums(chosen: list[tuple[int, int]]) -> torch.Tensor:
        count = sum(trainer.workload.count(sample) for sample, _ in chosen)
        return trainer.losses(*trainer.workload.batch(chosen, torch.device("cpu")), weights)[1].detach() * count

    expected = sums(batch)
    # The seeds of the samples decide, and the noise is there.
    assert (sums([(sample, number + 1) for sample, number in batch]) / expected - 1).abs().max() > 1e-5
    for parts in (2, 3, 5):
        found = sum(sums(batch[part::parts]) for part in range(parts))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
