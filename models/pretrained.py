"""A model in a folder: `config.json` says what it is, `model.safetensors` holds its weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from cdt_fast.checks import InputError
from cdt_fast.files import read_json, replaced_atomically, write_json
from cdt_fast.models.transformers_weights import check_finite

_classes: dict[str, type[PretrainedModel]] = {}


class PretrainedModel(nn.Module):
    """A module that is rebuilt from its `config`, the keyword arguments of its constructor."""

    ARGUMENTS: ClassVar[tuple[str, ...]]  # of the constructor, each with an attribute of its name

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _classes[cls.__name__] = cls

    @property
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, as they are used."""
        return {name: getattr(self, name) for name in self.ARGUMENTS}

    def save_pretrained(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the model to `folder`, each file atomically.

        InputError: the folder is the `model` of a run of `cdt-fast train`, and `overwrite` is false; or a weight is
        parametrized, which the constructor would not repeat.
        """
        for name, module in self.named_modules():
            if is_parametrized(module):
                where = f"{name or type(self).__name__}.parametrizations"
                raise InputError(f"{where}: call torch.nn.utils.parametrize.remove_parametrizations before saving")
        folder = Path(folder)
        where = folder.resolve()
        if not overwrite and where.name == "model" and (where.parent / "config.toml").exists():
            raise InputError(f"{folder}: is where a run keeps its model; save elsewhere, or with overwrite=True")
        content = save({name: value.contiguous() for name, value in self.state_dict().items()})
        with replaced_atomically(folder / "model.safetensors") as temporary:
            temporary.write_bytes(content)
        write_json(folder / "config.json", {"model": type(self).__name__, **self.config})

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Load a model of this class, on the CPU; InputError: as `load_pretrained`, or it is of another class."""
        model = load_pretrained(folder)
        if not isinstance(model, cls):
            raise InputError(f"{folder}: holds a {type(model).__name__}, expected a {cls.__name__}")
        return model


def load_pretrained(folder: str | os.PathLike[str]) -> PretrainedModel:
    """Load whichever model of this package a folder holds, on the CPU, in the dtype it was saved in.

    InputError: the folder does not exist, holds no model or is the folder of a run; a file is missing or cut short; the
    weights belong to another configuration, are not floating-point, or not finite.
    """
    folder = Path(folder)
    if (folder / "config.toml").exists() and (folder / "model").is_dir():
        raise InputError(f"{folder}: is a run folder; its model is in {folder / 'model'}")
    described, path = folder / "config.json", folder / "model.safetensors"
    config = read_json(described)
    if not isinstance(config, dict) or config.get("model") not in list(_classes):
        raise InputError(f'{described}: "model" must be one of {", ".join(sorted(_classes))}')
    kind = config.pop("model")
    try:
        model = _classes[kind](**config)
    except (TypeError, InputError) as error:
        raise InputError(f"{described}: does not fit {kind} ({error})") from error
    try:
        # Copies: where numbers start in memory decides how products round.
        tensors = {name: value.clone() for name, value in load(path.read_bytes()).items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read, or is cut short ({error})") from error
    try:
        # As they are: a constructor builds in torch's default dtype, and to copy would cast.
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise InputError(f"{path}: does not fit {described} ({error})") from error
    check_finite(model, f"{path}")
    return model
