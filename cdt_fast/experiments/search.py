"""A search over the settings of a run with Optuna, judged on validation data: the last loss, and feasibility."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cdt_fast.errors import InputError, require
from cdt_fast.experiments import PlannedRun
from cdt_fast.training import loop
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from cdt_fast.training.task import Table, Task


def parse_searched(text: str, settings: RunSettings) -> tuple[str, Any]:
    """What an argument of `--over` says: the setting, and the distribution of Optuna that its values are drawn from.

    A range is searched on a logarithmic scale where it is over a factor of ten or more.

    Raises:
        InputError: it is not of its form, names no setting, or a value of it does not fit the setting.
        MissingExtra: Optuna is not installed.
    """
    distributions = require("optuna", "search", "searching over settings").distributions
    key, _, values = text.partition("=")
    section, _, name = key.partition(".")
    if not (name and values):
        raise InputError(f"--over must be like training.lr=1e-4..1e-2 or constraints.objective=last,log, got {text!r}")
    tried: list[Any] = values.split(".." if ".." in values else ",")
    if ".." in values:
        present = getattr(getattr(settings, section, None), name, None)
        try:
            low, high = tried = [int(end) if isinstance(present, int) else float(end) for end in tried]
        except ValueError:
            raise InputError(f"--over {key}: the ends of a range must be numbers of its type, got {values!r}") from None
        if not low < high:
            raise InputError(f"--over {key}: the first end of a range must be below the second, got {values!r}")
        kind = distributions.IntDistribution if isinstance(present, int) else distributions.FloatDistribution
        distribution = kind(low, high, log=low > 0 and high >= 10 * low)
    else:
        distribution = distributions.CategoricalDistribution(tried)
    for value in tried:
        copy.deepcopy(settings).set(section, name, value)
    return key, distribution


class Trial(NamedTuple):
    """What a trial came to on validation data: its run's folder, the settings that were searched over, the loss at the
    last depth, and the largest violation of its constraints (None without, at most 0 where all hold).
    """

    folder: Path
    values: dict[str, Any]
    loss: float
    violation: float | None


def search(
    settings: RunSettings, over: Mapping[str, Any], trials: int, out: Path, seed: int, task: Task
) -> Iterator[Trial]:
    """The trials one by one, as they end, in folders `trial-000` and on of `out`. What is there is not trained again.

    The same seed and results choose the same settings, so that a search that was stopped resumes where it was.

    `settings` are those of every trial, but for what is searched `over`, the distributions of `parse_searched`.

    Raises:
        InputError: a folder holds a run with other settings.
        Interrupted: a signal stopped a training.
    """
    optuna = require("optuna", "search", "searching over settings")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constraints are called experimental
        sampler = optuna.samplers.TPESampler(seed=seed, constraints_func=lambda trial: [trial.user_attrs["violation"]])
    study = optuna.create_study(sampler=sampler)
    for number in range(trials):
        asked, chosen = study.ask(dict(over)), copy.deepcopy(settings)
        for key, value in asked.params.items():
            section, _, name = key.partition(".")
            chosen.set(section, name, value)
        path = out / f"trial-{number:03}"
        begun = PlannedRun(path, chosen, "", "trial", seed).state() != "new"
        folder = RunFolder(path) if begun else RunFolder.create(path, chosen)
        state = load_checkpoint(folder.checkpoint) if folder.checkpoint.exists() else None
        if state is None or state["step"] < state["steps"]:
            loop.train(folder, chosen, task, resume=begun)
            state = load_checkpoint(folder.checkpoint)
        best = state["best"]
        trial = Trial(path, asked.params, best["loss"][-1], best["worst_violation"])
        asked.set_user_attr("violation", 0.0 if trial.violation is None else trial.violation)
        study.tell(asked, trial.loss)
        yield trial


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The best first: where constraints hold by the loss, then by how far they are from holding."""
    return sorted(trials, key=lambda trial: (max(trial.violation or 0.0, 0.0), trial.loss))


def as_table(trials: Sequence[Trial]) -> Table:
    """A row a trial, the best first."""
    rows = [["trial", *trials[0].values, "validation loss, last depth", "largest violation"]]
    for trial in ranked(trials):
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.values.values()]
        violation = "" if trial.violation is None else f"{trial.violation:+.1%}"
        rows.append([trial.folder.name, *shown, f"{trial.loss:.5g}", violation])
    return rows
