"""Experiments by name, a TOML file each: several trainings, which `cdt-fast reproduce` sets side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cdt_fast.checks import InputError, suggestion
from cdt_fast.files import read_toml
from cdt_fast.tasks import TASKS, make_absolute, open_evaluated, open_run
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Experiment:
    """The contents of an experiment's file."""

    name: str  # that of the file
    title: str
    source: str  # what SOURCE has to be
    task: str
    seeds: Sequence[int]
    runs: Mapping[str, Mapping[str, Mapping[str, Any]]]  # what is different in each run, by section
    shared: Mapping[str, Mapping[str, Any]]  # settings of all runs, by section
    preset: str | None = None  # what the settings of all runs start from in place of the defaults

    @classmethod
    def load(cls, name: str) -> Experiment:
        """Read the experiment of this name, or raise InputError: there is none."""
        if name not in names():
            raise InputError(f"there is no experiment {name!r}{suggestion(name, names())}")
        return cls(name=name, **read_toml(FOLDER / f"{name}.toml"))

    def narrowed(
        self, runs: Sequence[str] | None = None, steps: int | None = None, seeds: Sequence[int] | None = None
    ) -> Experiment:
        """Return the same experiment with some of its runs alone, other steps and seeds."""
        for name in runs or ():
            if name not in self.runs:
                raise InputError(f"--runs must be of {', '.join(self.runs)}, got {name!r}")
        kept = {name: run for name, run in self.runs.items() if runs is None or name in runs}
        training = {**self.shared.get("training", {}), **({} if steps is None else {"steps": steps})}
        return replace(self, runs=kept, shared={**self.shared, "training": training}, seeds=seeds or self.seeds)

    def settings(self, run: str, seed: int, source: str) -> RunSettings:
        """Return the settings of one training."""
        settings = TASKS[self.task].settings()
        settings.use_preset(self.preset)
        for sections in (self.shared, self.runs[run], {"data": {"source": source}, "training": {"seed": seed}}):
            for section, values in sections.items():
                settings.update(section, values)
        make_absolute(settings)
        return settings


class PlannedRun(NamedTuple):
    """One training of an experiment: where it goes, and with which settings."""

    path: Path
    settings: RunSettings

    def state(self) -> str:
        """Return what is there: "new" (nothing), "begun", or "done"; InputError: it is a run with other settings."""
        if not RunFolder(self.path).config.exists():
            return "new"
        _, there = open_run(self.path, trained=False)
        present = there.values()
        for name, value in self.settings.values().items():
            if present.get(name) != value:
                raise InputError(
                    f"{self.path}: holds a run with {name} {present.get(name)!r}, and the experiment has {value!r}; "
                    "choose another folder with --out"
                )
        try:
            done = open_evaluated(self.path).evaluation.finished and (self.path / "report.md").exists()
        except InputError:  # not evaluated, or before it was trained further, or by an older version
            done = False
        return "done" if done else "begun"


def names() -> list[str]:
    """Return the names of all experiments."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def listing() -> str:
    """Return every experiment by its name, with what it needs, and an example; for the end of the help."""
    lines = ["experiments:"]
    for experiment in map(Experiment.load, names()):
        lines += [f"  {experiment.name}: {experiment.title}", f"      SOURCE: {experiment.source}"]
    return "\n".join([*lines, "", "example: cdt-fast reproduce video clip.mp4 --seeds 0 --out runs/clip"])


def plan(experiment: Experiment, source: str, out: str | os.PathLike[str]) -> list[PlannedRun]:
    """Return the trainings of an experiment, all seeds of a run one after the other."""
    return [
        PlannedRun(Path(out) / f"{run}-{seed}", experiment.settings(run, seed, source))
        for run in experiment.runs
        for seed in dict.fromkeys(experiment.seeds)
    ]
