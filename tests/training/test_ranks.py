"""Texts and instructions on several ranks: the noise of a text is its own, and two ranks train as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.files import read_json
from cdt_fast.tasks import TASKS as ENTRIES
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from tests.runs import new_trainer
from tests.tiny_text import TINY_LANGUAGE, TINY_TEXT, words_of_command, write_instructions, write_table

TASKS = {"text": TINY_TEXT, "lm": TINY_LANGUAGE}
# Shares with unequal counts, and a last micro-batch of one sample, in which one rank has nothing to do.
UNEQUAL: dict[str, Any] = {"batch": 5, "gamma": 0.5, "warmup_epochs": 0, "validate_every": 8}


def source_of(task: str, folder: Path) -> Path:
    if task == "text":
        return write_table(folder / "reviews.tsv", 52)
    pytest.importorskip("transformers")
    return write_instructions(folder / "alpaca.json", 52)


def settings_for(task: str, source: Path, **changes: Any) -> RunSettings:
    config = ENTRIES[task].settings()
    for section, values in TASKS[task].items():
        config.update(section, values)
    for name, value in {**UNEQUAL, **changes}.items():
        config.set(next(part for part in TASKS[task] if hasattr(getattr(config, part), name)), name, value)
    config.data.source = str(source)
    return config


@pytest.mark.parametrize("task", ["text", "lm"])
def test_the_losses_of_the_shares_are_those_of_the_batch(task: str, tmp_path: Path) -> None:
    config = settings_for(task, source_of(task, tmp_path))
    run = RunFolder.create(tmp_path / "run", config)
    trainer = new_trainer(run, config)
    trainer.model.double()
    weights = torch.ones(trainer.workload.num_constraints + 1, dtype=torch.float64)
    batch = trainer._micro_batches()[0]
    assert len(batch) == 5

    def sums(chosen: list[tuple[int, int]]) -> torch.Tensor:
        count = sum(trainer.workload.count(sample) for sample, _ in chosen)
        return trainer.losses(*trainer._batch(chosen), weights)[1].detach() * count

    expected = sums(batch)
    # The seeds of the samples decide, and the noise is there.
    other_noise = sums([(sample, number + 1) for sample, number in batch])
    assert (other_noise / expected - 1).abs().max() > 1e-5
    for ranks in (2, 3, 5, 7):
        found = sum(sums(batch[rank::ranks]) for rank in range(min(ranks, 5)))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.slow
def test_torchrun_starts_the_command_line_on_two_ranks(call: Any, tmp_path: Path) -> None:
    """One of them makes the folder, evaluates and speaks; a folder that is taken ends both at once."""
    source = source_of("lm", tmp_path)
    words = words_of_command(TINY_LANGUAGE, **UNEQUAL)
    assert call("train", "lm", source, *words, "--out", tmp_path / "alone").status == 0
    together = tmp_path / "together"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "cdt_fast", "train", "lm", str(source), *words, "--out", str(together)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("report: ") == 1
    assert answer.stderr.count(" train, ") == 1
    one, two = (read_json(tmp_path / name / "evaluation.json") for name in ("alone", "together"))
    assert two["layer_loss"] == pytest.approx(one["layer_loss"], rel=1e-5)
    assert two["violation"] == pytest.approx(one["violation"], abs=1e-4)
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert answer.returncode
    assert answer.stderr.count("holds a run already") == 1
