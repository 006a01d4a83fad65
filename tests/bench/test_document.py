"""Results files to which runs add, and the document made from them."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.bench import document as documents
from cdt_fast.bench.case import Implementation
from cdt_fast.bench.ceilings import Ceilings
from cdt_fast.bench.clock import Rounds
from cdt_fast.bench.document import document
from cdt_fast.bench.goals import GOALS
from cdt_fast.bench.machine import describe, source_digest
from cdt_fast.bench.measure import measure
from cdt_fast.bench.results_file import add, open_file, read
from cdt_fast.bench.suites import SUITES
from cdt_fast.errors import InputError
from cdt_fast.files import write_json
from tests.bench.bench_cases import case_of, steady, unavailable

CPU = torch.device("cpu")
REFERENCE = "DUST tied, constrained, float32"
Results = dict[str, Any]


@pytest.fixture(scope="module")
def measured() -> Results:
    """A made-up case as it was measured."""
    candidates = [
        Implementation("eager", "eager", steady(1.0)),
        Implementation("SDPA", "peer", unavailable),
        Implementation("cdt_fast", "ours", steady(1.0)),
    ]
    case = case_of(*candidates, suite="step", name=REFERENCE, flop=1e3, moved=1e3, note="made up")
    return measure(case, CPU, Rounds(2, 2, 0.0), Ceilings(CPU, "toy"), lambda *_: "at toy size there is none")


def run_of(date: str = "2026-01-02 03:04", **changes: Any) -> Results:
    machine = {**describe(CPU, "as it comes"), "name": "Made Up 1", "command": f"cdt-fast bench at {date}", **changes}
    return {"machine": machine, "date": date}


def read_results(folder: Path) -> dict[str, Results]:
    return {path.name: read(path) for path in sorted(folder.glob("*.json"))}


def add_to(
    folder: Path, run: Results, order: list[str], case: Results, suite: str = "step", size: str = "cpu", **ceilings: Any
) -> Path:
    """Add a case as a run does; the path of the file."""
    path, contents = open_file(folder, "cpu", suite, size, run["machine"]["name"])
    add(contents, case, {**run, "ceilings": ceilings}, order)
    write_json(path, contents)
    return path


@pytest.fixture
def result(measured: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The contents of a results file with that case."""
    rates = {"flop_per_second": {"float32": {"1x1 by 1x1": 2e9}}, "bytes_per_second": {}}
    return read(add_to(tmp_path_factory.mktemp("result"), run_of(), [REFERENCE], copy.deepcopy(measured), **rates))


def named(measured: Results, name: str, **changes: Any) -> Results:
    return {**copy.deepcopy(measured), "case": name, **changes}


def test_a_run_adds_its_cases_and_replaces_what_it_measures_again(measured: Results, tmp_path: Path) -> None:
    order = ["a", "b", "c"]
    for name in ("c", "gone", "a"):
        add_to(tmp_path, run_of("2026-01-01 00:00"), [*order, "gone"], named(measured, name), of="first")
    second = run_of("2026-02-02 00:00", torch="9.9")
    for name in ("b", "c"):
        add_to(tmp_path, second, order, named(measured, name, note="again"), of="second")
    found = read(tmp_path / "made-up-1-step.json")
    assert [(case["case"], case["note"]) for case in found["cases"]] == [
        ("a", "made up"),
        ("b", "again"),
        ("c", "again"),
    ]
    runs = [found["runs"][case["run"]] for case in found["cases"]]
    assert [run["ceilings"]["of"] for run in runs] == ["first", "second", "second"]
    assert [run["machine"]["torch"] == "9.9" for run in runs] == [False, True, True]
    assert [run["date"] for run in runs] == ["2026-01-01 00:00", "2026-02-02 00:00", "2026-02-02 00:00"]


def test_a_run_that_nothing_is_left_of_is_forgotten(measured: Results, tmp_path: Path) -> None:
    for date in ("2026-01-01 00:00", "2026-02-02 00:00"):
        add_to(tmp_path, run_of(date), ["a"], named(measured, "a"))
    assert [run["date"] for run in read(tmp_path / "made-up-1-step.json")["runs"].values()] == ["2026-02-02 00:00"]


def test_other_machines_sizes_and_suites_have_files_of_their_own(measured: Results, tmp_path: Path) -> None:
    for run, suite, size in (
        (run_of(), "step", "cpu"),
        (run_of(name="Made Up (R) 2"), "step", "cpu"),
        (run_of(), "ops", "cpu"),
        (run_of(), "step", "toy"),
    ):
        add_to(tmp_path, run, ["a"], named(measured, "a"), suite, size)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "made-up-1-ops.json",
        "made-up-1-step-toy.json",
        "made-up-1-step.json",
        "made-up-r-2-step.json",
    ]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "other.json", {"card": "?"})
    with pytest.raises(InputError, match=r"other\.json: expected a file that"):
        read_results(tmp_path)


def test_the_source_is_that_of_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_digest()
    assert before == source_digest()
    assert len(before) == 8
    read_bytes = Path.read_bytes
    changed = {"lista_step.py": b"changed", "cli.py": b"changed"}
    for name, same in (("lista_step.py", False), ("cli.py", True)):
        monkeypatch.setattr(Path, "read_bytes", lambda self, n=name: changed[n] if self.name == n else read_bytes(self))
        assert (source_digest() == before) == same


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_document_is_a_function_of_the_files(result: Results, tmp_path: Path) -> None:
    for name in ("b.json", "a.json"):
        write_json(tmp_path / name, result)
    first = document(read_results(tmp_path))
    assert first == document(dict(reversed(read_results(tmp_path).items())))
    assert first.index("every round: [a.json]") < first.index("every round: [b.json]")


