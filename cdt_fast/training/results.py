"""A run together with its measurements, as reports and comparisons read it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.files import read_json
from cdt_fast.training.config import RunConfig
from cdt_fast.training.run_folder import RunFolder

# What a report needs to find in an evaluation.json, of every task and of one.
_SHARED = (
    *("task", "source", "gamma", "training_gamma", "constrained", "layers", "parameters"),
    *("layer_loss", "layer_ratio", "feasible", "report", "per_sample"),
)
_SEQUENCES = (
    *("model", "perturbation", "accuracy", "accuracy_interval", "auc", "depth_accuracy", "depth_loss"),
    *("answers", "test_texts", "test_digest"),
)
_NEEDED = {
    "video": (
        *_SHARED,
        *("test_windows", "sigma", "tied", "rmse", "mean_rmse", "identity_rmse", "baseline_rmse", "depth_rmse"),
        "spectral_ratio",
    ),
    "text": (*_SHARED, *_SEQUENCES),
    "lm": (*_SHARED, *_SEQUENCES, "perplexity", "vocabulary"),
}

_BASELINES = {
    "dct": "DCT {patch}x{patch}, hard threshold",
    "dct3d": "3-D DCT {patch}x{patch}x{window}, hard threshold",
}


@dataclass(frozen=True)
class EvaluatedRun:
    """A run with its measurements, and what to call it where its folder's name is not enough."""

    folder: RunFolder
    config: RunConfig
    evaluation: dict[str, Any]
    name: str | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> EvaluatedRun:
        """Read a run that has been evaluated.

        Raises:
            InputError: it is no run, or has no evaluation of this version.
        """
        folder, config = RunFolder.open(path)
        remedy = f"run `cdt-fast evaluate {shlex.quote(str(path))}`"
        if not folder.evaluation.exists():
            raise InputError(f"{path}: has not been evaluated; {remedy}")
        evaluation = read_json(folder.evaluation)
        needed = _NEEDED[config.task]
        missing = [key for key in needed if key not in evaluation] if isinstance(evaluation, dict) else list(needed)
        if missing:
            raise InputError(f"{folder.evaluation}: lacks {', '.join(missing[:3])}; {remedy}")
        return cls(folder, config, evaluation)

    @classmethod
    def open_all(cls, paths: Sequence[str | os.PathLike[str]]) -> list[EvaluatedRun]:
        """Read several runs; those whose folders have the same name are called by the paths that were given.

        Raises:
            InputError: one is no run, or is given twice, or has no evaluation of this version.
        """
        runs = [cls.open(path) for path in paths]
        places = [run.folder.path.resolve() for run in runs]
        for path, place in zip(paths, places, strict=True):
            if places.count(place) > 1:
                raise InputError(f"{path}: is given more than once")
        names = [run.folder.name for run in runs]
        return [
            replace(run, name=str(path)) if names.count(run.folder.name) > 1 else run
            for run, path in zip(runs, paths, strict=True)
        ]

    @property
    def kind(self) -> str:
        """How the run was trained, in words."""
        constrained = "constrained" if self.evaluation["constrained"] else "unconstrained"
        if self.config.task != "video":
            return f"{constrained}, {Path(self.config.model.model).name}"
        return f"{constrained}, {'tied' if self.evaluation['tied'] else 'untied'}"

    @property
    def label(self) -> str:
        """The run's name and how it was trained."""
        return f"{self.name or self.folder.name} ({self.kind})"

    def baseline_label(self, name: str) -> str:
        """What to call a baseline without weights that a run on video was measured beside."""
        return _BASELINES[name].format(patch=self.config.data.patch, window=self.config.data.window)


def check_comparable(runs: Sequence[EvaluatedRun]) -> None:
    """Require that all runs were measured on the same data with the same noise: frames cut into the same patches, or
    the same texts; of language models also in tokens of as many kinds, without which their losses are not of one scale.

    Raises:
        InputError: two runs differ; the message says in what.
    """
    first = runs[0]
    for run in runs[1:]:
        reference = _data_of(first)
        for key, here in _data_of(run).items():
            there = reference.get(key)
            if here != there:
                raise InputError(
                    f"{run.folder.path} and {first.folder.path} were evaluated on different data: {key} is "
                    f"{_short(here)} and {_short(there)}"
                )


def _data_of(run: EvaluatedRun) -> dict[str, Any]:
    keys = ["task", "source"]
    shape: dict[str, Any] = {}
    if run.evaluation["task"] == "text":
        later = ["gamma", "training_gamma", "perturbation", "test_digest"]
    elif run.evaluation["task"] == "lm":
        later = ["gamma", "training_gamma", "perturbation", "vocabulary", "test_digest"]
    else:
        later = ["gamma", "training_gamma", "sigma", "test_windows"]
        # The loss of a depth is a sum over a patch, and the baselines cut patches too.
        shape = {name: getattr(run.config.data, name) for name in ("size", "window", "patch")}
    return {key: run.evaluation[key] for key in keys} | shape | {key: run.evaluation.get(key) for key in later}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
