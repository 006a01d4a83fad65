from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.tensor_file import serialized
from cdt_fast.training.checkpoint import load_checkpoint, previous_checkpoint, save_checkpoint


def same(left: Any, right: Any) -> bool:
    """Equal in structure, values, dtypes and bits; tuples count as lists."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


plain = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
tensors = st.sampled_from(
    [
        torch.arange(6.0).view(2, 3).t(),  # not contiguous
        torch.tensor(1.5, dtype=torch.float64),
        torch.zeros(0),
        torch.tensor([1, 2], dtype=torch.uint8),
        torch.ones(2, 2, dtype=torch.bfloat16),
    ]
)
states = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.dictionaries(st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(state=st.dictionaries(st.text(min_size=1, max_size=5), states, max_size=4))
def test_any_state_comes_back(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "state.safetensors"
    save_checkpoint(path, state)
    assert same(load_checkpoint(path), state)


def test_tensors_that_share_memory_come_back_apart(tmp_path: Path) -> None:
    values = torch.arange(4.0)
    save_checkpoint(tmp_path / "state", {"all": values, "part": values[:2]})
    loaded = load_checkpoint(tmp_path / "state")
    assert torch.equal(loaded["all"], values)
    assert torch.equal(loaded["part"], values[:2])


def test_what_cannot_be_stored_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"settings\.device"):
        save_checkpoint(tmp_path / "state", {"settings": {"device": object()}})
    assert not list(tmp_path.iterdir())


def resealed(tensors: dict[str, Tensor], **metadata: str) -> bytes:
    """A checkpoint whose checksums are right, whatever it holds."""
    return serialized(tensors, {"format": "cdt_fast checkpoint 2", **metadata})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (save({"weights": torch.ones(2)}), "no checkpoint of this version"),
        (
            save({"weights": torch.ones(2)}, {"format": "cdt_fast checkpoint 1", "state": "{}"}),
            "resume with the version",
        ),
        (save({}, {"format": "cdt_fast checkpoint 2", "state": '{"words": {}}'}), "no checkpoint of this version"),
        (resealed({}), "is damaged"),
        (resealed({}, state="{"), "cannot be read as JSON"),
        (resealed({}, state="null"), r"is damaged \(its state is None"),
        (resealed({}, state="[1]"), r"is damaged \(its state is \[1\]"),
        (resealed({}, state=json.dumps({"words": {"a": {"tensor": "lost"}}})), "is damaged"),
        (resealed({}, state=json.dumps({"strange": 1})), "is damaged"),
        (resealed({}, state=json.dumps({"numbers": {"one": 1}})), "is damaged"),
        (resealed({}, state=json.dumps({"words": 5})), "is damaged"),
        (resealed({}, state=json.dumps({"tensor": []})), "is damaged"),
        (resealed({}, state='{"words": {"a": ' + "[" * 999 + "]" * 999 + "}}"), "nested deeper"),
        (resealed({}, state='{"words": {"a": ' + "9" * 4999 + "}}"), "digits"),
    ],
    ids=range(14),
)
def test_another_safetensors_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


STATE = {"weights": torch.arange(50, dtype=torch.float32), "moment": torch.ones(7, dtype=torch.bfloat16), "step": 3}


@pytest.mark.parametrize("seed", range(6))
def test_no_flipped_bit_passes_and_the_checkpoint_before_it_is_used_with_a_warning(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint(path, {**STATE, "step": 2})
    save_checkpoint(path, STATE)
    assert sorted(os.listdir(tmp_path)) == ["state.previous.safetensors", "state.safetensors"]
    assert same(load_checkpoint(path), STATE)
    assert capsys.readouterr().err == ""
    whole = path.read_bytes()
    generator = random.Random(seed)
    for _ in range(40):
        place = generator.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << generator.randrange(8)]) + whole[place + 1 :])
        loaded = load_checkpoint(path)
        said = capsys.readouterr().err
        if loaded["step"] == 3:  # a blank of the header, for example: nothing that it says has changed
            assert same(loaded, STATE), place
            assert not said
        else:
            assert same(loaded, {**STATE, "step": 2})
            assert said.startswith(f"cdt-fast: warning: {path}: ")
            assert said.endswith("; the checkpoint before it is used, state.previous.safetensors\n")
            assert said.count("\n") == 1


def test_two_damaged_checkpoints_are_refused_and_none_is_said_to_be_there(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    for _ in range(2):
        save_checkpoint(path, STATE)
    for damaged in (path, previous_checkpoint(path)):
        damaged.write_bytes(damaged.read_bytes()[:-5])
    with pytest.raises(InputError, match=rf"^{path}: cannot be read, or is cut short"):
        load_checkpoint(path)


RUN = {"[training] seed": 0}
TRAINING: dict[str, Any] = {
    "step": 3,
    "steps": 6,
    "run": RUN,
    "model": {"weight": torch.ones(2)},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1}]},
    "schedule": {},
    "constraints": {},
    "best": None,
    "data": {},
}
NAN = torch.tensor([1.0, torch.nan])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "is at step -1 of 6"),
        ({"step": 7}, "is at step 7 of 6"),
        ({"step": 3.0}, r"no checkpoint of a training: step is 3\.0"),
        ({"step": True}, "step is True"),
        ({"step": "3"}, "step is '3'"),
        ({"step": None}, "step is None"),
        ({"step": ...}, "step is missing"),
        ({"steps": []}, r"steps is \[\]"),
        ({"model": None}, "model is None"),
        ({"best": 0.5}, r"best is 0\.5"),
        ({"model": {"weight": NAN}}, r"holds NaN or infinity in model\.weight"),
        ({"optimizer": {"state": {0: {"exp_avg": NAN}}}}, r"infinity in optimizer\.state\.0\.exp_avg"),
        ({"optimizer": {"param_groups": [{"lr": torch.tensor(torch.inf)}]}}, r"optimizer\.param_groups\.0\.lr"),
        ({"run": {"[training] seed": 1}}, r"is of another run.*: \[training\] seed was 1, is 0"),
        ({"run": {}}, "seed was None, is 0"),
    ],
)
def test_a_state_that_no_training_leaves_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint(path, TRAINING)
    assert same(load_checkpoint(path, run=RUN), TRAINING)
    save_checkpoint(path, {name: value for name, value in {**TRAINING, **change}.items() if value is not ...})
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(path, run=RUN)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
