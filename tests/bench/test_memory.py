"""Peak memory: a known allocation in a fresh process, and a figure that cannot be taken for none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from cdt_fast.bench import loss_memory, memory
from cdt_fast.bench.case import Implementation
from cdt_fast.bench.suites import SUITES
from tests.bench.bench_cases import case_of, steady

PROGRAM = """
import torch
from cdt_fast.training.allocator import disable_malloc_trim
from cdt_fast.bench import loss_memory, memory
disable_malloc_trim()  # what the step before has freed then hides the next one's, unless it is given back
if {reset}:
    memory._reset_mark = lambda: False
kept = torch.ones(2**22)  # 16 MiB that rest between two steps
def step():
    buffer = torch.empty({mebibytes} * 2**18).fill_(1.0)
    del buffer
    return torch.ones(2**20)  # 4 MiB, after the peak
print(memory.resident_peak(step))
"""


def run(program: str) -> int:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the mark of the largest resident size is Linux's")
def test_a_known_buffer_is_measured_to_a_few_percent() -> None:
    # The 4 MiB after the peak may lie beside the buffer that was freed, or in its place.
    assert run(PROGRAM.format(reset=False, mebibytes=256)) == pytest.approx(256 * 2**20, rel=0.02)


def test_the_growth_of_the_maximum_where_the_mark_cannot_be_reset() -> None:
    # What the import of torch needed at its peak hides a part of it; nothing is added.
    assert 128 * 2**20 < run(PROGRAM.format(reset=True, mebibytes=512)) < 516 * 2**20


def test_a_peak_below_an_earlier_one_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_reset_mark", lambda: False)
    earlier = b"x" * 2**27  # the peak that hides the step's
    del earlier
    with pytest.raises(memory.NotMeasured, match="below that of its preparation"):
        memory.resident_peak(lambda: None)


def test_at_toy_size_there_is_a_reason_and_no_figure() -> None:
    candidate = Implementation("eager", "eager", steady(1.0))
    found = memory.peak_memory("toy", torch.device("cpu"))(case_of(candidate), candidate, candidate.prepare())
    assert isinstance(found, str)


def test_a_process_that_fails_gives_its_reason() -> None:
    candidate = Implementation("eager", "eager", steady(1.0))
    found = memory.peak_memory("cpu", torch.device("cpu"))(
        case_of(candidate, suite="quality"), candidate, candidate.prepare()
    )
    assert found == (
        "the process that measures it ended with status 1: "
        "suite quality has no case 'three ones' with 'eager' at size cpu"
    )


def test_the_command_prints_one_line_of_json() -> None:
    case = next(SUITES["step"](torch.device("cpu"), "toy"))
    command = [sys.executable, "-m", "cdt_fast.bench.memory", "step", case.name, "cdt_fast", "toy"]
    result = subprocess.run(command, capture_output=True, text=True)
    answer = json.loads(result.stdout)
    assert answer["reason"] == ""
    assert 0 <= answer["peak_bytes"] < 2**26


@pytest.mark.parametrize("name", loss_memory.IMPLEMENTATIONS)
def test_the_loss_alone_is_measured_in_a_process_of_its_own(name: str) -> None:
    """The logits of two depths or of one are the least that an eager loop holds; the fused loss works in blocks."""
    peak = loss_memory.peak_of(name, 2, 4096)
    logits = loss_memory.TOKENS * 4096 * 4
    head = 4096 * loss_memory.WIDTH * 4  # its gradient
    assert head < peak < 20 * (logits + head)


def test_what_is_owed_to_depths_and_vocabulary_together() -> None:
    # 3 for all, 5 a depth, 7 a word, 11 for each pair of them.
    peaks = {
        (depths, words): 3 + 5 * depths + 7 * words + 11 * depths * words for depths in (2, 8) for words in (10, 30)
    }
    assert loss_memory.together(peaks) == 11 * (8 - 2) * (30 - 10)


def test_a_measuring_process_that_gives_nothing() -> None:
    with pytest.raises(memory.NotMeasured, match=r"ended with status 1: KeyError: 'by hand'"):
        loss_memory.peak_of("by hand", 2, 64)
