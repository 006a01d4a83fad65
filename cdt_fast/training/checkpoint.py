"""Checkpoints: all the state of a run in one safetensors file, without pickle."""

import json
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.files import parsed_json, replaced_atomically, shown
from cdt_fast.tensor_file import load_tensors, serialized

_FORMAT = "cdt_fast checkpoint 3"
# Settings that may differ between two resumptions of a run: places, and what can change on the way or comes after it.
_NOT_OF_THE_RUN = (
    *("source", "model", "embedding", "pretrained", "download", "device", "precision"),
    *("steps", "epochs", "validate_every", "gammas"),
)


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` to `path`, atomically.

    The state may hold nested dictionaries, lists and tuples of tensors, numbers, words, truth values and None; anything
    else is a TypeError. Tuples come back as lists. The OSError of a file that cannot be written names `path`.
    """
    tensors: dict[str, Tensor] = {}
    words = {"format": _FORMAT, "step": str(state.get("step", 0)), "state": json.dumps(_encoded(state, "", tensors))}
    with replaced_atomically(path) as temporary:
        temporary.write_bytes(serialized(tensors, words))


def load_checkpoint(path: str | os.PathLike[str], *, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, on the CPU.

    With `run`, the `run_identity` of the training that resumes, the state has to be of that training.

    Raises:
        InputError: there is no checkpoint, or it cannot be read. With `run` also: a weight or a moment of the optimizer
            is not finite, or the state is of another run.
    """
    if not os.path.exists(path):
        raise InputError(f"{path}: there is no checkpoint yet")
    tensors, words = load_tensors(path)
    if words.get("format") != _FORMAT:
        raise InputError(
            f"{path}: is no checkpoint of this version; the git tag full (commit 1178e39) reads those of earlier ones"
        )
    document = parsed_json(words.get("state", ""), str(path))
    try:
        state = {**_decoded(document, tensors)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error})") from error
    if run is None:
        return state
    for name, here in run.items():
        there = state["run"].get(name)
        if there != here:
            raise InputError(
                f"{path}: is of another run, or does not fit config.toml: {name} was {shown(there)}, is {shown(here)}"
            )
    for key, tensor in tensors.items():
        name = key.partition(".")[2]  # see `_encoded`
        kept = name.startswith(("model.", "optimizer.", "constraints."))
        if kept and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InputError(f"{path}: holds NaN or infinity in {name}; train again, with a lower --lr")
    return state


def saved_step(path: str | os.PathLike[str]) -> int:
    """Return the step of the checkpoint at `path` without reading its tensors; 0 if there is none that can be read."""
    try:
        return int(load_tensors(path, words_only=True)[1].get("step", 0))
    except ValueError:  # an InputError is one
        return 0


def run_identity(settings: Any) -> dict[str, Any]:
    """Return the settings that a checkpoint belongs to, for `load_checkpoint`."""
    return {name: value for name, value in settings.values().items() if name.split()[1] not in _NOT_OF_THE_RUN}


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` for JSON, with names for its tensors, which go to `tensors`, and pairs for its dictionaries."""
    if isinstance(value, Tensor):
        key = f"{len(tensors)}{name}"
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, dict):
        return {"items": [[key, _encoded(entry, f"{name}.{key}", tensors)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        return [_encoded(entry, f"{name}.{index}", tensors) for index, entry in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name} cannot be stored in a checkpoint: {type(value).__name__}")


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return {key: _decoded(entry, tensors) for key, entry in value["items"]}
