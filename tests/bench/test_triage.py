"""The triage on stand-ins: of its stages for what starts and ends them, of the card for the whole."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdt_fast.bench.triage import report, tools
from cdt_fast.bench.triage.__main__ import main
from cdt_fast.bench.triage.run import DONE, FAILED, KILLED, Runner
from cdt_fast.bench.triage.stages import LOST, PLAN, Lines, Stage, parts_begun

REHEARSAL = Path(__file__).with_name("rehearsal.py")
# What stands in for a stage: says what it was given, and behaves as its name says.
PRETENDED = f"""
import os, subprocess, sys, time
name, skip = sys.argv[sys.argv.index("--here") + 1], int(sys.argv[sys.argv.index("--skip") + 1])
if name == "fails":
    print("part 0: first", flush=True)
    print("what went wrong")
    sys.exit(1)
if name.startswith("hangs"):
    subprocess.Popen([sys.executable, "-c", "import time, sys; time.sleep(1); open(sys.argv[1], 'w')", sys.argv[1]])
    print("part 0: endless", flush=True)
    time.sleep(1000)
if name == "dies":
    os.abort()
if name == "loses" and skip < 2:
    print(f"part {{skip}}: lost", flush=True)
    sys.exit({LOST})
"""


@pytest.fixture
def pretended(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], Lines]]:
    """Run rows of stages that are none; their outcomes by name, and the lines."""
    script = tmp_path / "pretended.py"
    script.write_text(PRETENDED, encoding="utf-8")

    def run(*rows: tuple[Stage, ...]) -> tuple[dict[str, Any], Lines]:
        lines = Lines(tmp_path / "results" / "card-triage.jsonl", "now")
        command = [sys.executable, str(script), str(tmp_path / "left behind")]
        return {end["stage"]: end for end in Runner(command, lines).run(rows)}, lines

    return run


def stage(name: str, limit: float = 30.0) -> Stage:
    return Stage(name, limit, "nowhere:parts")


def test_a_stage_that_fails_does_not_stop_the_next(pretended: Callable[..., Any]) -> None:
    outcomes, lines = pretended((stage("fails"),), (stage("works"),))
    assert {name: outcome["status"] for name, outcome in outcomes.items()} == {"fails": FAILED, "works": DONE}
    (failed,) = lines.read("fails")
    assert failed["status"] == FAILED
    assert failed["exit_status"] == 1
    assert failed["last_lines"] == ["part 0: first", "what went wrong"]


def test_a_stage_that_hangs_is_killed_at_its_limit_with_all_that_it_started(
    pretended: Callable[..., Any], tmp_path: Path
) -> None:
    begin = time.monotonic()
    outcomes, lines = pretended((stage("hangs", 0.7),), (stage("works"),))
    assert outcomes["hangs"]["status"] == KILLED
    assert outcomes["works"]["status"] == DONE
    assert time.monotonic() - begin < 20
    assert lines.read("hangs")[0]["last_lines"] == ["part 0: endless"]
    time.sleep(1.5)
    assert not (tmp_path / "left behind").exists()


@pytest.mark.slow
def test_stages_of_a_row_run_side_by_side(pretended: Callable[..., Any]) -> None:
    begin = time.monotonic()
    outcomes, _ = pretended(tuple(stage(name, 4.0) for name in ("hangs", "hangs too", "works")))
    assert time.monotonic() - begin < 7.5
    assert [outcome["status"] for outcome in outcomes.values()] == [KILLED, KILLED, DONE]


def test_a_stage_whose_card_is_lost_goes_on_behind_the_part_that_lost_it(pretended: Callable[..., Any]) -> None:
    outcomes, _ = pretended((stage("loses"),))
    assert (outcomes["loses"]["status"], outcomes["loses"]["processes"]) == (FAILED, 3)


def test_a_stage_that_dies_before_its_first_part_is_not_started_again(pretended: Callable[..., Any]) -> None:
    outcomes, _ = pretended((stage("dies"),))
    assert (outcomes["dies"]["status"], outcomes["dies"]["processes"]) == (FAILED, 1)


def test_who_ends_the_triage_ends_its_stages(pretended: Callable[..., Any], tmp_path: Path) -> None:
    pretended((stage("works"),))  # writes the script
    program = f"""
