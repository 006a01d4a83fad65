"""Checkpoints: all the state of a run in one safetensors file, without pickle, whole or not there."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.files import replaced_atomically

_FORMAT = "cdt_fast checkpoint 1"


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` to `path`, atomically.

    Args:
        state: nested dictionaries (keys: words or whole numbers), lists and tuples of tensors, numbers, words, truth
            values and None. Tuples come back as lists.
    """
    tensors: dict[str, Tensor] = {}
    document = _without_tensors(state, "", tensors)
    with replaced_atomically(path) as temporary:
        save_file(tensors, temporary, metadata={"format": _FORMAT, "state": json.dumps(document)})


def load_checkpoint(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read what `save_checkpoint` wrote.

    Raises:
        InputError: the file is missing, cut short or no checkpoint.
    """
    if not os.path.exists(path):
        raise InputError(f"{path}: there is no checkpoint yet")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read, or is cut short ({error})") from error
    if metadata.get("format") != _FORMAT:
        raise InputError(f"{path}: is no checkpoint of this version of cdt_fast")
    try:
        return _with_tensors(json.loads(metadata["state"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error})") from error


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        # A copy: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, dict):
        keys = {str: "words", int: "numbers"}[type(next(iter(value)))] if value else "words"
        return {keys: {str(key): _without_tensors(entry, f"{name}.{key}", tensors) for key, entry in value.items()}}
    if isinstance(value, list | tuple):
        return [_without_tensors(entry, f"{name}.{index}", tensors) for index, entry in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name} cannot be stored in a checkpoint: {type(value).__name__}")


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_with_tensors(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "numbers" in value:
        return {int(key): _with_tensors(entry, tensors) for key, entry in value["numbers"].items()}
    return {key: _with_tensors(entry, tensors) for key, entry in value["words"].items()}
