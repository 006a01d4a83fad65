"""Checkpoints: a state comes back, and nothing else is read."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from cdt_fast.checks import InputError
from cdt_fast.training.checkpoint import load_checkpoint, save_checkpoint, saved_step
from tests.runs import flat

SHARED = torch.arange(6.0)
STATE = {
    "step": 3,
    "shared": [SHARED, SHARED[:2], SHARED.view(2, 3).t()],  # of one memory, and not contiguous
    "dtypes": (torch.tensor(1.5, dtype=torch.float64), torch.zeros(0), torch.ones(2, 2, dtype=torch.bfloat16)),
    "keys": {0: {"exp_avg": torch.tensor([1, 2], dtype=torch.uint8)}, "": {}},
    "values": [None, True, 2**60, -0.1, "é γ 漢\n", [], [[1]]],
}


def test_a_state_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    assert saved_step(path) == 0
    save_checkpoint(path, STATE)
    assert list(flat(load_checkpoint(path)).items()) == list(flat(STATE).items())
    assert saved_step(path) == 3
    assert os.listdir(tmp_path) == ["state.pt"]


def whole() -> bytes:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    return buffer.getvalue()


def cut_by(size: int) -> bytes:
    return whole()[:-size]


@pytest.mark.parametrize(
    "content", [save({"weights": torch.ones(2)}), b"", b"PK", cut_by(5), cut_by(1000)], ids=range(5)
)
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    assert saved_step(path) == 0
    with pytest.raises(InputError, match=rf"^{path}: is no checkpoint, or is cut short \(\w+\)$"):
        load_checkpoint(path)


RUN = {"[training] seed": 0}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"[training] seed": 1}, r"is of another run.*: \[training\] seed was 1, is 0"),
        ({}, "seed was None, is 0"),
    ],
)
def test_a_state_of_another_run_is_refused(tmp_path: Path, run: dict[str, Any], message: str) -> None:
    path = tmp_path / "state.pt"
    save_checkpoint(path, {**STATE, "run": RUN})
    assert load_checkpoint(path, run=RUN)["step"] == 3
    save_checkpoint(path, {**STATE, "run": run})
    with pytest.raises(InputError, match=rf"^{path}: .*{message}"):
        load_checkpoint(path, run=RUN)
