"""A tiny clip, tiny runs, and the command line called in this process."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch

from cdt_fast import cli
from cdt_fast.cli import commands
from cdt_fast.training import loop, report
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings
from tests import runs
from tests.runs import evaluate_run, settings_of
from tests.tiny import TINY, scrolling_clip

# The same examples each time: a failure of one run is one of the next.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `--numprocesses=auto`: a worker for each processor; a worker takes a gigabyte of memory."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.fixture
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 gray frames of 32x32 pixels in a .npy file; read only."""
    path = tmp_path_factory.mktemp("clips") / "clip.npy"
    np.save(path, scrolling_clip())
    return path


@pytest.fixture(scope="session")
def tiny_config(clip: Path) -> Callable[..., VideoSettings]:
    """Make tiny settings; keyword arguments replace some of them, whatever their section."""
    return functools.partial(settings_of, "video", TINY, clip)


@dataclass(frozen=True)
class CommandResult:
    """What a command answered."""

    status: int
    out: str
    err: str

    def line(self) -> str:
        """The only line on stderr, beside notes, of a command that refused its input; nothing is on stdout."""
        assert self.status == cli.BAD_INPUT, self
        assert not self.out, self.out
        lines = [line for line in self.err.splitlines() if not line.startswith("cdt-fast: note: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith("\n")
        assert "Traceback" not in self.err
        return f"{lines[0]}\n"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Call the command line in this process with some words."""

    def run(*words: object) -> CommandResult:
        capsys.readouterr()
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as leaving:  # how argparse ends
            status = leaving.code
        captured = capsys.readouterr()
        assert isinstance(status, int)
        return CommandResult(status, captured.out, captured.err)

    return run


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the pictures where a test is about something else."""
    monkeypatch.setattr(report, "drawn_pictures", lambda *_: [])


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin runs, and leave out their training and evaluation."""
    monkeypatch.setattr(loop, "train", lambda *_, **__: None)
    monkeypatch.setattr(commands, "_evaluate", lambda *_: 0)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., VideoSettings]) -> SimpleNamespace:
    """The folders of two evaluated runs on the same clip; read only."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("constrained", "plain"):
        config = tiny_config(constrained=name == "constrained", steps=30)
        evaluate_run(runs.trained(config, folder / name), config)
    return SimpleNamespace(constrained=folder / "constrained", plain=folder / "plain")


@pytest.fixture
def copied_run(trained: SimpleNamespace, tmp_path: Path) -> RunFolder:
    """A copy of the constrained run that a test may damage."""
    return RunFolder(shutil.copytree(trained.constrained, tmp_path / "run"))
