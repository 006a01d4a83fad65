"""Checkpoints: all the state of a run in one file."""

import io
import os
from collections.abc import Mapping
from typing import Any

import torch

from cdt_fast.checks import InputError
from cdt_fast.files import replaced_atomically, shown

# Settings that may differ between two resumptions of a run: places, and what can change on the way or comes after it.
_NOT_OF_THE_RUN = (
    *("source", "model", "embedding", "pretrained", "download", "device", "precision"),
    *("steps", "epochs", "validate_every", "gammas"),
)


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state`, of tensors, numbers and words, to `path`, atomically; an OSError names `path`."""
    content = io.BytesIO()  # torch would reword a full disk
    torch.save(state, content)
    with replaced_atomically(path) as temporary:
        temporary.write_bytes(content.getbuffer())


def load_checkpoint(
    path: str | os.PathLike[str], *, run: Mapping[str, Any] | None = None, mmap: bool = False
) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, on the CPU; no code of the file runs. `mmap`: tensors are read when used.

    With `run`, the `run_identity` of the training that resumes, the state has to be of that training.

    Raises:
        InputError: there is no checkpoint, it cannot be read, or with `run` it is of another run.
    """
    if not os.path.exists(path):
        raise InputError(f"{path}: there is no checkpoint yet")
    try:
        state = dict(torch.load(path, "cpu", weights_only=True, mmap=mmap))
    except Exception as error:  # any: the message of one that would run code advises to let it
        raise InputError(f"{path}: is no checkpoint, or is cut short ({type(error).__name__})") from error
    for name, here in (run or {}).items():
        there = state["run"].get(name)
        if there != here:
            raise InputError(
                f"{path}: is of another run, or does not fit config.toml: {name} was {shown(there)}, is {shown(here)}"
            )
    return state


def saved_step(path: str | os.PathLike[str]) -> int:
    """Return the step of the checkpoint at `path` without reading its tensors; 0 if there is none that can be read."""
    try:
        return load_checkpoint(path, mmap=True)["step"]
    except InputError:
        return 0


def run_identity(settings: Any) -> dict[str, Any]:
    """Return the settings that a checkpoint belongs to, for `load_checkpoint`."""
    return {name: value for name, value in settings.values().items() if name.split()[1] not in _NOT_OF_THE_RUN}
