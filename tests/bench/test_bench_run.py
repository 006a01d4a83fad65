"""Every suite at toy size through the command line, and the document made from results files."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import case_of, fails, steady, unavailable

from cdt_fast.bench import run as running
from cdt_fast.bench.case import ROLES, Case, Way
from cdt_fast.bench.document import document, find_pictures, read_results
from cdt_fast.bench.goals import GOALS
from cdt_fast.bench.suites import SUITES
from cdt_fast.errors import InputError
from cdt_fast.files import write_json

CPU = torch.device("cpu")
Call = Callable[..., Any]


def results_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_at_toy_size(suite: str, call: Call, tmp_path: Path) -> None:
    answer = call("bench", "--suite", suite, "--device=cpu", "--size=toy", "--repeats=1", f"--out={tmp_path}")
    assert answer.status == 0, answer.err
    found = results_of(tmp_path)
    cases = found["suites"][suite]["cases"]
    assert cases
    assert len({case["case"] for case in cases}) == len(cases)
    for case in cases:
        assert answer.err.count(f"{suite}: {case['case']}: ") == 1
        assert case["case"] in answer.out
        for name, way in case["ways"].items():
            assert way["role"] in ROLES
            assert way["status"] in ("timed", "unavailable"), (case["case"], name, way["reason"])
            assert way["status"] == "timed" or way["reason"]
            if way["role"] in ("eager", "ours"):
                assert way["status"] == "timed" or "bfloat16" in case["case"], (case["case"], name, way["reason"])
    assert found["complete"]
    assert len(list(tmp_path.glob(f"*-{suite}.png"))) == 1


def test_only_the_cases_that_are_asked_for(call: Call, tmp_path: Path) -> None:
    options = ("--suite", "ops", "--device=cpu", "--size=toy", "--repeats=1", f"--out={tmp_path}")
    answer = call("bench", *options, "--case", "lista_step, float32")
    assert answer.status == 0, answer.err
    found = results_of(tmp_path)
    assert ["lista_step, float32" in case["case"] for case in found["suites"]["ops"]["cases"]] == [True]
    assert found["machine"]["command"].endswith(" --case 'lista_step, float32'")
    answer = call("bench", *options, "--case", "no such work")
    assert answer.status == 2
    assert "--case is 'no such work'" in answer.err


def test_the_floor_of_the_reference_step_is_that_of_the_plan() -> None:
    case = next(case for case in SUITES["step"](CPU, "toy"))
    assert case.flop > 0
    from cdt_fast.bench.suites.step import Work

    work = Work("DUST", 3200)
    large = 30 * 2.0 * 64_000 * 256 * 1024  # two products forward and four backward in each of five layers
    assert large < work.flop < 1.1 * large
    assert Work("DUST", 3200, tied=False).flop > 1.3 * work.flop > Work("DUST", 3200, tied=False, readout="next").flop


def made_up(*ways: Way, **changes: Any) -> Callable[[torch.device, str], Iterator[Case]]:
    def cases(device: torch.device, size: str) -> Iterator[Case]:
        yield case_of(*ways, suite="step", **changes)

    return cases


def test_skipped_and_wrong_ways_are_listed_with_their_reasons(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [
        Way("eager", "eager", steady(1.0)),
        Way("peer", "peer", unavailable),
        Way("broken", "peer", fails),
        Way("ours", "ours", steady(3.0)),
    ]
    monkeypatch.setitem(SUITES, "step", made_up(*ways))
    answer = call("bench", "--suite", "step", "--device=cpu", "--size=toy", "--repeats=2", f"--out={tmp_path}")
    assert answer.status == 0
    assert "  peer: unavailable: no such package\n" in answer.out
    assert "  broken: failed: RuntimeError: no such kernel and a second line\n" in answer.out
    assert "  ours: wrong: differs from the formula by 2.0e+00" in answer.out


def test_the_head_says_what_was_measured_with_what(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "step", made_up(Way("eager", "eager", steady(1.0))))
    file = tmp_path / "also" / "here.json"
    call("bench", "--suite", "step", "--device=cpu", "--size=toy", "--repeats=2", f"--out={tmp_path}", "--json", file)
    found = results_of(tmp_path)
    assert found == json.loads(file.read_text(encoding="utf-8"))
    machine = found["machine"]
    assert machine["command"] == "cdt-fast bench --suite step --device cpu --size toy --repeats 2"
    assert (machine["torch"], machine["threads"]) == (torch.__version__, torch.get_num_threads())
    assert machine["allocator"] in ("freed memory kept", "as it comes")
    assert {"name", "cores", "instructions", "bf16_instructions", "triton", "python"} <= machine.keys()
    assert str(Path.home()) not in json.dumps(found)


def test_what_was_measured_is_kept_when_a_run_is_stopped(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases(device: torch.device, size: str) -> Iterator[Case]:
        yield case_of(Way("eager", "eager", steady(1.0)), suite="step")
        raise KeyboardInterrupt

    monkeypatch.setitem(SUITES, "step", cases)
    answer = call("bench", "--suite", "step", "--device=cpu", "--size=toy", f"--out={tmp_path}")
    assert answer.status == 130
    assert "stopped by SIGINT; what was measured so far is in" in answer.err
    found = results_of(tmp_path)
    assert not found["complete"]
    assert [case["case"] for case in found["suites"]["step"]["cases"]] == ["three ones"]


def test_a_suite_whose_package_is_missing_leaves_the_others(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(device: torch.device, size: str) -> Iterator[Case]:
        raise ModuleNotFoundError("No module named 'tqdm'")

    monkeypatch.setitem(SUITES, "quality", missing)
    monkeypatch.setitem(SUITES, "step", made_up(Way("eager", "eager", steady(1.0))))
    answer = call("bench", "--suite", "quality", "step", "--device=cpu", "--size=toy", f"--out={tmp_path}")
    assert answer.status == 0
    assert "ModuleNotFoundError: No module named 'tqdm'" in answer.out
    assert results_of(tmp_path)["suites"]["step"]["cases"]


def test_without_matplotlib_only_the_pictures_are_missing(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUITES, "step", made_up(Way("eager", "eager", steady(1.0))))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = call("bench", "--suite", "step", "--device=cpu", "--size=toy", f"--out={tmp_path}")
    assert answer.status == 0
    assert "no pictures: drawing the bench needs the package 'matplotlib'" in answer.out
    assert results_of(tmp_path)["complete"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bad_input_is_one_line(call: Call, tmp_path: Path) -> None:
    assert "torch finds no CUDA GPU" in call("bench", "--device=cuda", f"--out={tmp_path}").line()
    assert "--repeats must be" in call("bench", "--repeats=0", f"--out={tmp_path}").line()
    assert "invalid choice: 'speed'" in call("bench", "--suite", "speed").line()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Results of two made-up cases, as if at the size for a CPU."""
    saved: list[dict[str, Any]] = []
    ways = [
        Way("eager", "eager", steady(1.0)),
        Way("SDPA", "peer", unavailable),
        Way("cdt_fast", "ours", steady(1.0)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        name = "DUST tied, constrained, float32"
        patch.setitem(SUITES, "step", made_up(*ways, name=name, flop=1e3, moved=1e3))
        machine = {
            "command": "cdt-fast bench --suite step",
            **running.describe(CPU, "as it comes"),
            "name": "Made Up 1",
        }
        running.run_suites(CPU, "toy", ["step"], 2, machine, lambda found: saved.append(copy.deepcopy(found)))
    return {**saved[-1], "size": "cpu"}


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_document_is_a_function_of_the_files(result: dict[str, Any], tmp_path: Path) -> None:
    for name in ("b.json", "a.json"):
        write_json(tmp_path / name, result)
    first = document(read_results(tmp_path))
    assert first == document(dict(reversed(read_results(tmp_path).items())))
    assert first.index("(a.json)") < first.index("(b.json)")


def test_the_document_leaves_what_is_not_measured_empty(result: dict[str, Any]) -> None:
    text = document({"made-up.json": result})
    assert cells(text, "work | goal | Made Up 1")
    assert cells(text, "constrained step of a tied DUST, float32, peak memory over eager's")[-1] == ""
    assert cells(text, "layerwise cross-entropy against eager")[-1] == ""
    assert cells(text, "SDPA | peer")[2:] == ["unavailable", "", "", "", "", ""]
    assert "- SDPA: unavailable: no such package" in text
    assert "`cdt-fast bench --suite step`" in text
    assert "None" not in text
    assert "nan" not in text


def test_the_document_sets_goals_beside_what_was_measured(result: dict[str, Any]) -> None:
    result = copy.deepcopy(result)
    ours = result["suites"]["step"]["cases"][0]["ways"]["cdt_fast"]
    ours["over_eager"] = 2.5
    row = "constrained step of a tied DUST, float32, against eager"
    assert cells(document({"a.json": result}), row) == [row, "≥ 2.1 ×", "2.50 ×"]
    ours["over_eager"] = 2.0
    assert cells(document({"a.json": result}), row)[-1] == "2.00 × (not reached)"
    ours["peak_bytes"], result["suites"]["step"]["cases"][0]["ways"]["eager"]["peak_bytes"] = 50, 100
    assert cells(document({"a.json": result}), "constrained step of a tied DUST, float32, peak memory")[-1] == "0.50"


def test_every_goal_is_about_a_case_that_exists() -> None:
    names = {suite: [{"case": case.name} for case in SUITES[suite](CPU, "toy")] for suite in {g.suite for g in GOALS}}
    for goal in GOALS:
        assert any(goal.concerns(case) for case in names[goal.suite]), goal.work


def test_the_document_shows_the_pictures_that_there_are(tmp_path: Path, result: dict[str, Any]) -> None:
    folder, out = tmp_path / "results", tmp_path / "docs" / "benchmarks.md"
    folder.mkdir()
    suite = next(iter(result["suites"]))
    assert find_pictures(folder, out, {"a.json": result}) == {}
    (folder / f"a-{suite}.png").touch()
    pictures = find_pictures(folder, out, {"a.json": result})
    assert pictures == {("a.json", suite): f"../results/a-{suite}.png"}
    assert document({"a.json": result}, pictures).count(f"(../results/a-{suite}.png)") == 1


def test_toy_results_are_not_in_the_document(result: dict[str, Any]) -> None:
    assert "Made Up" not in document({"a.json": {**result, "size": "toy"}})


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "other.json", {"card": "?"})
    with pytest.raises(InputError, match=r"other\.json: has no machine, date"):
        read_results(tmp_path)