from pathlib import Path
from cdt_fast.bench.triage.run import Runner
from cdt_fast.bench.triage.stages import Lines, Stage
command = [{sys.executable!r}, {str(tmp_path / "pretended.py")!r}, {str(tmp_path / "left behind")!r}]
print("begun", flush=True)
Runner(command, Lines(Path({str(tmp_path / "lines.jsonl")!r}), "now")).run([[Stage("hangs", 60, "nowhere:parts")]])
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    process.terminate()
    assert process.wait(10) == 143
    time.sleep(1.5)
    assert not (tmp_path / "left behind").exists()


def test_the_parts_that_were_begun() -> None:
    assert parts_begun("") == 0
    assert parts_begun("part 0: one\nsomething\npart 1: two\n") == 2


def test_lines_are_json_whatever_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    lines = Lines(path, "now")
    lines.add("one", "part", {"error": float("nan"), "most": [float("inf")], "size": (1, 2)})
    Lines(path, "later").add("one", "", {})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"run": "now", "cut')
    (found,) = lines.read("one")
    assert found == {"run": "now", "stage": "one", "part": "part", "error": "nan", "most": ["inf"], "size": [1, 2]}


def test_the_plan_fits_into_ten_minutes() -> None:
    limits = [max(stage.limit for stage in row) for row in PLAN]
    assert sum(limits) <= 510  # the rest is for what starts the stages, and for the end
    names = [stage.name for row in PLAN for stage in row]
    assert len(set(names)) == len(names)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["--out", str(tmp_path)]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_metrics_of_a_profile() -> None:
    head = '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
    rows = ['"0","a_kernel","GPU Speed Of Light","Duration","us","12.5"', '"0","a_kernel","x","Unknown","","1"']
    found = tools.metrics_by_kernel("\n".join(["==PROF== Connected", head, *rows]))
    assert found == {"a_kernel": {"Duration [us]": "12.5"}}
    assert tools.metrics_by_kernel("==ERROR== no permission") == {}


def test_the_tables_that_the_sweep_names_have_the_rows_that_it_starts_from() -> None:
    pytest.importorskip("triton")
    from cdt_fast.bench.triage.hot_kernels import HOT
    from cdt_fast.kernels import blocks as tables
    from cdt_fast.kernels.cards import CARDS

    for hot in HOT:
        table = getattr(tables, hot.table)
        for card in CARDS.values():
            candidates = hot.candidates(card, "gpu")
            assert candidates[0] in [blocks for _, blocks in table.choices(card.family, "16 bits")], hot.name
            assert len(candidates) == len(set(candidates)) > 20
            launch = hot.described(card, "gpu", candidates[-1])
            assert launch.kernel.__name__ == f"{hot.name}_kernel"
            assert launch.blocks == candidates[-1]


def test_the_sweep_reads_what_was_compiled() -> None:
    pytest.importorskip("triton")
    from cdt_fast.bench.triage.compiling import compiled_blocks
    from cdt_fast.bench.triage.hot_kernels import HOT

    def line(rows: int, status: str, spilled: int) -> dict[str, Any]:
        blocks = {"rows": rows, "warps": 4}
        return {"kernel": HOT[0].name, "blocks": blocks, "status": status, "spilled_bytes": spilled}

    lines = [line(1, "compiled", 8), line(2, "failed", 0), line(3, "compiled", 0), {"candidates": 4}]
    assert [blocks.rows for blocks in compiled_blocks(lines, HOT[0])] == [3, 1]


