"""A run together with its measurements, as reports and comparisons read it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cdt_fast.config import RunConfig
from cdt_fast.errors import InputError
from cdt_fast.files import read_json
from cdt_fast.runs import RunFolder

# What a report needs to find in an evaluation.json.
_NEEDED = (
    *("task", "source", "test_windows", "gamma", "sigma", "training_gamma", "constrained", "tied", "layers"),
    *("parameters", "rmse", "mean_rmse", "identity_rmse", "baseline_rmse", "depth_rmse", "layer_loss", "layer_ratio"),
    *("feasible", "report", "spectral_ratio", "per_sample"),
)


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
        missing = [key for key in _NEEDED if key not in evaluation] if isinstance(evaluation, dict) else list(_NEEDED)
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
        return f"{constrained}, {'tied' if self.evaluation['tied'] else 'untied'}"

    @property
    def label(self) -> str:
        """The run's name and how it was trained."""
        return f"{self.name or self.folder.name} ({self.kind})"


def check_comparable(runs: Sequence[EvaluatedRun]) -> None:
    """Require that all runs were measured on the same frames with the same noise, cut into the same patches.

    Raises:
        InputError: two runs differ; the message says in what.
    """
    first = runs[0]
    for run in runs[1:]:
        for (key, here), there in zip(_data_of(run).items(), _data_of(first).values(), strict=True):
            if here != there:
                raise InputError(
                    f"{run.folder.path} and {first.folder.path} were evaluated on different data: {key} is "
                    f"{_short(here)} and {_short(there)}"
                )


def _data_of(run: EvaluatedRun) -> dict[str, Any]:
    keys = ("task", "source", "gamma", "training_gamma", "sigma", "test_windows")
    # The loss of a depth is a sum over a patch, and the baselines cut patches too.
    shape = {name: getattr(run.config.data, name) for name in ("size", "window", "patch")}
    return {**{key: run.evaluation[key] for key in keys[:2]}, **shape, **{key: run.evaluation[key] for key in keys[2:]}}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
