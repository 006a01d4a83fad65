"""Every suite at toy size through the command line, and what a run leaves behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.bench import run as running
from cdt_fast.bench.case import ROLES, Case, Implementation, Step
from cdt_fast.bench.run import parts_of
from cdt_fast.bench.suites import SUITES
from tests.bench.bench_cases import case_of, fails, made_up, steady, unavailable

CPU = torch.device("cpu")
Call = Callable[..., Any]


def results_of(folder: Path, suite: str) -> dict[str, Any]:
    (file,) = folder.glob(f"*-{suite}-toy.json")
    return json.loads(file.read_text(encoding="utf-8"))


SECONDS = ("attention",)  # the others take up to a quarter of a minute, most of it compilers


@pytest.mark.parametrize(
    "suite", [suite if suite in SECONDS else pytest.param(suite, marks=pytest.mark.slow) for suite in SUITES]
)
def test_a_suite_at_toy_size(suite: str, call: Call, tmp_path: Path) -> None:
    answer = call("bench", "--suite", suite, "--device=cpu", "--size=toy", "--repeats=1", f"--out={tmp_path}")
    assert answer.status == 0, answer.err
    cases = results_of(tmp_path, suite)["cases"]
    assert [case["case"] for case in cases] == [case.name for case in SUITES[suite](CPU, "toy")]
    assert len({case["case"] for case in cases}) == len(cases) > 0
    for case in cases:
        assert answer.err.count(f"{suite}: {case['case']}: ") == 1
        assert case["case"] in answer.out
        for name, candidate in case["implementations"].items():
            assert candidate["role"] in ROLES
            assert candidate["status"] in ("timed", "unavailable"), (case["case"], name, candidate["reason"])
            assert candidate["status"] == "timed" or candidate["reason"]
            if "CUDA graph" in case["case"]:
                assert candidate["reason"] == "a CUDA graph needs an NVIDIA GPU"
            elif candidate["role"] in ("eager", "ours"):
                assert candidate["status"] == "timed" or "bfloat16" in case["case"], (
                    case["case"],
                    name,
                    candidate["reason"],
                )
    assert f"1 of {len(cases)}, about " in answer.err or len(cases) == 1
    assert f"{len(cases)} of {len(cases)}\n" in answer.err
    assert len(list(tmp_path.glob(f"*-{suite}-toy.png"))) == 1


def test_only_the_cases_that_are_asked_for(call: Call, tmp_path: Path) -> None:
    options = ("--suite", "ops", "--device=cpu", "--size=toy", "--repeats=1", f"--out={tmp_path}")
    answer = call("bench", *options, "--case", "lista_step, float32")
    assert answer.status == 0, answer.err
    found = results_of(tmp_path, "ops")
    assert ["lista_step, float32" in case["case"] for case in found["cases"]] == [True]
    (run,) = found["runs"].values()
    assert run["machine"]["command"].endswith(" --case 'lista_step, float32'")
    answer = call("bench", *options, "--case", "no such work")
    assert answer.status == 2
    assert "--case is 'no such work'" in answer.err


def test_the_floor_of_the_reference_step_is_that_of_the_plan() -> None:
    case = next(case for case in SUITES["step"](CPU, "toy"))
    assert case.flop > 0
    from cdt_fast.bench.suites.trained import VideoWork

    work = VideoWork("DUST", 3200)
    large = 30 * 2.0 * 64_000 * 256 * 1024  # two products forward and four backward in each of five layers
    assert large < work.flop < 1.1 * large
    untied = VideoWork("DUST", 3200, tied=False), VideoWork("DUST", 3200, tied=False, readout="next")
    assert untied[0].flop > 1.3 * work.flop > untied[1].flop


def run_step(call: Call, folder: Path, *more: object) -> Any:
    return call("bench", "--suite", "step", "--device=cpu", "--size=toy", f"--out={folder}", *more)


def test_skipped_and_wrong_ways_are_listed_with_their_reasons(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = [
        Implementation("eager", "eager", steady(1.0)),
        Implementation("peer", "peer", unavailable),
        Implementation("broken", "peer", fails),
        Implementation("ours", "ours", steady(3.0)),
    ]
    monkeypatch.setitem(SUITES, "step", made_up(case_of(*candidates, suite="step")))
    answer = run_step(call, tmp_path, "--repeats=2")
    assert answer.status == 0
    assert "  peer: unavailable: no such package\n" in answer.out
    assert "  broken: failed: RuntimeError: no such kernel and a second line\n" in answer.out
    assert "  ours: wrong: differs from the formula by 2.0e+00" in answer.out


def test_the_head_says_what_was_measured_with_what(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "step", made_up(case_of(Implementation("eager", "eager", steady(1.0)), suite="step")))
    run_step(call, tmp_path, "--repeats=2")
    found = results_of(tmp_path, "step")
    (run,) = found["runs"].values()
    machine = run["machine"]
    assert machine["command"] == "cdt-fast bench --suite step --device cpu --size toy --repeats 2"
    assert (machine["torch"], machine["threads"]) == (torch.__version__, torch.get_num_threads())
    assert machine["allocator"] in ("freed memory kept", "as it comes")
    assert {"name", "cores", "instructions", "bf16_instructions", "triton", "python", "source"} <= machine.keys()
    assert str(Path.home()) not in json.dumps(found)


def interrupted() -> Step:
    raise KeyboardInterrupt


def test_what_was_measured_is_kept_when_a_run_is_stopped(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = case_of(Implementation("eager", "eager", interrupted), suite="step", name="the end")
    first = case_of(Implementation("eager", "eager", steady(1.0)), suite="step")
    monkeypatch.setitem(SUITES, "step", made_up(first, ends))
    answer = run_step(call, tmp_path)
    assert answer.status == 130
    assert "stopped by SIGINT; what was measured so far is in" in answer.err
    assert [case["case"] for case in results_of(tmp_path, "step")["cases"]] == ["three ones"]


def test_a_suite_whose_package_is_missing_leaves_the_others(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(device: torch.device, size: str) -> Iterator[Case]:
        raise ModuleNotFoundError("No module named 'tqdm'")

    monkeypatch.setitem(SUITES, "ops", missing)
    monkeypatch.setitem(SUITES, "step", made_up(case_of(Implementation("eager", "eager", steady(1.0)), suite="step")))
    answer = call("bench", "--suite", "ops", "step", "--device=cpu", "--size=toy", f"--out={tmp_path}")
    assert answer.status == 0
    assert "ModuleNotFoundError: No module named 'tqdm'" in answer.err
    assert results_of(tmp_path, "step")["cases"]


def test_without_matplotlib_only_the_pictures_are_missing(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUITES, "step", made_up(case_of(Implementation("eager", "eager", steady(1.0)), suite="step")))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = run_step(call, tmp_path)
    assert answer.status == 0
    assert "no pictures: drawing the bench needs the package 'matplotlib'" in answer.out
    assert results_of(tmp_path, "step")["cases"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bad_input_is_one_line(call: Call, tmp_path: Path) -> None:
    assert "torch finds no CUDA GPU" in call("bench", "--device=cuda", f"--out={tmp_path}").line()
    assert "--repeats must be" in call("bench", "--repeats=0", f"--out={tmp_path}").line()
    assert "--suite: unknown 'speed'; known: " in call("bench", "--suite", "speed").line()
    assert not list(tmp_path.iterdir())


def test_on_a_gpu_a_case_is_measured_without_its_late_ones_first() -> None:
    candidates = [
        Implementation("eager", "eager", steady(1.0)),
        Implementation("compiler", "peer", steady(1.0), late=True),
    ]
    case = case_of(*candidates, Implementation("ours", "ours", steady(1.0)))
    first, whole = parts_of(case, torch.device("cuda"))
    assert [candidate.name for candidate in first.implementations] == ["eager", "ours"]
    assert whole is case
    assert parts_of(case, CPU) == [case]
    assert parts_of(first, torch.device("cuda")) == [first]


def test_a_part_of_a_case_is_saved_and_replaced(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> Step:
        (before,) = results_of(tmp_path, "step")["cases"]
        assert list(before["implementations"]) == ["eager", "ours"]
        raise KeyboardInterrupt

    def slow() -> Step:
        return stopped() if stopping else steady(1.0)()

    candidates = [Implementation("eager", "eager", steady(1.0)), Implementation("compiler", "peer", slow, late=True)]
    case = case_of(*candidates, Implementation("ours", "ours", steady(1.0)), suite="step")
    monkeypatch.setitem(SUITES, "step", made_up(case))
    monkeypatch.setattr(running, "parts_of", lambda case, device: parts_of(case, torch.device("cuda")))
    stopping = True
    assert run_step(call, tmp_path).status == 130
    stopping = False
    assert run_step(call, tmp_path).status == 0
    (whole,) = results_of(tmp_path, "step")["cases"]
    assert list(whole["implementations"]) == ["eager", "compiler", "ours"]
