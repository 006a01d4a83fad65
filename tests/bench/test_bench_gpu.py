"""The bench of the kernels at toy size, on whatever is here: it runs, and it refuses to time what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cdt_fast.bench import gpu


@pytest.mark.parametrize("suite", ["attention", "cross_entropy"])
def test_a_suite_at_toy_size(suite: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cdt_fast.bench.gpu", "--toy", "--repeats", "2", "--suite", suite]
    result = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert found["torch"] == torch.__version__
    for case in found["cases"].values():
        for way in case["ways"].values():
            assert way["difference"] < 0.05
            assert way["spread ms"][0] <= way["median ms"] <= way["spread ms"][1]


def test_the_training_step_agrees_with_the_written_out_one() -> None:
    case = next(gpu.dust_cases(torch.device("cpu"), toy=True))
    expected, found = (case.steps[name]() for name in ("written out", "cdt_fast"))
    assert gpu.disagreement(found, expected) < 0.02


def test_what_differs_or_fails_is_not_timed() -> None:
    right = torch.ones(3)

    def fails() -> list[torch.Tensor]:
        raise RuntimeError("no such kernel")

    case = gpu.Case("three", {"right": lambda: [right], "wrong": lambda: [2 * right], "fails": fails}, 0.0, 0.0)
    ways = gpu.measure(case, torch.device("cpu"), 1, {"product FLOP/s": 1.0, "copy B/s": 1.0})["ways"]
    assert "median ms" in ways["right"]
    assert ways["wrong"] == {"difference": 1.0, "error": "differs from the formula: not timed"}
    assert ways["fails"] == {"error": "RuntimeError: no such kernel"}
