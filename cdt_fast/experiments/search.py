"""A search over the settings of a run with Optuna, judged on validation data: the last loss, and feasibility."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cdt_fast.errors import InputError, require
from cdt_fast.experiments import PlannedRun
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings


class Searched(NamedTuple):
    """A setting that is searched over, in words as in `training.lr=1e-4..1e-2` or `constraints.objective=last,log`.

    Attributes:
        section, name: which one.
        choices: what it may be; empty for a range.
        low, high: the ends of a range; whole numbers where the setting is one.
    """

    section: str
    name: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @property
    def key(self) -> str:
        """As it was given."""
        return f"{self.section}.{self.name}"

    def suggest(self, trial: Any) -> Any:
        """What a trial of Optuna takes; of a range over a factor of ten or more on a logarithmic scale."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        log = self.low > 0 and self.high >= 10 * self.low
        if isinstance(self.low, int):
            return trial.suggest_int(self.key, self.low, self.high, log=log)
        return trial.suggest_float(self.key, self.low, self.high, log=log)


def parse_searched(text: str, settings: RunSettings) -> Searched:
    """What an argument of `--over` says.

    Raises:
        InputError: it is not of its form, names no setting, or a value of it does not fit the setting.
    """
    key, equals, values = text.partition("=")
    section, dot, name = key.partition(".")
    if not (equals and dot and values):
        raise InputError(f"--over must be like training.lr=1e-4..1e-2 or constraints.objective=last,log, got {text!r}")
    ends = values.split("..")
    if len(ends) == 2:
        try:
            low, high = (int(end) if end.lstrip("-").isdigit() else float(end) for end in ends)
        except ValueError:
            raise InputError(f"--over {key}: the ends of a range must be numbers, got {values!r}") from None
        if not low < high:
            raise InputError(f"--over {key}: the first end of a range must be below the second, got {values!r}")
        present = getattr(getattr(settings, section, None), name, None)
        if not (isinstance(low, int) and isinstance(high, int) and isinstance(present, int)):
            low, high = float(low), float(high)
        searched = Searched(section, name, (), low, high)
        tried: Sequence[Any] = (searched.low, searched.high)
    else:
        searched = Searched(section, name, tuple(values.split(",")))
        tried = searched.choices
    for value in tried:
        copy.deepcopy(settings).set(section, name, value)
    return searched


class Trial(NamedTuple):
    """What a trial came to, on validation data.

    Attributes:
        folder: of its run.
        values: by the keys of what is searched over.
        loss: at the last depth.
        violation: the largest of its constraints, at most 0 where all hold; None without constraints.
    """

    folder: Path
    values: dict[str, Any]
    loss: float
    violation: float | None

    @property
    def feasible(self) -> bool:
        """Whether all constraints hold."""
        return self.violation is None or self.violation <= 0


def search(
    settings: RunSettings,
    over: Sequence[Searched],
    trials: int,
    out: Path,
    seed: int,
    train: Callable[[RunFolder, RunSettings, bool], object],
) -> Iterator[Trial]:
    """The trials one by one, as they end. What is in `out` already is not trained again.

    The same seed and results choose the same settings, so that a search that was stopped goes on where it was.

    Args:
        settings: of every trial, but for what is searched over.
        over: the settings that a trial chooses.
        trials: how many.
        out: where their folders `trial-000` and on are.
        seed: of the choices.
        train: trains a folder with its settings, anew or resumed.

    Raises:
        InputError: a folder holds a run with other settings.
        MissingExtra: Optuna is not installed.
    """
    optuna = require("optuna", "search", "searching over settings")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constraints are called experimental
        sampler = optuna.samplers.TPESampler(seed=seed, constraints_func=lambda trial: [trial.user_attrs["violation"]])
    study = optuna.create_study(sampler=sampler)
    for number in range(trials):
        asked, chosen = study.ask(), copy.deepcopy(settings)
        values = {searched.key: searched.suggest(asked) for searched in over}
        for searched in over:
            chosen.set(searched.section, searched.name, values[searched.key])
        path = out / f"trial-{number:03}"
        begun = PlannedRun(path, chosen, "", "trial", seed).state() != "new"
        folder = RunFolder(path) if begun else RunFolder.create(path, chosen)
        best = _best(folder) if begun else None
        if best is None:
            train(folder, chosen, begun)
            best = _best(folder)
        if best is None:
            return  # stopped
        found = Trial(path, values, best["loss"][-1], best["worst_violation"])
        asked.set_user_attr("violation", 0.0 if found.violation is None else found.violation)
        study.tell(asked, found.loss)
        yield found


def _best(folder: RunFolder) -> dict[str, Any] | None:
    """The validation of the model that a run keeps, None where it has not been trained to its end."""
    if not folder.checkpoint.exists():
        return None
    state = load_checkpoint(folder.checkpoint)
    return state["best"] if state["step"] >= state["steps"] else None


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The best first: where constraints hold by the loss, then by how far they are from holding."""
    return sorted(trials, key=lambda trial: (0.0 if trial.feasible else trial.violation, trial.loss))


def as_table(trials: Sequence[Trial]) -> list[list[str]]:
    """A row a trial, the best first."""
    keys = list(trials[0].values)
    rows = [["trial", *keys, "validation loss, last depth", "largest violation", "feasible"]]
    for trial in ranked(trials):
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.values.values()]
        violation = "" if trial.violation is None else f"{trial.violation:+.1%}"
        rows.append([trial.folder.name, *shown, f"{trial.loss:.5g}", violation, "yes" if trial.feasible else "no"])
    return rows
