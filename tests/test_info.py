from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cdt_fast
from cdt_fast import info
from cdt_fast.ops import common


def test_info_says_what_is_here(call: Callable[..., Any], tmp_path: Path) -> None:
    answer = call("info", "--json", tmp_path / "info.json")
    assert answer.status == 0
    found = json.loads((tmp_path / "info.json").read_text())
    assert found["cdt_fast"] == cdt_fast.__version__
    assert found["torch"] == torch.__version__
    assert found["CPU threads"] == torch.get_num_threads()
    assert all(isinstance(value, str | int) for value in found.values())
    lines = answer.out.splitlines()
    assert len(lines) == len(found)
    for line, (name, value) in zip(lines, found.items(), strict=True):
        assert line.startswith(name)
        assert line.endswith(str(value))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (common.GpuSpec(90, 232_448, 132), "blocks for hopper cards, 227 KiB"),
        (common.GpuSpec(100, 232_448, 148), "blocks for hopper cards, 227 KiB"),
        (common.GpuSpec(120, 101_376, 132), "blocks for consumer cards, 99 KiB"),
    ],
)
def test_info_says_whose_blocks_a_gpu_takes(spec: common.GpuSpec, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "unavailable_reason", lambda: None)
    monkeypatch.setattr(common, "interpreting", lambda: False)
    monkeypatch.setattr(common, "unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(common, "spec_of", lambda device: spec)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert info.explain().startswith(f"triton ({words} of shared memory")
