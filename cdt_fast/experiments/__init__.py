"""Experiments by name, a TOML file each: several trainings, which `cdt-fast reproduce` sets side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cdt_fast.checks import InputError, suggestion
from cdt_fast.constraints.presets import PAPER_ROWS
from cdt_fast.files import read_toml
from cdt_fast.tasks import TASKS, make_absolute, open_evaluated, open_run
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings, Sections

FOLDER = Path(__file__).parent


class Cell(NamedTuple):
    """A cell of the paper's tables: all runs of the experiment at one depth and one training noise."""

    seeds: Sequence[int]
    layers: int | None = None  # None: as the settings say
    gamma: float | None = None
    paper: Mapping[str, float] = {}  # the paper's figures by the names of the runs

    @property
    def name(self) -> str:
        """Return the words before those of a run in the names of folders."""
        words = {"layers": self.layers, "gamma": self.gamma}
        return "-".join(f"{name}-{value:g}" for name, value in words.items() if value is not None)


@dataclass(frozen=True)
class Experiment:
    """The contents of an experiment's file."""

    name: str  # that of the file
    title: str
    source: str  # what SOURCE has to be
    task: str
    cells: Sequence[Cell]
    runs: Mapping[str, Mapping[str, Any]]  # what is different in each run, by section; maybe constraints by a preset
    shared: Sections = field(default_factory=dict)  # settings of all runs, by section
    preset: str | None = None  # what the settings of all runs start from in place of the defaults
    pretrained: str = ""  # the setting of [model] that --model sets: the folder of a network, or of its embeddings
    sizes: Mapping[str, int] = field(default_factory=dict)  # of the whole data set, as its `sizes` names them

    @classmethod
    def load(cls, name: str) -> Experiment:
        """Read the experiment of this name, or raise InputError: there is none."""
        if name not in names():
            raise InputError(f"there is no experiment {name!r}{suggestion(name, names())}")
        contents = read_toml(FOLDER / f"{name}.toml")
        return cls(name=name, cells=[Cell(**cell) for cell in contents.pop("cells")], **contents)

    def narrowed(
        self,
        runs: Sequence[str] | None = None,
        steps: int | None = None,
        seeds: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        gammas: Sequence[float] | None = None,
        model: str | None = None,
        limit: int | None = None,
    ) -> Experiment:
        """Return the same experiment with some of its runs and cells alone, and other settings."""
        for name in runs or ():
            if name not in self.runs:
                raise InputError(f"--runs must be of {', '.join(self.runs)}, got {name!r}")
        kept = {name: run for name, run in self.runs.items() if runs is None or name in runs}
        cells: Sequence[Cell] = self.cells
        for option, attribute, chosen in (("--layers", "layers", layers), ("--gammas", "gamma", gammas)):
            for value in chosen or ():
                known = [there for cell in cells if (there := getattr(cell, attribute)) is not None]
                if not known:
                    raise InputError(f"{option}: {self.name} has none to choose from, got {value:g}")
                if value not in known:
                    raise InputError(f"{option} must be of {', '.join(map(str, dict.fromkeys(known)))}, got {value}")
            cells = [cell for cell in cells if chosen is None or getattr(cell, attribute) in chosen]
        cells = [cell._replace(seeds=list(dict.fromkeys(seeds or cell.seeds))) for cell in cells]
        training = {**self.shared.get("training", {}), **({} if steps is None else {"steps": steps})}
        network = dict(self.shared.get("model", {}))
        if model is not None:
            if not self.pretrained:
                raise InputError(f"--model: {self.name} takes no pretrained network")
            network[self.pretrained] = model
        elif self.preset in PAPER_ROWS and PAPER_ROWS[self.preset].pretrained:
            raise InputError(f"--model is missing, the folder of the network that {self.name} trains")
        evaluation = {**self.shared.get("evaluation", {}), "limit": limit}
        shared = {**self.shared, "model": network, "training": training, "evaluation": evaluation}
        return replace(self, runs=kept, cells=cells, shared=shared)

    def settings(self, run: str, cell: Cell, seed: int, source: str) -> RunSettings:
        """Return the settings of one training."""
        settings = TASKS[self.task].settings()
        settings.use_preset(self.preset)
        own: dict[str, dict[str, Any]] = {"data": {"source": source}, "model": {}, "training": {"seed": seed}}
        for section, name in (("model", "layers"), ("data", "gamma")):
            if (value := getattr(cell, name)) is not None:
                own[section][name] = value
        other = dict(self.runs[run])
        settings.use_preset(other.pop("preset", None))
        for sections in (self.shared, other, own):
            for section, values in sections.items():
                settings.update(section, values)
        make_absolute(settings)
        return settings


class PlannedRun(NamedTuple):
    """One training of an experiment: where it goes, and with which settings."""

    path: Path
    settings: RunSettings
    run: str
    cell: Cell

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
            measured, wanted = open_evaluated(self.path).evaluation, self.settings.evaluation
            done = measured.finished and (measured.gamma, measured.limit) == (wanted.gammas, wanted.limit)
            done = done and (self.path / "report.html").exists()
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
        known = [f"{cell.name}: {' / '.join(map(str, cell.paper.values()))}" for cell in experiment.cells if cell.paper]
        lines += [f"      constrained / plain in the paper: {'; '.join(known)}"] * bool(known)
    times = "A run takes 4 to 10 minutes on Ped2, 10 to 45 on IMDb, of a core with bfloat16; a forecast comes first."
    return "\n".join([*lines, "", times, "", "example: cdt-fast reproduce video clip.mp4 --seeds 0 --out runs/clip"])


def plan(experiment: Experiment, source: str, out: str | os.PathLike[str]) -> list[PlannedRun]:
    """Return the trainings of an experiment, cell by cell, the runs of a seed one after the other."""
    return [
        PlannedRun(
            Path(out) / "-".join(filter(None, (cell.name, run, str(seed)))),
            experiment.settings(run, cell, seed, source),
            run,
            cell,
        )
        for cell in experiment.cells
        for seed in cell.seeds
        for run in experiment.runs
    ]
