"""A run through the command line, the results files to which it adds, and the document made from them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.bench import document as documents
from cdt_fast.bench.case import Implementation, Step
from cdt_fast.bench.measure import measure
from cdt_fast.bench.results_file import add, describe, open_file, read
from cdt_fast.bench.run import SUITES
from cdt_fast.checks import InputError
from cdt_fast.files import write_json
from tests.bench.bench_cases import case_of, fails, steady, unavailable
from tests.runs import Call

CPU = torch.device("cpu")
EAGER = Implementation("eager", "eager", steady(1.0))


def run(call: Call, folder: Path, suite: str, *more: object) -> Any:
    return call("bench", "--suite", suite, "--device=cpu", "--size=toy", "--repeats=2", f"--out={folder}", *more)


def results(folder: Path, suite: str, size: str = "-toy") -> dict[str, Any]:
    (file,) = folder.glob(f"*-{suite}{size}.json")
    return json.loads(file.read_text(encoding="utf-8"))


def test_only_the_cases_that_are_asked_for(call: Call, tmp_path: Path) -> None:
    answer = run(call, tmp_path, "ops", "--case", "lista_step, float32")
    assert answer.status == 0, answer.err
    found = results(tmp_path, "ops")
    assert ["lista_step, float32" in case["case"] for case in found["cases"]] == [True]
    (one,) = found["runs"].values()
    assert one["machine"]["torch"] == torch.__version__
    assert str(Path.home()) not in json.dumps(found)
    answer = run(call, tmp_path, "ops", "--case", "no such work")
    assert "--case is 'no such work', which is in no name of ops; one name is 'soft" in answer.line()


def test_a_stopped_run_has_said_and_kept_what_it_knew(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> Step:
        raise KeyboardInterrupt

    others = [Implementation("peer", "peer", unavailable), Implementation("broken", "peer", fails)]
    wrong = Implementation("ours", "ours", steady(3.0))
    knows = case_of(EAGER, *others, wrong, suite="step")
    ends = case_of(Implementation("eager", "eager", interrupted), suite="step", name="the end")
    monkeypatch.setitem(SUITES, "step", lambda *_: iter([knows, ends]))
    answer = run(call, tmp_path, "step")
    assert answer.status == 130
    assert "stopped by SIGINT; what was measured so far is in" in answer.err
    assert [case["case"] for case in results(tmp_path, "step")["cases"]] == ["three ones"]
    (line,) = answer.out.splitlines()
    assert line.startswith("three ones: broken failed: RuntimeError: no such kernel and a second line; ours wrong: ")
    assert "differs from the formula by 2.0e+00" in line


def test_a_quick_run_is_one_table_and_leaves_no_file(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    peers = Implementation("torch.compile", "peer", unavailable), Implementation("torch.compile, tuned", "peer", fails)
    case = case_of(EAGER, *peers, Implementation("cdt_fast", "ours", steady(1.0)), suite="step", name="DUST tied")
    monkeypatch.setattr("cdt_fast.bench.run.SUITES", {"step": lambda *_: iter([case])})
    answer = call("bench", "--quick", "--suite=step", "--device=cpu")
    assert "1 cases, about 1 min, " in answer.err
    head, _, row, missing = answer.out.splitlines()
    assert head.split() == ["case", "float32", "×", "baseline", "×", "best", "peer", "MiB"]
    assert row.startswith("DUST tied  ")
    assert missing == "unavailable here: no such package"
    assert not list(tmp_path.iterdir())
    call("bench", "--quick", "--suite=step", "--device=cpu", "--out=here")
    (one,) = results(tmp_path / "here", "step", "")["cases"]
    assert len(one["implementations"]["eager"]["seconds"]) == 3
    # In the place of all peers it does not stand, and it says what failed.
    call("bench", "--suite=step", "--device=cpu", "--repeats=1", "--out=here")
    broken = replace(case, implementations=(*case.implementations[:-1], Implementation("cdt_fast", "ours", fails)))
    monkeypatch.setattr("cdt_fast.bench.run.SUITES", {"step": lambda *_: iter([broken])})
    answer = call("bench", "--quick", "--suite=step", "--device=cpu", "--out=here")
    assert "keeps its measurement, of more peers" in answer.err
    assert "cdt_fast failed: RuntimeError: no such kernel" in answer.out
    (one,) = results(tmp_path / "here", "step", "")["cases"]
    assert len(one["implementations"]["eager"]["seconds"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bad_input_is_one_line(call: Call, tmp_path: Path) -> None:
    assert "torch finds no CUDA GPU" in call("bench", "--device=cuda", f"--out={tmp_path}").line()
    assert "--repeats must be" in call("bench", "--repeats=0", f"--out={tmp_path}").line()
    assert "--suite: invalid choice: 'speed' (choose from " in call("bench", "--suite", "speed").line()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """A made-up case as it was measured."""
    others = Implementation("SDPA", "peer", unavailable), Implementation("cdt_fast", "ours", steady(1.0))
    case = case_of(EAGER, *others, suite="step", name="DUST, float32", note="made up")
    return measure(case, CPU, 2)


def add_to(folder: Path, case: dict[str, Any], order: list[str], date: str, suite: str = "step", **facts: Any) -> Path:
    """Add a case as a run does; the path of the file."""
    machine = {**describe(CPU, "as it comes"), "name": "Made Up (R) 1", **facts}
    path, contents = open_file(folder, "cpu", suite, "cpu", machine["name"])
    add(contents, case, {"machine": machine, "date": date}, order)
    write_json(path, contents)
    return path


def test_a_run_adds_its_cases_and_replaces_what_it_measures_again(measured: dict[str, Any], tmp_path: Path) -> None:
    order = ["a", "b", "c"]
    for name in ("c", "gone", "a"):
        add_to(tmp_path, {**measured, "case": name}, [*order, "gone"], "2026-01-01 00:00")
    for name in ("b", "c"):
        path = add_to(tmp_path, {**measured, "case": name, "note": "again"}, order, "2026-02-02 00:00", torch="9.9")
    assert path.name == "made-up-r-1-step.json"
    found = read(path)
    assert [case["case"] + case["note"] for case in found["cases"]] == ["amade up", "bagain", "cagain"]
    runs = [found["runs"][case["run"]] for case in found["cases"]]
    assert [one["machine"]["torch"] == "9.9" for one in runs] == [False, True, True]
    path = add_to(tmp_path, {**measured, "case": "a"}, order, "2026-03-03 00:00")
    assert list(read(path)["runs"]) == ["2026-02-02 00:00", "2026-03-03 00:00"]  # of the first nothing is left
    assert add_to(tmp_path, measured, ["DUST, float32"], "2026-01-01", "ops").name == "made-up-r-1-ops.json"


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "other.json", {"card": "?"})
    with pytest.raises(InputError, match=r"other\.json: expected a file that cdt-fast bench wrote"):
        read(tmp_path / "other.json")


def test_the_document_has_a_table_for_each_suite_with_the_dtypes_side_by_side(
    measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ["DUST, float32", "DUST, bfloat16", "UT, float32"]
    ours = measured["implementations"]["cdt_fast"]
    ours |= {"median_seconds": 0.5, "over_eager": 2.0, "over_best_peer": 1.5, "peak_bytes": 2**20}
    measured["implementations"]["eager"]["peak_bytes"] = 2**21
    for name in order:
        case = {**measured, "case": name, "dtype": name.split(", ")[1], "best_peer": "SDPA"}
        path = add_to(tmp_path / "results", case, order, "2026-01-01 00:00", torch="9.9")
        write_json(path.with_name("toy.json"), {**read(path), "size": "toy"})
    out = tmp_path / "docs" / "benchmarks.md"
    monkeypatch.setattr(sys, "argv", ["document", "--results", str(tmp_path / "results"), "--out", str(out)])
    documents.main()
    text = out.read_text(encoding="utf-8")
    assert "## step on Made Up (R) 1\n" in text
    assert "torch 9.9" in text
    figures = "500 ms (1) | 2.00 | 1.50 SDPA | 1.0 (2.0)"
    assert f"| DUST | {figures} | {figures} |\n| UT | {figures} |  |  |  |  |\n" in text
    assert "\n1. made up\n" in text
    assert "- SDPA (3): unavailable: no such package\n" in text
    assert text.count("(../results/made-up-r-1-step.png)") == text.count("(../results/made-up-r-1-step.json)") == 1
    assert (tmp_path / "results" / "made-up-r-1-step.png").exists()
    assert not any(word in text for word in ("None", "toy"))


def test_the_results_that_are_kept_are_of_cases_that_exist() -> None:
    """A case that was renamed would stay in the document under its old name."""
    files = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))
    assert files
    for path in files:
        found = read(path)
        known = {case.name for case in SUITES[found["suite"]](torch.device(found["device"]), found["size"])}
        assert {case["case"] for case in found["cases"]} <= known, path.name
