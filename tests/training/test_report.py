"""`compare` and the report: one table of all, pictures, and runs that cannot stand side by side."""

from __future__ import annotations

import base64
import html
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from cdt_fast import page
from cdt_fast.files import read_json, write_json
from cdt_fast.tables import as_markdown, as_text
from cdt_fast.tasks import open_evaluated
from cdt_fast.training import report
from cdt_fast.video import figures
from tests.runs import Call


def test_compare_prints_one_table_of_all_and_writes_a_report(call: Call, trained: Any, tmp_path: Path) -> None:
    out = tmp_path / "my comparison"
    answer = call("compare", trained.constrained, trained.plain, "--out", out)
    assert (answer.status, answer.err) == (0, "")
    runs = [open_evaluated(path) for path in (trained.constrained, trained.plain)]
    verdicts = report.verdict_table(runs)
    assert [row[0] for row in verdicts] == ["", "the input", "3-D DCT", runs[0].label, runs[1].label]
    assert answer.out.strip().split("\n\n")[0] == as_text(verdicts).strip()
    assert answer.out.rstrip().endswith(f"report: {out / 'report.html'}")
    text = (out / "report.html").read_text(encoding="utf-8")
    measured, quality = figures.tables(runs)
    assert [row[0] for row in measured[1:3]] == ["identity (the noisy frames)", "3-D DCT 8x8x5, shifted grids"]
    assert measured[1][2:4] == [f"{value:.2f}" for value in runs[0].evaluation.baseline_rmse["identity"]]
    for row, run in zip(measured[3:], runs, strict=True):
        assert row[0] == run.label
        assert row[2:] == [f"{value:.2f}" for value in (*run.evaluation.rmse, run.evaluation.mean_rmse)]
    for rows in (verdicts, report.descent_table(runs), measured, quality):
        assert page.table(rows) in text
    assert f"<p>{runs[0].label}: {runs[0].evaluation.report.text}</p>" in text
    assert f"cdt-fast compare {trained.constrained} {trained.plain} --out {html.escape(repr(str(out)))}" in text
    pictures = re.findall('src="data:image/png;base64,([^"]+)"', text)
    assert len(pictures) == len(figures.PICTURES) + 3
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert [path.name for path in out.iterdir()] == ["report.html"]


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
    call: Call, trained: Any, copied_run: Any, tmp_path: Path, key: str, value: Any
) -> None:
    write_json(copied_run.evaluation, {**read_json(copied_run.evaluation), key: value})
    line = call("compare", trained.plain, copied_run.path, "--out", tmp_path / "out").line()
    assert all(part in line for part in (f"different data: {key} is", str(copied_run.path), str(trained.plain)))
    assert ("cdt-fast evaluate RUN" in line) == (key == "gamma")
    assert not (tmp_path / "out").exists()


def test_compare_refuses_what_is_no_evaluated_run_and_to_write_into_one(
    call: Call, trained: Any, copied_run: Any, tmp_path: Path
) -> None:
    line = call("compare", trained.plain, "--out", trained.plain).line()
    assert "is a run, whose own report.html would be replaced" in line
    assert "is no run folder" in call("compare", tmp_path).line()
    copied_run.evaluation.unlink()
    assert "cdt-fast evaluate" in call("compare", trained.plain, copied_run.path).line()
    for content in ('{"task": "vid', '{"task": "video"}', "[]"):
        copied_run.evaluation.write_text(content)
        line = call("compare", trained.plain, copied_run.path).line()
        assert str(copied_run.evaluation) in line
        assert "cdt-fast evaluate" in line


def test_a_report_has_no_picture_of_frames_that_are_cut_short(copied_run: Any) -> None:
    run = open_evaluated(copied_run.path)
    assert figures.draw_depths([run]) is not None
    copied_run.frames.write_bytes(copied_run.frames.read_bytes()[:100])
    assert figures.draw_depths([run]) is None


def test_compare_counts_a_run_once_and_its_page_names_a_command_that_works(
    call: Call, copied_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_figures: None
) -> None:
    monkeypatch.chdir(tmp_path)
    copied_run.path.rename("-run")
    os.symlink("-run", "link")
    answer = call("compare", "--out=-page", "--", "link", "./-run", "-run/", "-run")
    assert answer.status == 0
    assert answer.out.count("(constrained, chain, untied)") == 1
    command = f"cdt-fast compare {tmp_path}/-run --out {tmp_path}/-page"
    assert f"<code>{command}</code> makes this page." in (tmp_path / "-page" / "report.html").read_text()
    assert call(*command.split()[1:]).status == 0
    (tmp_path / "-run" / "evaluation.json").unlink()
    assert f"cdt-fast evaluate {tmp_path}/-run`" in call("compare", "--", "-run").line()


