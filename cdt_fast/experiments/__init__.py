"""Experiments by name, a TOML file each: several trainings, which `cdt-fast reproduce` sets side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.files import read_toml
from cdt_fast.tasks import TASKS, kept_losses, make_absolute, open_evaluated, open_run, resolve_reference
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import SECTIONS, RunSettings

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Experiment:
    """What an experiment's file says.

    With `learning_rates` each run takes, for each source, the best of them by validation with the first seed. The
    `reference_losses` of a run may be the name of another before it: its losses with the same seed.
    """

    name: str  # that of the file
    title: str
    source: str  # what SOURCE has to be
    task: str
    seeds: Sequence[int]
    runs: Mapping[str, Mapping[str, Mapping[str, Any]]]  # what is different in each run, by section
    shared: Mapping[str, Mapping[str, Any]]  # settings of all runs, by section
    preset: str | None = None  # what the settings of all runs start from in place of the defaults
    model: str = ""  # what MODEL has to be, or "" where the experiment brings its own
    learning_rates: Sequence[float] = ()
    baseline: str = ""  # the run that a study pairs the others with; "" where it is no study

    @classmethod
    def load(cls, name: str) -> Experiment:
        """The experiment of this name, or InputError: there is none."""
        if name not in names():
            raise InputError(f"NAME must be one of {', '.join(names())}, got {name!r}")
        return cls(name=name, **read_toml(FOLDER / f"{name}.toml"))

    def narrowed(
        self,
        runs: Sequence[str] | None = None,
        steps: int | None = None,
        baseline: str | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Experiment:
        """The same experiment with some of its runs and the baseline alone, other steps, another baseline and seeds."""
        for name in [*(runs or ()), *([] if baseline is None else [baseline])]:
            if name not in self.runs:
                raise InputError(f"--runs and --baseline must be of {', '.join(self.runs)}, got {name!r}")
        baseline = self.baseline if baseline is None else baseline
        kept = {name: run for name, run in self.runs.items() if runs is None or name in (*runs, baseline)}
        shared = dict(self.shared)
        if steps is not None:
            shared["training"] = {**shared.get("training", {}), "steps": steps}
        return replace(self, runs=kept, shared=shared, baseline=baseline, seeds=seeds or self.seeds)

    def settings(
        self, run: str, seed: int, source: str, model: str | None, learning_rate: float | None = None
    ) -> RunSettings:
        """The settings of one training; a model and a learning rate, where given, in place of the experiment's own."""
        settings = TASKS[self.task].settings()
        if self.preset is not None:
            settings.use_preset(self.preset)
        own = {"data": {"source": source}, "training": {"seed": seed}, "model": {}}
        if model is not None:
            own["model"]["model"] = model
        if learning_rate is not None:
            own["training"]["lr"] = learning_rate
        for sections in (self.shared, self.runs[run], own):
            for section, values in sections.items():
                settings.update(section, values)
        make_absolute(settings)
        return settings


@dataclass(frozen=True)
class PlannedRun:
    """One training of an experiment: where it goes, with which settings, and what it is a run of."""

    path: Path
    settings: RunSettings
    source: str
    run: str
    seed: int
    chosen: bool = True  # to be compared: False where another learning rate was better

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


def plan(
    experiment: Experiment, sources: Sequence[str], model: str | None, out: str | os.PathLike[str]
) -> list[PlannedRun]:
    """The trainings of an experiment, all seeds of a run one after the other.

    With a grid of learning rates, those of the first seed; and once they are done, of each run the other seeds at the
    best of them.

    With several sources each has a folder of its own in `out`, named after it.

    Raises:
        InputError: a model is missing or not wanted, or two sources have one name.
    """
    if bool(experiment.model) != (model is not None):
        needs = f"needs {experiment.model}" if experiment.model else "trains a network of its own"
        raise InputError(f"--model is {model!r}, and {experiment.name} {needs}")
    stems = [Path(source).stem for source in sources]
    if len(set(stems)) < len(stems):
        raise InputError(f"SOURCE: two of {', '.join(stems)} would have one folder for their runs; rename one")
    seeds = list(dict.fromkeys(experiment.seeds))
    planned = []
    for source, stem in zip(sources, stems, strict=True):
        folder = Path(out) if len(sources) == 1 else Path(out) / stem
        for run in experiment.runs:
            planned += _of_a_run(experiment, run, source, model, seeds, folder)
    return planned


def _of_a_run(
    experiment: Experiment, run: str, source: str, model: str | None, seeds: Sequence[int], folder: Path
) -> list[PlannedRun]:
    def cell(seed: int, rate: float | None) -> PlannedRun:
        name = f"{run}-{seed}" if rate is None else f"{run}-lr{rate:g}-{seed}"
        settings = experiment.settings(run, seed, source, model, rate)
        reference = settings.constraints.reference_losses
        if reference in experiment.runs:  # another run of this seed, trained before
            settings.constraints.reference_losses = str((folder / f"{reference}-{seed}").resolve())
            if RunFolder(folder / f"{reference}-{seed}").evaluation.exists():
                resolve_reference(settings)
        return PlannedRun(folder / name, settings, source, run, seed)

    if not experiment.learning_rates:
        return [cell(seed, None) for seed in seeds]
    tried = {rate: cell(seeds[0], rate) for rate in experiment.learning_rates}
    if any(tried[rate].state() != "done" for rate in tried):
        return list(tried.values())
    best = min(tried, key=lambda rate: kept_losses(RunFolder(tried[rate].path))[-1])
    others = [replace(tried[rate], chosen=False) for rate in tried if rate != best]
    return [tried[best], *(cell(seed, best) for seed in seeds[1:]), *others]
