"""Checkpoints: all the state of a run in one safetensors file, without pickle; the last two are kept."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from cdt_fast.errors import InputError, printable
from cdt_fast.files import parsed_json, replaced_atomically, shown
from cdt_fast.tensor_file import load_tensors, recorded, serialized

_FORMAT = "cdt_fast checkpoint 2"

# What the state of a training holds, as `training.loop` saves it.
_ENTRIES: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "steps": int,
    "model": dict,
    "optimizer": dict,
    "schedule": dict,
    "constraints": dict,
    "best": (dict, type(None)),
    "run": dict,
    "data": dict,
}

# Settings that do not say which run it is: places, and what may change between two resumptions.
_NOT_OF_THE_RUN = (
    *("source", "model", "embedding", "pretrained", "download", "device", "precision"),
    *("steps", "epochs", "validate_every"),
)


def previous_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Where `save_checkpoint` keeps the checkpoint that was at `path` before."""
    path = Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` to `path` with checksums, atomically; the checkpoint that was there before is kept beside it.

    The state may hold nested dictionaries (keys: words or whole numbers), lists and tuples of tensors, numbers, words,
    truth values and None; anything else is a TypeError. Tuples come back as lists.

    Raises:
        OSError: the file cannot be written; it names `path`.
    """
    tensors: dict[str, Tensor] = {}
    document = _without_tensors(state, "", tensors)
    with replaced_atomically(path) as temporary:
        temporary.write_bytes(serialized(tensors, {"format": _FORMAT, "state": json.dumps(document)}))
        if os.path.exists(path):
            _keep(path)


def load_checkpoint(path: str | os.PathLike[str], *, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, on the CPU; where that is damaged the one before it, with a warning on stderr.

    `run` is the `run_identity` of the training that it has to be of; its counters and numbers are checked then, too.

    Raises:
        InputError: there is none, or none is whole. With `run` also: an entry is missing or of another type, the step
            is below 0 or beyond the end, a weight or a moment of the optimizer is not finite, or it is of another run.
    """
    previous = previous_checkpoint(path)
    if not os.path.exists(path) and not previous.exists():
        raise InputError(f"{path}: there is no checkpoint yet")
    try:
        state = _load(path)
    except InputError as error:
        try:
            state = _load(previous)
        except InputError:
            raise error from None
        line = f"cdt-fast: warning: {error}; the checkpoint before it is used, {previous.name}"
        print(printable(line), file=sys.stderr)
    if run is not None:
        _check_training_state(path, state, run)
    return state


def saved_step(path: str | os.PathLike[str]) -> int:
    """The step of the checkpoint at `path`, read without its tensors; 0 where there is none, or none that is whole."""
    try:
        state = parsed_json(recorded(path).get("state", ""), str(path), dict[str, dict[str, Any]])
    except InputError:
        return 0
    step = state.get("words", {}).get("step")
    return step if isinstance(step, int) else 0


def run_identity(settings: Any) -> dict[str, Any]:
    """The settings that a checkpoint belongs to, for `load_checkpoint`: two runs that agree in them are the same."""
    return {
        f"[{section}] {name}": value
        for section in ("data", "model", "constraints", "training")
        for name, value in vars(getattr(settings, section)).items()
        if name not in _NOT_OF_THE_RUN
    }


def _check_training_state(path: str | os.PathLike[str], state: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Refuse a state that the training of `run` does not leave; see `load_checkpoint`."""
    for name, kinds in _ENTRIES.items():
        value = state.get(name, ...)
        if value is ... or not isinstance(value, kinds) or isinstance(value, bool):
            what = "is missing" if value is ... else f"is {shown(value)}"
            raise InputError(f"{path}: is no checkpoint of a training: {name} {what}")
    if not 0 <= state["step"] <= state["steps"]:
        raise InputError(f"{path}: is at step {state['step']} of {state['steps']}, where no training comes to")
    for name, here in run.items():
        there = state["run"].get(name)
        if there != here:
            raise InputError(
                f"{path}: is of another run, or does not fit config.toml: {name} was {shown(there)}, is {shown(here)}"
            )
    for part in ("model", "optimizer", "constraints"):
        for name, tensor in _tensors(state[part], part):
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise InputError(f"{path}: holds NaN or infinity in {name}; train again, with a lower --lr")


def _keep(path: str | os.PathLike[str]) -> None:
    """Make the checkpoint at `path` the previous one too."""
    previous = previous_checkpoint(path)
    previous.unlink(missing_ok=True)
    try:
        os.link(path, previous)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, previous)


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    tensors, metadata = load_tensors(path)
    if metadata is None or metadata.get("format") != _FORMAT:
        raise InputError(
            f"{path}: is no checkpoint of this version of cdt_fast; resume with the version that wrote it, or train "
            "in another folder"
        )
    try:
        state = _with_tensors(parsed_json(metadata["state"], str(path)), tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict):
        raise InputError(f"{path}: is damaged (its state is {shown(state)})")
    return state


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(entry, f"{name}.{key}")


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while name in tensors:  # the entry "a.b", and the entry "b" of "a"
            name += "'"
        tensors[name] = value
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
