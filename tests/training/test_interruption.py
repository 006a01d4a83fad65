"""A run that was stopped, at any moment and by whatever, ends bit for bit like one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.loop import Interrupted, Trainer
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings
from cdt_fast.video.task import VideoTask
from tests.runs import train
from tests.tiny import tiny_arguments
from tests.training.training_cases import Killed, signal_after, train_until_killed

Config = Callable[..., VideoSettings]

# Slack, Adam, automatic reference and accumulation, past the step in which the reference is fixed; the three
# intervals share few steps, so that sums for the log wait in most checkpoints.
SETTINGS: dict[str, dict[str, Any]] = {
    "constrained": {
        "rate": 0.9,
        "steps": 27,
        "accumulate": 2,
        "validate_every": 5,
    },
    "ascent": {"steps": 27, "betas": "none", "reference": 1.0},
    "plain": {"constrained": False, "steps": 12, "validate_every": 5},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums may depend on the number of threads, and the other process of a test has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_config: Config) -> Callable[[str], RunFolder]:
    done: dict[str, RunFolder] = {}

    def get(name: str) -> RunFolder:
        if name not in done:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            config = tiny_config(**SETTINGS[name])
            done[name] = RunFolder.create(tmp_path_factory.mktemp("whole") / "run", config)
            train(done[name], config, progress=False)
            torch.set_num_threads(threads)
        return done[name]

    return get


def assert_same(left: Any, right: Any, where: str = "") -> None:
    assert type(left) is type(right), where
    if isinstance(left, Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for index, (here, there) in enumerate(zip(left, right, strict=True)):
            assert_same(here, there, f"{where}.{index}")
    else:
        assert left == right, where


def assert_same_runs(run: RunFolder, expected: RunFolder) -> None:
    assert_same(load_checkpoint(run.checkpoint), load_checkpoint(expected.checkpoint))
    for name in ("model.safetensors", "config.json"):
        assert (run.model / name).read_bytes() == (expected.model / name).read_bytes()
    entries, others = run.read_metrics(), expected.read_metrics()
    for entry in (*entries, *others):
        for name in [name for name in entry if name.endswith("_per_second")]:  # what tells the time
            entry.pop(name)
    assert entries == others
    left = [path for path in run.path.rglob(".*") if path.is_file()]
    assert not left, f"left: {left}"


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell starts what it runs in the background with SIGINT ignored, and Python leaves that as it is."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize(
    ("name", "steps", "number"),
    [
        ("constrained", [1], signal.SIGINT),
        ("constrained", [3, 8, 25], signal.SIGTERM),
        ("ascent", [4, 20], signal.SIGINT),
        ("plain", [12], signal.SIGTERM),
    ],
)
def test_a_run_that_a_signal_stopped_resumes_bit_for_bit(
    tiny_config: Config,
    tmp_path: Path,
    uninterrupted: Callable[[str], RunFolder],
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
    train(run, config, resume=True, progress=False)
    assert_same_runs(run, uninterrupted(name))


# What the process was doing when it died: the function, and whether that had happened.
MOMENTS = {
    "in a step": ("_train_step", "before"),
    "after a step": ("_train_step", "after"),
    "before validation": ("_validate", "before"),
    "between the kept model and its line": ("_validate", "after"),
    "before the checkpoint": ("_save_checkpoint", "before"),
    "after the checkpoint": ("_save_checkpoint", "after"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_died_at_any_moment_resumes_bit_for_bit(
    tiny_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Callable[[str], RunFolder],
    moment: str,
) -> None:
    config = tiny_config(**SETTINGS["constrained"])
    run = RunFolder.create(tmp_path / "run", config)
    name, when = MOMENTS[moment]
    original = getattr(Trainer, name)
    calls = 0

    def dying(trainer: Trainer) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and when == "before":
            raise Killed
        result = original(trainer)
        if calls == 3:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, name, dying)
        with pytest.raises(Killed):
            train(run, config, progress=False)
    train(run, config, resume=True, progress=False)
    assert_same_runs(run, uninterrupted("constrained"))


def test_half_a_line_and_half_a_checkpoint_are_no_trouble(
    tiny_config: Config, tmp_path: Path, uninterrupted: Callable[[str], RunFolder]
) -> None:
    config = tiny_config(**SETTINGS["constrained"])
    run = RunFolder.create(tmp_path / "run", config)
    train_until_killed(run, config, 15)
    with run.metrics.open("a") as metrics:
        metrics.write('{"step": 15, "lo')
    (run.checkpoint.parent / ".state-abc.tmp.safetensors").write_bytes(b"half of a checkpoint")
    (run.model / ".model-abc.tmp.safetensors").write_bytes(b"half of a model")
    train(run, config, resume=True, progress=False)
    assert_same_runs(run, uninterrupted("constrained"))


def test_resuming_a_finished_run_changes_nothing(
    tiny_config: Config, tmp_path: Path, uninterrupted: Callable[[str], RunFolder]
) -> None:
    config = tiny_config(**SETTINGS["plain"])
    run = RunFolder.create(tmp_path / "run", config)
    train(run, config, progress=False)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    for _ in range(2):
        train(run, config, resume=True, progress=False)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert_same_runs(run, uninterrupted("plain"))


def test_a_run_without_a_checkpoint_resumes_at_its_beginning(
    tiny_config: Config, tmp_path: Path, uninterrupted: Callable[[str], RunFolder]
) -> None:
    config = tiny_config(**SETTINGS["plain"])
    run = RunFolder.create(tmp_path / "run", config)
    run.metrics.write_text('{"step": 0, "validation": {}}\n{"step": 2}\n{"step"')
    train(run, config, resume=True, progress=False)
    assert_same_runs(run, uninterrupted("plain"))


def test_a_checkpoint_of_other_settings_or_frames_is_refused(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(steps=3)
    run = RunFolder.create(tmp_path / "run", config)
    train(run, config, progress=False)
    before = run.checkpoint.read_bytes()
    for changes, fact in [
        ({"layers": 3}, "does not fit config.toml"),
        ({"code_size": 32}, "does not fit config.toml"),
        ({"betas": "none"}, "does not fit config.toml"),
        ({"window": 4}, r"\[data\] window was 5, is 4"),
        ({"seed": 1}, r"state\.safetensors: is of another run.*\[training\] seed was 0, is 1"),
        ({"steps": 2}, "is at step 3, and the training has 2"),
        ({"source": "demo"}, "not those"),
    ]:
        with pytest.raises(InputError, match=fact):
            train(run, tiny_config(**{"steps": 3, **changes}), resume=True, progress=False)
    assert run.checkpoint.read_bytes() == before


def test_the_command_says_how_to_go_on(call: Callable[..., Any], clip: Path, tmp_path: Path) -> None:
    number, status = signal.SIGTERM, 143
    run = tmp_path / "my run"
    with signal_after(number, 2):
        answer = call("train", "video", clip, "--out", run, *tiny_arguments())
    assert answer.status == status
    last = answer.err.splitlines()[-1]
    assert last == (
        f"cdt-fast: stopped by {number.name} after step 2; continue with: cdt-fast train video --resume '{run}'"
    )
    assert call("train", "video", "--resume", run).status == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_first_step_leaves_no_run(
    call: Callable[..., Any],
    clip: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    status: int,
) -> None:
    monkeypatch.setattr(VideoTask, "load", lambda *_: signal.raise_signal(number))
    answer = call("train", "video", clip, "--out", tmp_path / "run", *tiny_arguments())
    assert answer.status == status
    assert answer.err == f"cdt-fast: stopped by {number.name}\n"
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_a_killed_process_and_a_terminated_one_resume_bit_for_bit(tiny_config: Config, tmp_path: Path) -> None:
    """SIGKILL after the first checkpoint, SIGTERM in the run that resumed, and the rest in this process."""
    config = tiny_config(steps=80, accumulate=2, size=16, code_size=16, validate_every=7)
    whole = RunFolder.create(tmp_path / "whole", config)
    train(whole, config, progress=False)
    run = RunFolder.create(tmp_path / "run", config)
    command = [sys.executable, "-m", "cdt_fast", "train", "video", "--resume", str(run.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def stop_after(earlier: int, number: signal.Signals) -> tuple[int, str, int]:
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 240
        while not (run.checkpoint.exists() and load_checkpoint(run.checkpoint)["step"] > earlier):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=240)
        return process.returncode, errors, load_checkpoint(run.checkpoint)["step"]

    status, _, step = stop_after(0, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert step < 80
    status, errors, step = stop_after(step, signal.SIGTERM)
    assert status == 143
    assert step < 80
    assert errors.splitlines()[-1] == (
        f"cdt-fast: stopped by SIGTERM after step {step}; continue with: cdt-fast train video --resume {run.path}"
    )
    train(run, config, resume=True, progress=False)
    assert_same_runs(run, whole)
