"""A model in a folder: `config.json` says what it is, `model.safetensors` holds its weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import Self

from cdt_fast.errors import InputError
from cdt_fast.files import read_json, replaced_atomically, write_json
from cdt_fast.tensor_file import load_tensors, serialized

_classes: dict[str, type[PretrainedModel]] = {}


class PretrainedModel(nn.Module):
    """A module that is rebuilt from its `config`, the keyword arguments of its constructor."""

    config: dict[str, Any]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _classes[cls.__name__] = cls

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model to `folder`, each file atomically."""
        folder = Path(folder)
        with replaced_atomically(folder / "model.safetensors") as temporary:
            temporary.write_bytes(serialized(self.state_dict()))
        write_json(folder / "config.json", {"model": type(self).__name__, **self.config})

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Load a model of this class from `folder`, on the CPU.

        Raises:
            InputError: the folder holds no such model, or a file of it is missing, unknown or not whole.
        """
        model = load_pretrained(folder)
        if not isinstance(model, cls):
            raise InputError(f"{folder}: holds a {type(model).__name__}, expected a {cls.__name__}")
        return model


def load_pretrained(folder: str | os.PathLike[str]) -> PretrainedModel:
    """Load whichever model of this package `folder` holds, on the CPU, in the dtype it was saved in.

    Raises:
        InputError: the folder holds no model, or a file of it is missing, unknown or not whole.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or config.get("model") not in list(_classes):
        raise InputError(f'{folder / "config.json"}: "model" must be one of {", ".join(sorted(_classes))}')
    name = config.pop("model")
    try:
        model = _classes[name](**config)
    except (TypeError, InputError) as error:
        raise InputError(f"{folder / 'config.json'}: does not fit {name} ({error})") from error
    path = folder / "model.safetensors"
    try:
        weights = load_tensors(path).tensors
        # A constructor builds in torch's default dtype; the weights keep the one they were saved in.
        model.to(next((value.dtype for value in weights.values() if value.is_floating_point()), None))
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"{path}: does not fit {folder / 'config.json'} ({error})") from error
    return model