@pytest.mark.parametrize(("capability", "known"), [(90, True), (110, False)])
def test_a_card_of_an_unknown_family_is_told_which_rows_it_takes(capability: int, known: bool) -> None:
    from cdt_fast.bench.triage import machine
    from cdt_fast.kernels.cards import GpuSpec

    (found,) = machine._block_tables(GpuSpec(capability, 232_448, 132))
    assert found["known"] == known
    family = "hopper" if known else "blackwell"
    assert found["family"] == family
    assert f"sm_{capability}" in found["note"]
    assert f"it takes the rows of {family!r}" in found["note"]


FAKE_TOOL = """#!{python}
import pathlib, subprocess, sys
words = sys.argv[1:]
if "--import" in words:
    print('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')
    print('"0","unrolled_forward_kernel","Duration","us","12.5"')
    sys.exit()
if "--export" in words:
    pathlib.Path(words[words.index("--export") + 1]).write_text("report")
ended = subprocess.run(words[words.index({python!r}) :]).returncode
print("========= ERROR SUMMARY: 0 errors")
sys.exit(ended)
"""


def rehearse(folder: Path, *words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """A triage of an emulated card, with tools that do nothing but run what they are given."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in ("ncu", "compute-sanitizer"):
        tool = programs / name
        tool.write_text(FAKE_TOOL.format(python=sys.executable), encoding="utf-8")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    changed = {
        "OUT": str(folder / "out"),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder / "cache"),
        **environment,
    }
    # Patience is for the processor: what takes a card's machine seconds on sixteen cores shares two here.
    command = [sys.executable, str(REHEARSAL), "--device", "cpu", "--size", "toy", "--patience", "10", *words]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **changed})
    (file,) = (folder / "out").glob("*-triage-toy.jsonl")
    return ended, [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def ends(lines: list[Any]) -> dict[str, str]:
    return {line["stage"]: line["status"] for line in lines if line.get("result") == "stage"}


@pytest.mark.slow
def test_the_whole_is_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    ended, lines = rehearse(tmp_path)
    print(ended.stdout)
    names = [stage.name for row in PLAN for stage in row]
    assert ends(lines) == dict.fromkeys(names, DONE), ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert not [line for line in lines if line.get("status") in ("failed", "wrong")]
    checks = [line for line in lines if "relative_error_of_torch" in line]
    assert len(checks) >= 4
    assert all(line["passed"] for line in checks)
    timed = {line["way"] for line in lines if line.get("status") == "timed" and "way" in line}
    assert {"cdt_fast", "cdt_fast, CUDA graph", "eager, bfloat16", "eager by the identity", "SDPA"} <= timed
    compiled = {line["function"] for line in lines if line["stage"] == "compile" and "function" in line}
    assert {"unrolled_forward_kernel", "cross_entropy_kernel", "packed_backward_kernel"} <= compiled
    (table,) = (tmp_path / "out").glob("*-blocks-toy.jsonl")
    rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 5
    assert all(row["timed_on"] and row["family"] == "hopper" and row["math_mode"] == "16 bits" for row in rows)
    assert rows[0]["code"].startswith("Blocks(rows=")
    assert len(ended.stdout) < 12_000
    assert len(list((tmp_path / "out").iterdir())) <= 8


@pytest.mark.slow
def test_misfortunes_are_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    stages = ("check attention", "step", "sweep cross_entropy")
    ended, lines = rehearse(
        tmp_path,
        *("--stage", *stages, "--patience", "1.5"),
        REHEARSE_FAILURE="check attention", REHEARSE_LOSS="step", REHEARSE_HANG="sweep cross_entropy",
    )  # fmt: skip
    assert ended.returncode == 1
    assert ends(lines) == {"check attention": FAILED, "step": FAILED, "sweep cross_entropy": KILLED}
    # Its first process died in its first part; the second did the others.
    assert {line["way"] for line in lines if line["stage"] == "step" and "way" in line} >= {"eager, bfloat16"}
    assert "sweep cross_entropy: killed at its limit" in ended.stdout


def test_the_text_of_a_run_without_a_line() -> None:
    assert report.as_text([]) == []
