"""Checkpoints: a state comes back, and nothing else is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from cdt_fast.checks import InputError
from cdt_fast.training.checkpoint import load_checkpoint, save_checkpoint
from tests.runs import flat

SHARED = torch.arange(6.0)
STATE = {
    "shared": [SHARED, SHARED[:2], SHARED.view(2, 3).t()],  # of one memory, and not contiguous
    "dtypes": (torch.tensor(1.5, dtype=torch.float64), torch.zeros(0), torch.ones(2, 2, dtype=torch.bfloat16)),
    "keys": {0: {"exp_avg": torch.tensor([1, 2], dtype=torch.uint8)}, "": {}},
    "values": [None, True, 2**60, -0.1, "é γ 漢\n", [], [[1]]],
}


def test_a_state_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint(path, STATE)
    assert list(flat(load_checkpoint(path)).items()) == list(flat(STATE).items())
    assert os.listdir(tmp_path) == ["state.safetensors"]


def test_what_cannot_be_stored_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object cannot be stored"):
        save_checkpoint(tmp_path / "state", {"settings": {"device": object()}})
    assert not list(tmp_path.iterdir())


def sealed(words: str) -> bytes:
    """A checkpoint, whatever it holds."""
    return save({"0": torch.ones(2)}, {"cdt_fast": words})


WHOLE = sealed('{"state": {"items": []}}')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (save({"weights": torch.ones(2)}), "is no checkpoint"),
        (sealed("{"), "is no checkpoint"),
        (sealed("[1]"), r"is damaged \(TypeError: "),
        (sealed("{}"), r"is damaged \(KeyError: "),
        *(
            (sealed(json.dumps({"state": state})), "is damaged")
            for state in ({"items": [["a", {"tensor": "lost"}]]}, {"strange": 1}, {"items": [1]}, {"items": 5}, [])
        ),
        *((WHOLE[:size], "is no checkpoint, or is cut short") for size in (0, 7, 100, len(WHOLE) - 5)),
    ],
    ids=range(13),
)
def test_another_safetensors_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_state_without_a_setting_of_its_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint(path, {"run": {}})
    with pytest.raises(InputError, match=rf"^{path}: is of another run.*: \[training\] seed was None, is 0"):
        load_checkpoint(path, run={"[training] seed": 0})
