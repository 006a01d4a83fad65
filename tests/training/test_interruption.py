"""A run that was stopped, at any moment and by whatever, ends bit for bit like one that was not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.files import read_json
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.interruption import on_signals
from cdt_fast.training.loop import Interrupted, Trainer
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video import task as video_task
from tests.runs import Call, Config, assert_same_runs, evaluate_run, train, trained
from tests.tiny import TINY, words_of_command
from tests.training.training_cases import Killed, around, signal_after

# Slack, Adam, automatic reference and accumulation, past the step in which the reference is fixed; the three
# intervals share few steps, so that sums for the log wait in most checkpoints.
SETTINGS: dict[str, dict[str, Any]] = {
    "constrained": {"rate": 0.9, "steps": 27, "accumulate": 2, "validate_every": 5},
    "ascent": {"steps": 27, "betas": "none", "reference": 1.0},
    "plain": {"constrained": False, "steps": 12, "validate_every": 5},
}


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    """One thread, as sums may depend on their number; and SIGINT as in a terminal, not ignored as in the background."""
    before, previous = torch.get_num_threads(), signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_config: Config) -> dict[str, RunFolder]:
    """Runs that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: trained(tiny_config(**changes), folder / name) for name, changes in SETTINGS.items()}


@pytest.mark.parametrize(
    ("name", "steps", "number"),
    [
        ("constrained", [1], signal.SIGINT),
        ("constrained", [3, 8, 25], signal.SIGTERM),
        ("ascent", [4, 20], signal.SIGINT),
        ("plain", [12], signal.SIGTERM),
        ("plain", [2], signal.SIGHUP),
    ],
)
def test_a_run_that_a_signal_stopped_resumes_bit_for_bit(
    tiny_config: Config,
    tmp_path: Path,
    whole: dict[str, RunFolder],
    name: str,
    steps: list[int],
    number: signal.Signals,
) -> None:
    config = tiny_config(**SETTINGS[name])
    run = RunFolder.create(tmp_path / "run", config)
    handlers = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    with signal_after(number, *steps):
        for count, expected in enumerate(steps):
            with pytest.raises(Interrupted) as stop:
                train(run, config, resume=count > 0, progress=False)
            assert stop.value.signal_number == number
            assert load_checkpoint(run.checkpoint)["step"] == expected
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == handlers
    for _ in range(2):  # a finished run changes no more
        train(run, config, resume=True, progress=False)
        assert_same_runs(run, whole[name])


# What the process was doing when it died: the function, and whether that had happened.
MOMENTS = [(name, when) for name in ("_train_step", "_validate", "_save_checkpoint") for when in ("before", "after")]


@pytest.mark.parametrize(("name", "when"), MOMENTS)
def test_a_run_that_died_at_any_moment_resumes_bit_for_bit(
    tiny_config: Config, tmp_path: Path, whole: dict[str, RunFolder], name: str, when: str
) -> None:
    config = tiny_config(**SETTINGS["constrained"])
    run = RunFolder.create(tmp_path / "run", config)
    calls: list[Trainer] = []

    def die(trainer: Trainer) -> None:
        calls.append(trainer)
        if len(calls) == 3:
            raise Killed

    with around(name, **{when: die}), pytest.raises(Killed):
        train(run, config, progress=False)
    for folder in [run.path, *filter(Path.is_dir, run.path.iterdir())]:
        (folder / ".model-0.tmp.safetensors").touch()  # a file that was being written
    train(run, config, resume=True, progress=False)
    assert_same_runs(run, whole["constrained"])


@pytest.mark.parametrize(("name", "step"), [("_train_step", 6), ("_validate", 5), ("_save_checkpoint", 5)])
def test_a_run_that_was_moved_is_not_made_again_and_resumes_where_it_is(
    tiny_config: Config, tmp_path: Path, whole: dict[str, RunFolder], name: str, step: int
) -> None:
    config = tiny_config(**SETTINGS["constrained"])
    run, moved = RunFolder.create(tmp_path / "run", config), RunFolder(tmp_path / "moved")

    def move(trainer: Trainer) -> None:
        if trainer.step == step:
            run.path.rename(moved.path)

    with around(name, move), pytest.raises(InputError, match=r"run: was moved or removed while it was in use"):
        train(run, config, progress=False)
    assert os.listdir(tmp_path) == ["moved"]
    train(moved, config, resume=True, progress=False)
    assert_same_runs(moved, whole["constrained"])


