"""Runs in tests: trained, evaluated and opened by the task that their settings are of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from cdt_fast.tasks import TASKS, task_of
from cdt_fast.training import evaluation, loop
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from cdt_fast.training.task import EvaluatedRun
from cdt_fast.video.settings import VideoSettings

Call = Callable[..., Any]  # the fixture that calls the command line
Config = Callable[..., VideoSettings]  # the fixture that makes tiny settings


def load_data(settings: RunSettings) -> Any:
    """Return what the settings name, without a bar."""
    return task_of(settings).load(settings, progress=False)


def settings_of(task: str, tiny: Mapping[str, Mapping[str, Any]], source: Path, /, **changes: Any) -> Any:
    """Return tiny settings of a task, some replaced, whatever their section."""
    config = TASKS[task].settings()
    for section, values in tiny.items():
        config.update(section, values)
    config.data.source = str(source)
    for name, value in changes.items():
        owner = next(part for part in tiny if hasattr(getattr(config, part), name))
        config.set(owner, name, value)
    return config


def new_trainer(run: RunFolder, settings: RunSettings, graphs: Any = None) -> loop.Trainer:
    """Return a trainer on the data of the settings."""
    return loop.Trainer(run, settings, task_of(settings), load_data(settings), graphs)


def train(run: RunFolder, settings: RunSettings, **options: Any) -> None:
    """`loop.train` in the task of the settings."""
    loop.train(run, settings, task_of(settings), **options)


def trained(settings: RunSettings, folder: Path) -> RunFolder:
    """Return a new run in `folder`, trained to its end."""
    run = RunFolder.create(folder, settings)
    train(run, settings, progress=False)
    return run


def evaluate_run(run: RunFolder, settings: RunSettings) -> EvaluatedRun:
    """`evaluation.evaluate_run` in the task of the settings."""
    return evaluation.evaluate_run(run, settings, task_of(settings))


def evaluated(run: RunFolder, settings: RunSettings) -> dict[str, Any]:
    """Return what `evaluation.json` holds of a run."""
    return evaluate_run(run, settings).evaluation.model_dump(mode="json")


def assert_same_runs(run: RunFolder, expected: RunFolder) -> None:
    """Require the same checkpoint, kept model and log, but for what tells the time, bit for bit, and nothing beside."""
    states = [flat(load_checkpoint(one.checkpoint)) for one in (run, expected)]
    assert states[0] == states[1]
    for path in sorted(expected.model.iterdir()):
        assert (run.model / path.name).read_bytes() == path.read_bytes(), path.name
    logs = [
        [{name: value for name, value in entry.items() if not name.endswith("_per_second")} for entry in one]
        for one in (run.read_metrics(), expected.read_metrics())
    ]
    assert logs[0] == logs[1]
    assert not [path for path in run.path.rglob(".*") if path.is_file()]


def flat(value: Any, *where: object) -> dict[Any, Any]:
    """Return every value in nested dictionaries and sequences by its place, with its type; tuples count as lists."""
    if isinstance(value, Tensor):
        return {where: (value.dtype, value.tolist())}
    if not isinstance(value, dict | list | tuple) or not value:
        return {where: (type(value), value)}
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: one for key, entry in entries for name, one in flat(entry, *where, key).items()}
