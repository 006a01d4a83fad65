"""Texts and instructions as their settings name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdt_fast.errors import InputError
from cdt_fast.sequence.corpus import load_instructions, load_texts
from cdt_fast.tasks import TASKS
from tests.tiny_text import write_instructions, write_table


def load(task: str, source: Path, **shares: float) -> Any:
    config: Any = TASKS[task].settings()
    config.update("data", {"source": str(source), **shares})
    return load_texts(config) if task == "text" else load_instructions(config)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    return {"text": write_table(tmp_path / "texts.tsv"), "lm": write_instructions(tmp_path / "alpaca.json")}


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("part", ["validation", "test"])
@pytest.mark.parametrize("task", ["text", "lm"])
def test_a_share_that_leaves_a_part_empty_is_refused(
    task: str, part: str, share: float, sources: dict[str, Path]
) -> None:
    with pytest.raises(InputError, match=rf"--{part} must be a share above 0 and below 1.* got {share:g}$"):
        load(task, sources[task], **{part: share})


@pytest.mark.parametrize("part", ["validation", "test"])
@pytest.mark.parametrize("task", ["text", "lm"])
def test_the_command_line_refuses_it_before_the_training(
    task: str, part: str, sources: dict[str, Path], call: Callable[..., Any], tmp_path: Path
) -> None:
    answer = call("train", task, sources[task], f"--{part}=0", "--steps=1", "--device=cpu", "--out", tmp_path / "run")
    assert f"--{part} must be a share" in answer.line()
    assert not (tmp_path / "run").exists()


def test_the_share_of_a_part_that_a_file_holds_does_not_matter(tmp_path: Path) -> None:
    write_table(tmp_path / "train.tsv")
    write_table(tmp_path / "dev.tsv", count=10, seed=1)
    splits = load("text", tmp_path, validation=0.0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [72, 10, 8]
    with pytest.raises(InputError, match="--test must be a share"):
        load("text", tmp_path, validation=0.0, test=0.0)
