from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.training.checkpoint import load_checkpoint, save_checkpoint


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


def test_keys_that_name_the_format_itself_are_no_trouble(tmp_path: Path) -> None:
    state = {"tensor": "a word", "words": {"tensor": torch.ones(1)}, "numbers": {0: {"numbers": 1}}}
    save_checkpoint(tmp_path / "state", state)
    assert same(load_checkpoint(tmp_path / "state"), state)


def test_what_cannot_be_stored_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"settings\.device"):
        save_checkpoint(tmp_path / "state", {"settings": {"device": object()}})
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint yet"):
        load_checkpoint(tmp_path / "state.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_a_checkpoint_cut_short_is_named_in_one_line(tmp_path: Path, share: float) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint(path, {"weights": torch.randn(1000), "step": 3})
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(InputError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "cut short" in str(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"format": "cdt_fast checkpoint 0", "state": "{}"},
        {"format": "cdt_fast checkpoint 1"},
        {"format": "cdt_fast checkpoint 1", "state": "{"},
        {"format": "cdt_fast checkpoint 1", "state": json.dumps({"words": {"a": {"tensor": "lost"}}})},
        {"format": "cdt_fast checkpoint 1", "state": json.dumps({"strange": 1})},
    ],
)
def test_another_safetensors_file_is_refused(tmp_path: Path, metadata: dict[str, str]) -> None:
    path = tmp_path / "state.safetensors"
    save_file({"weights": torch.ones(2)}, path, metadata=metadata)
    with pytest.raises(InputError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
