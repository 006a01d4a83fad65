"""Models on the Hugging Face hub: fetched where that is asked for, and pushed with a card that says what they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.files import read_json, read_toml, shown

_FILES = ["config.json", "model.safetensors"]
_UNKNOWN = "not recorded"


def local_folder(
    name: str | os.PathLike[str], *, download: bool = False, revision: str | None = None, token: str | None = None
) -> Path:
    """The folder on this machine that holds the model `name`; the arguments are those of `load_pretrained`.

    Raises:
        InputError: the name has the form of one of the hub's, and is neither in the cache nor can be fetched.
    """
    import huggingface_hub
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        if Path(name).exists() or str(name).count("/") != 1:
            return Path(name)
        validate_repo_id(str(name))
    except HFValidationError:
        return Path(name)
    options: dict[str, Any] = {"local_files_only": not download, "revision": revision, "token": token}
    try:
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=_FILES, **options))
    except Exception as error:  # of the hub's library, or of whichever library it reaches the network with
        reason = "nor is it in the hub's cache; download=True fetches a model of the hub"
        if download:
            reason = f"and it cannot be fetched from the hub ({reason_of(error)})"
        raise InputError(f"{name}: no such folder, {reason}") from error


def model_card(repo_id: str, config: Mapping[str, Any], run: str | os.PathLike[str] | None = None) -> str:
    """The README.md of a model's repository: task, configuration, constraints, verdict, and how to load it.

    Args:
        repo_id: where it will be.
        config: its config.json, with its class as "model".
        run: the run folder that trained it, of which nothing is said but task, constraints and verdict.

    Raises:
        InputError: `run` is no run folder, or a file of it cannot be read.
    """
    from huggingface_hub import ModelCardData

    config = dict(config)
    model = config.pop("model")
    task = constraints = verdict = _UNKNOWN
    if run is not None:
        settings, evaluation = read_toml(Path(run) / "config.toml"), Path(run) / "evaluation.json"
        task, given = str(settings.get("task", "video")), settings.get("constraints", {})
        # What is off, and the paths of this machine, are nobody's business.
        said = {name: value for name, value in given.items() if value not in ("none", False)}
        said = {name: value for name, value in said.items() if not (isinstance(value, str) and os.sep in value)}
        constraints = _listed(said) if "constrained" in said else "none"
        if evaluation.exists():
            verdict = str(read_json(evaluation, dict[str, Any]).get("report", {}).get("text", _UNKNOWN))
    lines = {
        "Task": task,
        "Configuration": f"{model}: {_listed(config)}",
        "Constraints": constraints,
        "Verdict": verdict,
        "Load": f'`cdt_fast.models.load_pretrained("{repo_id}", download=True)`',
        "Integrity": "model.safetensors holds a checksum of each tensor and of config.json; loading checks them",
    }
    card = [f"- {title}: {' '.join(text.split())}" for title, text in lines.items()]
    data = ModelCardData(library_name="cdt_fast", tags=["cdt_fast", model])
    return "\n".join(["---", data.to_yaml(), "---", f"# {repo_id}", "", *card, ""])


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def reason_of(error: Exception) -> str:
    """What an error of the hub's library says, in one line."""
    return shown(" ".join(str(error).split()) or type(error).__name__)
