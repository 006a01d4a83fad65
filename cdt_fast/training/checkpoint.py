"""Checkpoints: all the state of a run in one safetensors file, without pickle."""

import json
import os
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.files import replaced_atomically, shown

# Settings that may differ between two resumptions of a run: places, and what can change on the way or comes after it.
_NOT_OF_THE_RUN = (
    *("source", "model", "embedding", "pretrained", "download", "device", "precision"),
    *("steps", "epochs", "validate_every", "gammas", "limit"),
)


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state`, atomically: nested dictionaries, lists and tuples (which come back as lists) of tensors, numbers,
    words, truth values and None. TypeError: it holds anything else; an OSError names `path`."""
    tensors: dict[str, Tensor] = {}
    # Of several entries of the metadata the order differs each time.
    words = json.dumps({"step": state.get("step", 0), "state": _encoded(state, tensors)})
    content = save(tensors, {"cdt_fast": words})  # safetensors' own writer would reword a full disk
    with replaced_atomically(path) as temporary:
        temporary.write_bytes(content)


def load_checkpoint(path: str | os.PathLike[str], *, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, on the CPU; `run`: the `run_identity` of the training that resumes from it.
    InputError: there is no checkpoint, it cannot be read, or it is not of that training."""
    if not os.path.exists(path):
        raise InputError(f"{path}: there is no checkpoint yet")
    words, tensors = _read(path)
    try:
        state: dict[str, Any] = {**_decoded(words["state"], tensors)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error})") from error
    for name, here in (run or {}).items():
        there = state["run"].get(name)
        if there != here:
            change = f"{name} was {shown(there)}, is {shown(here)}"
            raise InputError(f"{path}: is of another run, or does not fit config.toml: {change}")
    return state


def check_data(state: dict[str, Any], here: dict[str, Any], source: str | None, samples: str, run: object) -> None:
    """Require that data of this identity, read from a source, are those of a checkpoint; InputError: they are not."""
    if any(here.get(name) != there for name, there in state["data"].items()):
        raise InputError(f"{source}: the {samples} are not those that {run} was trained on so far")


def saved_step(path: str | os.PathLike[str]) -> int:
    """Return the step of the checkpoint at `path` without reading its tensors; 0 if there is none that can be read."""
    try:
        return int(_read(path, words_only=True)[0]["step"])
    except (KeyError, TypeError, ValueError):  # an InputError is a ValueError
        return 0


def _read(path: str | os.PathLike[str], words_only: bool = False) -> tuple[Any, dict[str, Tensor]]:
    try:
        # safetensors opens a file twice by its name; another process may replace the file in between.
        with open(path, "rb") as opened, safe_open(f"/dev/fd/{opened.fileno()}", framework="pt") as file:
            # Copies: in the file they start on any 8 bytes, and where they start decides how products round.
            tensors = {name: file.get_tensor(name).clone() for name in (() if words_only else file.keys())}
            return json.loads(file.metadata()["cdt_fast"]), tensors
    except (KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is no checkpoint, or is cut short ({error})") from error


def run_identity(settings: Any) -> dict[str, Any]:
    """Return the settings that a checkpoint belongs to, for `load_checkpoint`."""
    return {name: value for name, value in settings.values().items() if name.split()[1] not in _NOT_OF_THE_RUN}


def _encoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return `value` for JSON, with names for its tensors, which go to `tensors`, and pairs for its dictionaries."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors refuses memory that is shared
        return {"tensor": name}
    if isinstance(value, dict):
        return {"items": [[key, _encoded(entry, tensors)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        return [_encoded(entry, tensors) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be stored in a checkpoint")


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return {key: _decoded(entry, tensors) for key, entry in value["items"]}
