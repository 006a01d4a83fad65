from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdt_fast.files import read_json, write_json
from cdt_fast.tables import as_markdown, as_text
from cdt_fast.tasks import open_evaluated
from cdt_fast.training import figures, report


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the pictures where a test is about something else."""

    def draw(folder: Path, runs: object) -> list[tuple[str, str]]:
        (folder / "picture.png").write_bytes(b"")
        return [("picture.png", "A picture")]

    monkeypatch.setattr(figures, "write_figures", draw)


def test_compare_prints_one_table_of_all_and_writes_a_report(
    call: Callable[..., Any], trained: Any, tmp_path: Path
) -> None:
    out, values = tmp_path / "my comparison", tmp_path / "values.json"
    answer = call("compare", trained.constrained, trained.plain, "--out", out, "--json", values)
    assert answer.status == 0
    assert answer.err == ""
    table = answer.out.strip().split("\n\n")[0].splitlines()
    assert [line[:29].strip() for line in table[2:]] == [
        "identity (the noisy frames)",
        "mean of 3x3 pixels",
        "DCT 8x8, hard threshold",
        "3-D DCT 8x8x5, hard threshold",
        "3-D DCT 8x8x5, shifted grids",
        "constrained (constrained, cha",
        "plain (unconstrained, tied)",
    ]
    constrained, plain = (read_json(path / "evaluation.json") for path in (trained.constrained, trained.plain))
    assert table[2].split()[-3:-1] == [f"{value:.2f}" for value in constrained["identity_rmse"]]
    for line, evaluation in ((table[7], constrained), (table[8], plain)):
        numbers = [*evaluation["rmse"], evaluation["mean_rmse"]]
        assert line.split()[-3:] == [f"{value:.2f}" for value in numbers]
    assert answer.out.rstrip().endswith(f"report: {out / 'report.md'}")

    text = (out / "report.md").read_text(encoding="utf-8")
    assert f"cdt-fast compare {trained.constrained} {trained.plain} --out '{out}'" in text
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert {"loss_over_depth.png", "rmse_over_noise.png", "multipliers.png"} < set(pictures)
    assert {"sample_ratios.png", "frames.png", "early_exit.png"} < set(pictures)
    for picture in pictures:
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in out.iterdir()} == {"report.md", *pictures}
    assert json.loads(values.read_text()) == {
        "constrained (constrained, chain, untied)": constrained,
        "plain (unconstrained, tied)": plain,
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source", "/elsewhere/clip.npy"),
        ("gamma", [0.15, 0.6]),
        ("sigma", 0.25),
        ("training_gamma", 0.3),
        ("test_windows", [["clip.npy", 50]]),
        ("task", "text"),
    ],
)
def test_runs_of_different_data_are_not_compared(
    call: Callable[..., Any], trained: Any, copied_run: Any, tmp_path: Path, key: str, value: Any
) -> None:
    write_json(copied_run.evaluation, {**read_json(copied_run.evaluation), key: value})
    line = call("compare", trained.plain, copied_run.path, "--out", tmp_path / "out").line()
    assert f"different data: {key} is" in line
    assert ("cdt-fast evaluate RUN" in line) == (key == "gamma")
    assert str(copied_run.path) in line
    assert str(trained.plain) in line
    assert not (tmp_path / "out").exists()


def test_compare_refuses_what_is_no_evaluated_run(
    call: Callable[..., Any], trained: Any, copied_run: Any, tmp_path: Path
) -> None:
    assert "is no run folder" in call("compare", tmp_path).line()
    copied_run.evaluation.unlink()
    assert "cdt-fast evaluate" in call("compare", trained.plain, copied_run.path).line()
    copied_run.evaluation.write_text('{"task": "vid')
    assert str(copied_run.evaluation) in call("compare", trained.plain, copied_run.path).line()
    for content in ('{"task": "video"}', "[]"):
        copied_run.evaluation.write_text(content)
        line = call("compare", trained.plain, copied_run.path).line()
        assert str(copied_run.evaluation) in line
        assert "cdt-fast evaluate" in line


def test_runs_whose_folders_have_one_name_are_told_apart(
    call: Callable[..., Any], trained: Any, tmp_path: Path, quick_figures: None
) -> None:
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for path in paths:
        shutil.copytree(trained.constrained, path)
    answer = call("compare", *paths, "--out", tmp_path, "--json", tmp_path / "values.json")
    assert answer.status == 0
    assert set(read_json(tmp_path / "values.json")) == {f"{path} (constrained, chain, untied)" for path in paths}


def test_a_report_without_matplotlib_has_its_tables(
    call: Callable[..., Any], trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = call("compare", trained.plain, "--out", tmp_path)
    assert answer.status == 0
    text = (tmp_path / "report.md").read_text()
    assert "identity" in text
    assert "No pictures: drawing a report needs the package 'matplotlib'" in text


def test_the_verdict_table_shows_held_out_ratios_and_the_worst_layer(trained: Any) -> None:
    runs = [open_evaluated(path) for path in (trained.constrained, trained.plain)]
    header, first, second = report.descent_table(runs)
    assert header[1:6] == ["ℓ_0", "ℓ_1/ℓ_0", "ℓ_2/ℓ_1", "ℓ_L", "feasible"]
    for row, run in ((first, runs[0]), (second, runs[1])):
        assert row[2:4] == [f"{ratio:.3f}" for ratio in run.evaluation.layer_ratio]
        assert row[5] == ("yes" if run.evaluation.feasible else "no")


def test_numbers_that_are_not_known_are_blank(trained: Any) -> None:
    run = open_evaluated(trained.constrained)
    run.evaluation.layer_ratio = [None, 0.5]
    for name in ("mean_ratio", "median_ratio", "descending_fraction"):
        setattr(run.evaluation.per_sample, name, None)
    run.evaluation.report.worst_violation = None
    assert "None" not in "".join(as_text(table) for table in report.tables([run]))


def test_a_table_is_aligned() -> None:
    assert as_text([["a", "bb"], ["ccc", "d"]]) == "a    bb\n---  --\nccc   d"
    assert as_markdown([["a", "bb"], ["ccc", "d"]]) == "| a | bb |\n|---|---:|\n| ccc | d |"
