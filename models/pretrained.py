"""A model in a folder: `config.json` says what it is, `model.safetensors` holds its weights."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import Self

from cdt_fast.errors import InputError
from cdt_fast.files import read_json, replaced_atomically, write_json
from cdt_fast.models.transformers_weights import check_finite
from cdt_fast.tensor_file import load_tensors, serialized

_classes: dict[str, type[PretrainedModel]] = {}


class PretrainedModel(nn.Module):
    """A module that is rebuilt from its `config`, the keyword arguments of its constructor."""

    config: dict[str, Any]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _classes[cls.__name__] = cls

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model to `folder`, each file atomically; checksums of weights and configuration are among them."""
        folder = Path(folder)
        config = {"model": type(self).__name__, **self.config}
        with replaced_atomically(folder / "model.safetensors") as temporary:
            temporary.write_bytes(serialized(self.state_dict(), {"config": _canonical(config)}))
        write_json(folder / "config.json", config)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Load a model of this class from `folder`, on the CPU.

        Raises:
            InputError: as `load_pretrained`, or the model is of another class.
        """
        model = load_pretrained(folder)
        if not isinstance(model, cls):
            raise InputError(f"{folder}: holds a {type(model).__name__}, expected a {cls.__name__}")
        return model


def load_pretrained(folder: str | os.PathLike[str]) -> PretrainedModel:
    """Load whichever model of this package `folder` holds, on the CPU, in the dtype it was saved in.

    Weights that another tool wrote have no checksums: they load with a warning that says so.

    Raises:
        InputError: the folder holds no model; a file of it is missing, unknown, not whole or damaged; the weights are
            of another configuration, no floating-point numbers, or not finite.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or config.get("model") not in list(_classes):
        raise InputError(f'{folder / "config.json"}: "model" must be one of {", ".join(sorted(_classes))}')
    saved = _canonical(config)
    name = config.pop("model")
    try:
        model = _classes[name](**config)
    except (TypeError, InputError) as error:
        raise InputError(f"{folder / 'config.json'}: does not fit {name} ({error})") from error
    path = folder / "model.safetensors"
    file = load_tensors(path)
    if file.metadata.get("config", saved) != saved:
        raise InputError(f"{path}: does not fit {folder / 'config.json'}, which was another one when it was saved")
    if not file.checked:
        warnings.warn(f"{path}: has no checksums, as another tool wrote it: damage would not be seen", stacklevel=2)
    for key, value in file.tensors.items():
        if not value.is_floating_point():
            raise InputError(f"{path}: {key} must be floating-point numbers, got {value.dtype}")
    try:
        # As they are: a constructor builds in torch's default dtype, and to copy would cast.
        model.load_state_dict(file.tensors, assign=True)
    except RuntimeError as error:
        raise InputError(f"{path}: does not fit {folder / 'config.json'} ({error})") from error
    check_finite(model, f"{path}")
    return model


def _canonical(config: dict[str, Any]) -> str:
    """A configuration as one line, whatever the order and the kinds of its sequences."""
    return json.dumps(config, sort_keys=True)
