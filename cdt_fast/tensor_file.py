"""Tensors and words in one safetensors file."""

import json
import os
from collections.abc import Mapping

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.files import parsed_json

# One entry of the file's metadata for all that is ours: safetensors writes several in an order that differs each time.
_OURS = "cdt_fast"


def serialized(tensors: Mapping[str, Tensor], words: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a safetensors file with tensors and words by name.

    Writing is left to the caller, to whom the system reports a full disk; safetensors' own writer would reword it.
    Tensors that share memory come back apart.
    """
    stored: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        # A copy where memory is shared: safetensors refuses it.
        stored[name] = plain.clone() if plain.untyped_storage().data_ptr() in storages else plain
        storages.add(stored[name].untyped_storage().data_ptr())
    return save(stored, {_OURS: json.dumps({"metadata": dict(words or {})})})


def load_tensors(path: str | os.PathLike[str], *, words_only: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and words that `serialized` was given to the CPU; no words of other tools.

    InputError: the file is missing, cut short or no safetensors file.
    """
    try:
        # safetensors opens a file twice by its name; another process may replace the file in between.
        with open(path, "rb") as opened, safe_open(f"/dev/fd/{opened.fileno()}", framework="pt") as file:
            ours = (file.metadata() or {}).get(_OURS)
            # Copies: in the file they start on any 8 bytes, and where they start decides how products round.
            tensors = {name: file.get_tensor(name).clone() for name in (() if words_only else file.keys())}
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch cannot map the file
        raise InputError(f"{path}: cannot be read, or is cut short ({error})") from error
    words = {} if ours is None else parsed_json(ours, f"{path}: its metadata", dict[str, dict[str, str]])
    return tensors, words.get("metadata", {})