def test_the_document_leaves_what_is_not_measured_empty(result: Results) -> None:
    text = document({"made-up.json": result})
    assert cells(text, "work | goal | Made Up 1")
    assert cells(text, "constrained step of a tied DUST, float32, peak memory over eager's")[-1] == ""
    assert cells(text, "layerwise cross-entropy of a language model against eager")[-1] == ""
    row = cells(text, REFERENCE)
    assert row[0] == f"{REFERENCE} (1)"
    assert row[1].startswith("eager ")
    assert (row[2], row[6], row[7], row[9]) == ("", "", "", "a")
    assert "1. made up\n" in text
    assert f"- SDPA ({REFERENCE}): unavailable: no such package" in text
    assert "None" not in text
    assert "nan" not in text


def test_the_document_begins_with_the_goals(result: Results) -> None:
    lines = document({"made-up.json": result}).splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert headings[:4] == ["# Benchmarks", "## Goals", "### On a CPU", "### On an NVIDIA GPU"]
    assert any(line.startswith("Made Up 1: ") and "missed" in line for line in lines)
    assert "Nothing has been measured." in lines


def test_the_document_says_of_each_figure_which_run_it_is_from(
    result: Results, measured: Results, tmp_path: Path
) -> None:
    write_json(tmp_path / "made-up-1-step.json", result)
    later = run_of("2026-02-02 00:00", torch="9.9", source="0123abcd")
    order = [REFERENCE, "DUST tied, unconstrained, float32"]
    add_to(tmp_path, later, order, named(measured, order[1], note=""))
    text = document(read_results(tmp_path))
    assert cells(text, REFERENCE)[-1] == "a"
    assert cells(text, "DUST tied, unconstrained, float32")[-1] == "b"
    assert cells(text, "a | 2026-01-02")[2:5] == ["`cdt-fast bench at 2026-01-02 03:04`", source_digest(), "float32 2"]
    assert cells(text, "b | 2026-02-02")[3] == "0123abcd"
    settings = [line for line in text.splitlines() if line.startswith("- Run ")]
    assert [line.split(":")[0] for line in settings] == ["- Run a", "- Run b"]
    assert "torch 9.9" in settings[1]
    assert f"torch {torch.__version__}" in settings[0]


def test_a_run_of_several_suites_is_one_run(measured: Results, tmp_path: Path) -> None:
    """In the file of a suite are the ceilings that were known when that suite was done."""
    for suite, rates in (
        ("ops", {"float32": {"mm": 2e9}}),
        ("step", {"float32": {"mm": 2e9}, "bfloat16": {"mm": 5e9}}),
    ):
        case = {**named(measured, f"{suite} case"), "suite": suite}
        add_to(tmp_path, run_of(), [f"{suite} case"], case, suite, flop_per_second=rates)
    text = document(read_results(tmp_path))
    assert cells(text, "a | ")[-2] == "float32 2, bfloat16 5"
    assert not [line for line in text.splitlines() if line.startswith("| b |")]
    assert {cells(text, f"{suite} case")[-1] for suite in ("ops", "step")} == {"a"}


def test_the_document_sets_goals_beside_what_was_measured(result: Results) -> None:
    result = copy.deepcopy(result)
    candidates = result["cases"][0]["implementations"]
    candidates["cdt_fast"]["over_eager"] = 2.5
    row = "constrained step of a tied DUST, float32, against eager"
    assert cells(document({"a.json": result}), row) == [row, "≥ 2.1 ×", "2.50 ×, met"]
    candidates["cdt_fast"]["over_eager"] = 2.0
    assert cells(document({"a.json": result}), row)[-1] == "2.00 ×, **missed**"
    candidates["cdt_fast"]["peak_bytes"], candidates["eager"]["peak_bytes"] = 2**20, 2**21
    text = document({"a.json": result})
    assert cells(text, "constrained step of a tied DUST, float32, peak memory")[-1] == "0.500, met"
    assert cells(text, REFERENCE)[7] == "1.0 (2.0)"


def test_every_goal_is_about_a_case_that_exists() -> None:
    names = {suite: [{"case": case.name} for case in SUITES[suite](CPU, "gpu")] for suite in {g.suite for g in GOALS}}
    for goal in GOALS:
        assert any(goal.concerns(case) for case in names[goal.suite]), goal.work


def test_the_command_links_the_files_and_the_pictures_that_it_draws(
    tmp_path: Path, result: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "results", tmp_path / "docs" / "benchmarks.md"
    write_json(folder / "a.json", result)
    monkeypatch.setattr(sys, "argv", ["document", "--results", str(folder), "--out", str(out)])
    documents.main()
    text = out.read_text(encoding="utf-8")
    assert text.count("(../results/a.png)") == text.count("(../results/a.json)") == 1
    assert (folder / "a.png").exists()


def test_toy_results_are_not_in_the_document(result: Results) -> None:
    assert "Made Up" not in document({"a.json": {**result, "size": "toy"}})


def test_the_results_that_are_kept_are_of_cases_that_exist() -> None:
    """A case that was renamed would stay in the document under its old name."""
    files = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))
    assert files
    for path in files:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {case.name for case in SUITES[found["suite"]](CPU, found["size"])}
        assert {case["case"] for case in found["cases"]} <= known, path.name
