"""A model in a folder: `config.json` says what it is, `model.safetensors` holds its weights.

The surface is that of huggingface_hub's `PyTorchModelHubMixin`, and not the mixin: that removes config.json before it
writes another, reads pickled weights where there are no others, ignores weights that do not fit, and casts those that
it loads to the dtype of a new model.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import Self

from cdt_fast.errors import InputError
from cdt_fast.files import read_json, replaced_atomically, write_json, write_text
from cdt_fast.models import hub
from cdt_fast.models.transformers_weights import check_finite
from cdt_fast.tensor_file import load_tensors, serialized

_classes: dict[str, type[PretrainedModel]] = {}


def check_depth(name: str, depth: Any, least: int, layers: int) -> int:
    """`depth`, or InputError: it is no whole number from `least` to `layers`."""
    if not isinstance(depth, int) or isinstance(depth, bool) or not least <= depth <= layers:
        raise InputError(f"{name} must be a whole number from {least} to {layers}, got {depth!r}")
    return depth


class PretrainedModel(nn.Module):
    """A module that is rebuilt from its `config`, the keyword arguments of its constructor."""

    config: Any

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _classes[cls.__name__] = cls

    @property
    def _described(self) -> dict[str, Any]:
        return {"model": type(self).__name__, **self.config}

    def save_pretrained(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the model to `folder`, each file atomically; checksums of weights and configuration are among them.

        Raises:
            InputError: the folder is the `model` of a run of `cdt-fast train`, and not `overwrite`.
        """
        folder = Path(folder)
        where = folder.resolve()
        if not overwrite and where.name == "model" and (where.parent / "config.toml").exists():
            raise InputError(
                f"{folder}: is where a run keeps its model; save to another folder, or with overwrite=True"
            )
        config = self._described
        with replaced_atomically(folder / "model.safetensors") as temporary:
            temporary.write_bytes(serialized(self.state_dict(), {"config": _canonical(config)}))
        write_json(folder / "config.json", config)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        run: str | os.PathLike[str] | None = None,
        commit_message: str = "Model of cdt_fast",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload the model to the Hugging Face hub, with a card that says what it is, and return the commit's address.

        Args:
            repo_id: "owner/model", which is made where there is none.
            run: the run folder that trained it, from which the card has task, constraints and verdict.
            commit_message, branch, create_pr: of the one commit; whether it becomes a pull request.
            private: whether a new repository is; None: as the owner's default is.
            token: None: that of `hf auth login`.

        Raises:
            InputError: the hub cannot be reached, or refuses; `run` is no run folder.
        """
        import huggingface_hub

        options: dict[str, Any] = {"commit_message": commit_message, "revision": branch, "create_pr": create_pr}
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder) / "README.md", hub.model_card(repo_id, self._described, run))
            self.save_pretrained(folder)
            try:
                api = huggingface_hub.HfApi(token=token)
                repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **options))
            except Exception as error:
                raise InputError(f"{repo_id}: cannot be pushed to the hub ({hub.reason_of(error)})") from error

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        download: bool = False,
        revision: str | None = None,
        token: str | None = None,
    ) -> Self:
        """Load a model of this class, on the CPU; the arguments are those of `load_pretrained`.

        Raises:
            InputError: as `load_pretrained`, or the model is of another class.
        """
        model = load_pretrained(name, download=download, revision=revision, token=token)
        if not isinstance(model, cls):
            raise InputError(f"{name}: holds a {type(model).__name__}, expected a {cls.__name__}")
        return model


def load_pretrained(
    name: str | os.PathLike[str], *, download: bool = False, revision: str | None = None, token: str | None = None
) -> PretrainedModel:
    """Load whichever model of this package a folder holds, on the CPU, in the dtype it was saved in.

    Weights that another tool wrote have no checksums: they load with a warning that says so.

    Args:
        name: a folder, or "owner/model" on the Hugging Face hub, which was pushed by `push_to_hub`.
        download: fetch a name from the hub if it is not on this machine; otherwise nothing leaves the machine.
        revision: branch, tag or commit of the hub's repository.
        token: for repositories that are not public; None: that of `hf auth login`.

    Raises:
        InputError: there is no such folder or name; it holds no model; a file of it is missing, unknown, not whole or
            damaged; the weights are of another configuration, no floating-point numbers, or not finite.
    """
    folder = hub.local_folder(name, download=download, revision=revision, token=token)
    if (folder / "config.toml").exists() and (folder / "model").is_dir():
        raise InputError(f"{folder}: is a run folder; its model is in {folder / 'model'}")
    described, path = folder / "config.json", folder / "model.safetensors"
    config = read_json(described)
    if not isinstance(config, dict) or config.get("model") not in list(_classes):
        raise InputError(f'{described}: "model" must be one of {", ".join(sorted(_classes))}')
    saved = _canonical(config)
    kind = config.pop("model")
    try:
        model = _classes[kind](**config)
    except (TypeError, InputError) as error:
        raise InputError(f"{described}: does not fit {kind} ({error})") from error
    tensors, metadata = load_tensors(path)
    if metadata is not None and metadata.get("config", saved) != saved:
        raise InputError(f"{path}: does not fit {described}, which was another one when it was saved")
    if metadata is None:
        warnings.warn(f"{path}: has no checksums, as another tool wrote it: damage would not be seen", stacklevel=2)
    for key, value in tensors.items():
        if not value.is_floating_point():
            raise InputError(f"{path}: {key} must be floating-point numbers, got {value.dtype}")
    try:
        # As they are: a constructor builds in torch's default dtype, and to copy would cast.
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise InputError(f"{path}: does not fit {described} ({error})") from error
    check_finite(model, f"{path}")
    return model


def _canonical(config: dict[str, Any]) -> str:
    """A configuration as one line, whatever the order and the kinds of its sequences."""
    return json.dumps(config, sort_keys=True)
