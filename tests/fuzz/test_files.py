"""The fuzzing of files itself: a few of each kind, and what it must find."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.fuzz import files


@pytest.mark.parametrize("kind", files.READ)
def test_some_files(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    made = {kind: files.make_files(whole)[kind]}
    files.check_whole(made, tmp_path)
    counts, problems = files.campaign(kind, made[kind], range(10), tmp_path)
    assert not problems
    assert counts["read"] + counts["refused"] == 10
    assert counts["refused"]


def test_what_the_fuzzing_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.toml"
    path.write_text("a = 1\n")
    ways = {
        "0": lambda: {}["missing"],
        "1": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "2": lambda: bytearray(2 * files.MEMORY),
    }
    monkeypatch.setitem(files.READ, "settings", lambda path: ways[path.parent.name]())
    _, problems = files.campaign("settings", [path], range(3), tmp_path)
    assert [problem.partition(":")[0] for problem in problems] == [f"settings, seed {seed}" for seed in range(3)]
    for problem, word in zip(problems, ("KeyError", "-9", "MemoryError"), strict=True):
        assert word in problem
