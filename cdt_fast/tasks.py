"""The table of the tasks, and runs opened by the task that their settings name."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cdt_fast.checks import InputError
from cdt_fast.files import read_json, read_toml, shown
from cdt_fast.sequence.settings import LanguageSettings, TextSettings
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from cdt_fast.video.settings import VideoSettings

if TYPE_CHECKING:
    from cdt_fast.training.task import EvaluatedRun, Task


class TaskEntry(NamedTuple):
    """A task as the command line shows it, before its module is imported."""

    settings: type[RunSettings]
    text: str  # what `train` does in it
    examples: tuple[str, ...]  # of what may follow `cdt-fast train NAME`
    module: str  # a `training.task.Task`


TASKS = {
    "video": TaskEntry(
        VideoSettings,
        "train a denoiser on video, then evaluate it on held-out frames",
        ("clip.mp4 --out runs/mine", "clip.mp4 --out runs/plain --no-constrained", "--resume runs/mine"),
        "cdt_fast.video.task",
    ),
    "text": TaskEntry(
        TextSettings,
        "train a classifier of texts or of pairs of texts, then evaluate it on held-out ones under perturbation",
        (
            "reviews.tsv --text-column Text --label-column Sentiment --max-tokens 128",
            "MNLI --model path/to/encoder --gamma 1 --epochs 2 --out runs/nli",
        ),
        "cdt_fast.sequence.text",
    ),
    "lm": TaskEntry(
        LanguageSettings,
        "train a language model on instructions with answers, then evaluate it on held-out ones",
        (
            "alpaca_data.json --model path/to/llama --out runs/lm",
            "alpaca_data.json --model path/to/llama --taps 0,8,16,24,32",
        ),
        "cdt_fast.sequence.language",
    ),
}


def task_of(settings: RunSettings) -> Task:
    """Return the module of the task of these settings, with all that it imports."""
    module: Any = importlib.import_module(TASKS[settings.task].module)
    return module


def open_run(path: str | os.PathLike[str], *, trained: bool = True) -> tuple[RunFolder, Any]:
    """Open a run and its settings; InputError: it is no run, cannot be read or, where `trained`, has no model yet."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise InputError(f"{path}: is no run folder (it has no config.toml)")
    name = str(read_toml(folder.config).get("task", "video"))
    if name not in TASKS:
        raise InputError(f"{folder.config}: task must be one of {', '.join(TASKS)}, got {name!r}")
    settings = TASKS[name].settings.load(folder.config)
    if trained:
        folder.require_model()
    return folder, settings


def make_absolute(settings: RunSettings) -> None:
    """Make the paths in the settings absolute, for evaluations from any folder; InputError: there is no source."""
    source = settings.data.source
    if source is None:
        raise InputError(f"SOURCE is missing: cdt-fast train {settings.task} SOURCE")
    if (settings.task, source) != ("video", "demo"):  # which is generated
        settings.data.source = str(Path(source).resolve())
    for name in ("model", "embedding", "pretrained"):
        value = getattr(settings.model, name, None)
        if value is not None and value not in settings.networks and Path(value).is_dir():
            setattr(settings.model, name, str(Path(value).resolve()))


def open_evaluated(path: str | os.PathLike[str]) -> EvaluatedRun:
    """Open a run that has been evaluated since it was last trained, or InputError: it has not."""
    from cdt_fast.training.checkpoint import saved_step
    from cdt_fast.training.task import EvaluatedRun

    folder, settings = open_run(path)
    remedy = f"run `cdt-fast evaluate {shlex.quote(str(folder.path))}`"
    task = task_of(settings)
    try:
        evaluation = read_json(folder.evaluation, task.Evaluation)
    except InputError as error:
        raise InputError(f"{path}: has not been evaluated by this version; {remedy} ({error})") from None
    trained = saved_step(folder.checkpoint)  # not the last that was logged, which a killed training has lost
    if trained > evaluation.trained_steps:
        raise InputError(
            f"{path}: was evaluated after step {evaluation.trained_steps} and trained to step {trained} since; {remedy}"
        )
    return EvaluatedRun(folder, settings, task, evaluation)


def check_comparable(runs: Sequence[EvaluatedRun]) -> None:
    """Raise InputError where runs differ in their data, in the noise they were trained and measured at, or in
    `Report.must_agree`."""
    reference: dict[str, Any] = {}
    for run in runs:
        own = {name: getattr(run.evaluation, name) for name in ("task", "source", "gamma", "training_gamma")}
        own |= run.task.report([run]).must_agree
        reference = reference or own
        for name, value in own.items():
            if value != reference.get(name):
                remedy = "; `cdt-fast evaluate RUN` measures a run anew, at the levels of its settings or of --gammas"
                raise InputError(
                    f"{run.folder.path} and {runs[0].folder.path} were evaluated on different data: {name} is "
                    f"{shown(value)} and {shown(reference.get(name))}{remedy * (name == 'gamma')}"
                )
