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
from cdt_fast.training.settings import SECTIONS, RunSettings

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Experiment:
    """What an experiment's file says."""

    name: str  # that of the file
    title: str
    source: str  # what SOURCE has to be
    task: str
    seeds: Sequence[int]
    runs: Mapping[str, Mapping[str, Mapping[str, Any]]]  # what is different in each run, by section
    shared: Mapping[str, Mapping[str, Any]]  # settings of all runs, by section
    preset: str | None = None  # what the settings of all runs start from in place of the defaults
    model: str = ""  # what MODEL has to be, or "" where the experiment brings its own

    @classmethod
    def load(cls, name: str) -> Experiment:
        """The experiment of this name, or InputError: there is none."""
        if name not in names():
            raise InputError(f"there is no experiment {name!r}{suggestion(name, names())}")
        return cls(name=name, **read_toml(FOLDER / f"{name}.toml"))

    def narrowed(
        self, runs: Sequence[str] | None = None, steps: int | None = None, seeds: Sequence[int] | None = None
    ) -> Experiment:
        """The same experiment with some of its runs alone, other steps and seeds."""
        for name in runs or ():
            if name not in self.runs:
                raise InputError(f"--runs must be of {', '.join(self.runs)}, got {name!r}")
        kept = {name: run for name, run in self.runs.items() if runs is None or name in runs}
        shared = dict(self.shared)
        if steps is not None:
            shared["training"] = {**shared.get("training", {}), "steps": steps}
        return replace(self, runs=kept, shared=shared, seeds=seeds or self.seeds)

    def settings(self, run: str, seed: int, source: str, model: str | None) -> RunSettings:
        """The settings of one training; a model, where given, in place of the experiment's own."""
        settings = TASKS[self.task].settings()
        if self.preset is not None:
            settings.use_preset(self.preset)
        own = {"data": {"source": source}, "training": {"seed": seed}, "model": {}}
        if model is not None:
            own["model"]["model"] = model
        for sections in (self.shared, self.runs[run], own):
            for section, values in sections.items():
                settings.update(section, values)
        make_absolute(settings)
        return settings


class PlannedRun(NamedTuple):
    """One training of an experiment: where it goes, and with which settings."""

    path: Path
    settings: RunSettings

    def state(self) -> str:
        """What is there: "new" (nothing), "begun", or "done"; InputError: it is a run with other settings."""
        if not RunFolder(self.path).config.exists():
            return "new"
        _, there, _ = open_run(self.path, trained=False)
        for section in SECTIONS:
            present = vars(getattr(there, section))
            for name, value in vars(getattr(self.settings, section)).items():
                other = present[name]
                if other != value:
                    raise InputError(
                        f"{self.path}: holds a run with [{section}] {name} {other!r}, and the experiment has "
                        f"{value!r}; choose another folder with --out"
                    )
        try:
            evaluated = open_evaluated(self.path).evaluation.finished and (self.path / "report.md").exists()
            return "done" if evaluated else "begun"
        except InputError:
            return "begun"  # not evaluated, or before it was trained further, or by an older version


def names() -> list[str]:
    """Of all experiments."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def listing() -> str:
    """Every experiment by its name, with what it needs, and an example; for the end of the help."""
    lines = ["experiments:"]
    for experiment in map(Experiment.load, names()):
        needs = f"SOURCE: {experiment.source}" + (f"; --model: {experiment.model}" if experiment.model else "")
        lines += [f"  {experiment.name}: {experiment.title}", f"      {needs}"]
    return "\n".join([*lines, "", "example: cdt-fast reproduce video clip.mp4 --seeds 0 --out runs/clip"])


def plan(experiment: Experiment, source: str, model: str | None, out: str | os.PathLike[str]) -> list[PlannedRun]:
    """The trainings of an experiment, all seeds of a run one after the other; InputError: a model is missing or not
    wanted."""
    if bool(experiment.model) != (model is not None):
        needs = f"needs {experiment.model}" if experiment.model else "trains a network of its own"
        raise InputError(f"--model is {model!r}, and {experiment.name} {needs}")
    folder, planned = Path(out), []
    for run in experiment.runs:
        for seed in dict.fromkeys(experiment.seeds):
            planned.append(PlannedRun(folder / f"{run}-{seed}", experiment.settings(run, seed, source, model)))
    return planned