def test_a_run_that_was_removed_while_it_was_measured_is_not_made_again(
    call: Call, copied_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdt_fast.video.evaluation.baseline_errors", lambda run, *_: shutil.rmtree(run.path) or {})
    answer = call("evaluate", copied_run.path)
    assert answer.err.splitlines()[-1] == f"cdt-fast: {copied_run.path}: was moved or removed while it was in use"
    assert not copied_run.path.exists()


def test_a_model_that_a_killed_run_kept_after_its_checkpoint_is_not_taken_for_the_one_before(
    tiny_config: Config, tmp_path: Path
) -> None:
    config = tiny_config(**SETTINGS["constrained"])
    run = RunFolder.create(tmp_path / "run", config)
    kept: list[Any] = []

    def die(trainer: Trainer) -> None:
        kept.append(trainer.best)
        if len(kept) > 1 and kept[-1] != kept[-2]:
            raise Killed

    with around("_save_checkpoint", die), pytest.raises(Killed):
        train(run, config, progress=False)
    with pytest.raises(InputError, match=r"run: its model is newer than its checkpoint.*--resume"):
        evaluate_run(run, config)
    with signal_after(signal.SIGTERM, kept[-2]["step"] + 1), pytest.raises(Interrupted):
        train(run, config, resume=True, progress=False)
    with pytest.raises(InputError, match="its model is newer than its checkpoint"):
        evaluate_run(run, config)
    train(run, config, resume=True, progress=False)
    values = evaluate_run(run, config).evaluation
    assert values.kept_step >= kept[-1]["step"]
    assert values.kept_loss == load_checkpoint(run.checkpoint)["best"]["loss"][-1]


def test_the_untrained_loss_is_that_of_the_first_validation_whatever_became_of_the_log(
    call: Call, copied_run: RunFolder, quick_figures: None
) -> None:
    first, *others = copied_run.metrics.read_text().splitlines()
    copied_run.metrics.write_text("\n".join(['{"step": 0}', *others]) + "\n")
    assert call("evaluate", copied_run.path).status == 0
    assert read_json(copied_run.evaluation)["untrained_loss"] == json.loads(first)["validation"]["loss"][-1]


def test_a_checkpoint_of_other_settings_or_frames_is_refused(tiny_config: Config, tmp_path: Path) -> None:
    run = trained(tiny_config(steps=3), tmp_path / "run")
    before = run.checkpoint.read_bytes()
    for changes, fact in [
        ({"layers": 3}, "does not fit config.toml"),
        ({"betas": "none"}, "does not fit config.toml"),
        ({"window": 4}, r"\[data\] window was 5, is 4"),
        ({"seed": 1}, r"state\.safetensors: is of another run.*\[training\] seed was 0, is 1"),
        ({"steps": 2}, "is at step 3, and the training has 2"),
        ({"source": "demo"}, "not those"),
    ]:
        with pytest.raises(InputError, match=fact):
            train(run, tiny_config(**{"steps": 3, **changes}), resume=True, progress=False)
    assert run.checkpoint.read_bytes() == before


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_signals(lambda *_: pytest.fail("a signal was handled"), signal.SIGHUP):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_the_first_step_leaves_no_run(
    call: Call, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    monkeypatch.setattr(video_task, "load", lambda *_: signal.raise_signal(number))
    answer = call("train", "video", clip, "--out", tmp_path / "run", *words_of_command(TINY))
    assert (answer.status, answer.err) == (status, f"cdt-fast: stopped by {number.name}\n")
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_a_killed_process_and_a_terminated_one_resume_bit_for_bit(tiny_config: Config, tmp_path: Path) -> None:
    """SIGKILL after the first checkpoint, SIGTERM in the run that resumed, and the rest in this process."""
    config = tiny_config(steps=80, accumulate=2, size=16, code_size=16, validate_every=7)
    whole, run = trained(config, tmp_path / "whole"), RunFolder.create(tmp_path / "run", config)
    command = [sys.executable, "-m", "cdt_fast", "train", "video", "--resume", str(run.path)]

    def stop_after(earlier: int, number: signal.Signals) -> tuple[int, int]:
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 240
        while not (run.checkpoint.exists() and load_checkpoint(run.checkpoint)["step"] > earlier):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(number)
        process.wait(timeout=240)
        step = load_checkpoint(run.checkpoint)["step"]
        assert step < 80
        return process.returncode, step

    status, step = stop_after(0, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert stop_after(step, signal.SIGTERM)[0] == 143
    train(run, config, resume=True, progress=False)
    assert_same_runs(run, whole)
