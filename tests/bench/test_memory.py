"""Peak memory: a known allocation in a fresh process, and a figure that cannot be taken for none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.bench import loss_memory, memory
from cdt_fast.bench.case import Implementation
from cdt_fast.bench.suites import SUITES
from tests.bench.bench_cases import case_of, steady

pytestmark = pytest.mark.xdist_group("memory")  # the figures are found once

# One import, and a process forked from it for each figure: none has computed anything before.
PROGRAM = """
import json, os
import torch
from cdt_fast.bench import loss_memory, memory
from cdt_fast.training.allocator import disable_malloc_trim

def known(mebibytes):
    disable_malloc_trim()  # what the step before has freed then hides the next one's, unless it is given back
    kept = torch.ones(2**22)  # 16 MiB that rest between two steps
    def step():
        buffer = torch.empty(mebibytes * 2**18).fill_(1.0)
        del buffer
        return torch.ones(2**20)  # 4 MiB, after the peak
    return memory.resident_peak(step)

measured = {"known": lambda: known(256)}
for name in loss_memory.IMPLEMENTATIONS:
    measured[name] = lambda name=name: memory.report_peak(lambda: loss_memory.step_of(name, 2, 4096))
for name, take in measured.items():
    if not os.fork():
        print(json.dumps(name), end=" ")
        print(take() or "", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, str]:
    """What each process of `PROGRAM` printed."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    decoder = json.JSONDecoder()
    lines = ((line, *decoder.raw_decode(line)) for line in result.stdout.splitlines() if line)
    return {name: line[end:] for line, name, end in lines}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the mark of the largest resident size is Linux's")
def test_a_known_buffer_is_measured_to_a_few_percent(figures: dict[str, str]) -> None:
    # The 4 MiB after the peak may lie beside the buffer that was freed, or in its place.
    assert int(figures["known"]) == pytest.approx(256 * 2**20, rel=0.02)


def test_without_a_mark_that_can_be_reset_there_is_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_MARK", tmp_path / "no such folder" / "clear_refs")
    with pytest.raises(OSError, match=r"No such file"):
        memory.resident_peak(lambda: None)
    monkeypatch.setattr(memory, "_MARK", tmp_path / "clear_refs")  # takes the number and does nothing with it
    earlier = b"x" * 2**27
    del earlier
    with pytest.raises(OSError, match=r"cannot be reset here"):
        memory.resident_peak(lambda: None)


def test_at_toy_size_there_is_a_reason_and_no_figure() -> None:
    candidate = Implementation("eager", "eager", steady(1.0))
    found = memory.peak_memory("toy", torch.device("cpu"), case_of(candidate), candidate, candidate.prepare())
    assert isinstance(found, str)


def test_a_case_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["memory", "ops", "three ones", "eager", "cpu"])
    with pytest.raises(SystemExit, match="suite ops has no case 'three ones' with 'eager' at size cpu"):
        memory.main()


def test_the_command_prints_one_line_of_json(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    case = next(SUITES["step"](torch.device("cpu"), "toy"))
    monkeypatch.setattr(sys, "argv", ["memory", "step", case.name, "cdt_fast", "toy"])
    monkeypatch.setattr(memory, "disable_malloc_trim", lambda: None)  # for good, in this process
    memory.main()
    assert 0 <= json.loads(capsys.readouterr().out) < 2**26


@pytest.mark.parametrize("name", loss_memory.IMPLEMENTATIONS)
def test_the_loss_alone_is_measured_in_a_process_of_its_own(name: str, figures: dict[str, str]) -> None:
    """The logits of two depths or of one are the least that an eager loop holds; the fused loss works in blocks."""
    peak = json.loads(figures[name])
    logits = loss_memory.TOKENS * 4096 * 4
    head = 4096 * loss_memory.WIDTH * 4  # its gradient
    assert head < peak < 20 * (logits + head)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('a word before'); print(7 * int(sys.argv[1]))", 21),
        ("print('\"no mark here\"')", "no mark here"),
        ("sys.exit('no such case')", "the process that measures it ended with status 1: no such case"),
        ("raise KeyError('by hand')", "the process that measures it ended with status 1: KeyError: 'by hand'"),
    ],
)
def test_what_a_measuring_process_gives(
    program: str, expected: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measuring.py").write_text(f"import sys; {program}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert memory.peak_in_a_process("measuring", "3") == expected


def test_the_table_says_what_is_owed_to_depths_and_vocabulary_together(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def peak(module: str, name: str, depths: str, words: str) -> int:
        return 3 + 5 * int(depths) * 2**20 + 7 * int(words) + 11 * int(depths) * int(words)

    monkeypatch.setattr(loss_memory, "peak_in_a_process", peak)
    loss_memory.main()
    owed = 11 * (16 - 2) * (32768 - 2048) / 2**20
    assert capsys.readouterr().out.count(f"| {owed:,.1f} |") == len(loss_memory.IMPLEMENTATIONS)


def test_what_is_measured_in_a_process_is_named_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "peak_in_a_process", lambda *arguments: " ".join(arguments))
    candidate = Implementation("eager", "eager", steady(1.0))
    case = case_of(candidate, suite="ops")
    found = memory.peak_memory("cpu", torch.device("cpu"), case, candidate, candidate.prepare())
    assert found == "cdt_fast.bench.memory ops three ones eager cpu"