@pytest.mark.parametrize("name", ["cost$x_$y$^$", "_mine"])
def test_names_are_drawn_as_they_are(name: str) -> None:
    figure, (axis,) = report.axes_of()
    axis.plot([0, 1], label=report.as_drawn(name))
    report.add_legend(axis)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.as_png(figure)
    assert len(axis.get_legend_handles_labels()[1]) == 1


def test_runs_of_one_name_are_told_apart_and_without_matplotlib_there_are_tables(
    call: Call, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    paths = [shutil.copytree(trained.constrained, tmp_path / name / "run") for name in "ab"]
    assert call("compare", *paths, "--out", tmp_path).status == 0
    text = (tmp_path / "report.html").read_text()
    assert all(f"{path} (constrained, chain, untied)" in text for path in paths)
    assert "identity" in text
    assert "No pictures: drawing a report needs the package &#x27;matplotlib&#x27;" in text


def test_the_table_of_descent_shows_held_out_ratios_and_blanks_where_none_is_known(trained: Any) -> None:
    runs = [open_evaluated(path) for path in (trained.constrained, trained.plain)]
    header, *rows = report.descent_table(runs)
    assert header[1:6] == ["ℓ_0", "ℓ_1/ℓ_0", "ℓ_2/ℓ_1", "ℓ_L", "worst"]
    for row, run in zip(rows, runs, strict=True):
        assert row[2:4] == [f"{ratio:.3f}" for ratio in run.evaluation.layer_ratio]
        assert row[5].startswith("-") == run.evaluation.feasible
    # Of other depths, each ratio in a column of its own.
    runs[1].evaluation.report.depths = [1, 2, 4]
    header, *rows = report.descent_table(runs)
    assert header[1:7] == ["first ℓ", "ℓ_1/ℓ_0", "ℓ_2/ℓ_1", "ℓ_4/ℓ_2", "ℓ_L", "worst"]
    assert [[cell == "" for cell in row[2:5]] for row in rows] == [[False, False, True], [True, False, False]]
    run = runs[0]
    run.evaluation.layer_ratio = [None, 0.5]
    for name in ("mean_ratio", "median_ratio", "descending_fraction", "quantiles"):
        setattr(run.evaluation.per_sample, name, None)
    run.evaluation.report.worst_violation = None
    assert "None" not in as_text(report.descent_table([run]))
    assert report._ratios([run]) is None


def test_bounds_are_drawn_with_their_multipliers(trained: Any) -> None:
    run = open_evaluated(trained.constrained)
    run.settings.constraints.bounds = {2: 0.5}
    run.evaluation.report.bound_violation = [None, None, 0.25]
    run.evaluation.violation = [None, None, 0.125]
    entry = {"step": 1, "multipliers": [0.0, 1.0, 2.0], "bound_multipliers": [0.0, 0.0, 3.0]}
    run.folder.read_metrics = lambda: [entry]  # pyright: ignore[reportAttributeAccessIssue]
    (axis,) = report._multipliers([run]).axes
    assert [line.get_ydata()[0] for line in axis.lines] == [0.0, 1.0, 2.0, 3.0]
    (axis,) = report.loss_over_depth([run]).axes
    assert axis.lines[-1].get_ydata()[-1] == run.evaluation.layer_loss[2] - 0.25


def test_a_page_shows_what_it_is_given_as_it_is(tmp_path: Path) -> None:
    parts = [page.table([["a<b", "c"], ["1", "&"]]), page.paragraph("run `x < y` & see"), page.picture(b"png", '"it"')]
    page.write_page(tmp_path / "page.html", "1 < 2", parts)
    text = (tmp_path / "page.html").read_text()
    assert "<title>1 &lt; 2</title>" in text
    assert "<tr><th>a&lt;b</th><th>c</th></tr>\n<tr><td>1</td><td>&amp;</td></tr>" in text
    assert "<p>run <code>x &lt; y</code> &amp; see</p>" in text
    assert f'src="data:image/png;base64,{base64.b64encode(b"png").decode()}" alt="&quot;it&quot;"' in text
    assert not re.search('(src|href)="(?!data:)', text)  # nothing that the page would have to fetch


def test_a_table_is_aligned() -> None:
    assert as_text([["a", "bb"], ["ccc", "d"]]) == "a    bb\n---  --\nccc   d"
    assert as_markdown([["a", "bb"], ["ccc", "d"]]) == "| a | bb |\n|---|---:|\n| ccc | d |"
