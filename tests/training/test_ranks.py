"""Several ranks: the noise of a sample is its own, and two ranks train as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.files import read_json
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings
from tests.ranks import in_ranks
from tests.runs import Call, Config, new_trainer, settings_of
from tests.tiny import words_of_command
from tests.tiny_text import TINY_LANGUAGE, TINY_TEXT, write_instructions, write_language_model, write_table

# Shares with unequal counts, and a last micro-batch of one sample, in which one rank has nothing to do.
UNEQUAL: dict[str, Any] = {"batch": 5, "gamma": 0.5, "warmup_epochs": 0, "validate_every": 8}


@pytest.mark.parametrize("task", ["text", "lm"])
def test_the_losses_of_the_shares_are_those_of_the_batch(task: str, tmp_path: Path) -> None:
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
    for ranks in (2, 3, 5, 7):
        found = sum(sums(batch[rank::ranks]) for rank in range(min(ranks, 5)))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def train_rank(rank: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    run = RunFolder(Path(folder) / "together")
    trainer = new_trainer(run, VideoSettings.load(run.config))
    assert trainer.accelerator.num_processes == 2
    trainer.run(progress=False)


@pytest.mark.slow
def test_two_ranks_train_as_one(tiny_config: Config, tmp_path: Path, in_float64: None) -> None:
    """46 windows in steps of ten: the fifth ends with a micro-batch of one, in which one rank has nothing to do."""
    steps = {"window": 1, "batch": 5, "accumulate": 2, "steps": 5, "lr": 1e-3, "warmup_epochs": 0, "reference": 1.0}
    config = tiny_config(**steps)
    alone = new_trainer(RunFolder.create(tmp_path / "alone", config), config)
    assert len(alone.data.train) == 46
    alone.run(progress=False)
    together = RunFolder.create(tmp_path / "together", config)
    in_ranks(train_rank, tmp_path)
    state = load_checkpoint(together.checkpoint)
    for found, expected in (
        (state["model"]["dictionary"], alone.model.dictionary.data),
        (state["constraints"]["duals.state"], alone.constraints.duals.state),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for entry, expected in zip(together.read_metrics(), alone.folder.read_metrics(), strict=True):
        assert entry.get("loss", []) == pytest.approx(expected.get("loss", []), rel=0, abs=1e-12)


@pytest.mark.slow
def test_torchrun_starts_the_command_line_on_two_ranks(call: Call, tmp_path: Path) -> None:
    """One of them makes the folder, evaluates and speaks; a folder that is taken ends both at once."""
    source, model = write_instructions(tmp_path / "alpaca.json", 52), write_language_model(tmp_path / "model")
    words = words_of_command(TINY_LANGUAGE, model=model, **UNEQUAL)
    assert call("train", "lm", source, *words, "--out", tmp_path / "alone").status == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "cdt_fast"]
    command = [*launch, "train", "lm", str(source), *words, "--out", str(tmp_path / "together")]

    def answer() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    first = answer()
    assert first.returncode == 0, first.stderr
    assert (first.stdout.count("report: "), first.stderr.count(" train, ")) == (1, 1)
    one, two = (read_json(tmp_path / name / "evaluation.json") for name in ("alone", "together"))
    assert two["layer_loss"] == pytest.approx(one["layer_loss"], rel=1e-5)
    assert two["violation"] == pytest.approx(one["violation"], abs=1e-4)
    second = answer()
    assert second.returncode
    assert second.stderr.count("holds a run already") == 1
