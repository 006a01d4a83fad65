"""The commands of the command line: each takes the parsed options and returns the exit status."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from cdt_fast import experiments, tasks
from cdt_fast.checks import check_integer
from cdt_fast.errors import InputError, MissingExtra
from cdt_fast.files import write_json, write_text
from cdt_fast.tables import as_markdown, as_text
from cdt_fast.tasks import TASKS, TaskEntry
from cdt_fast.training.memory import memory_hint
from cdt_fast.training.run_folder import RunFolder, RunInUse
from cdt_fast.training.settings import SECTIONS, RunSettings

# What computes is imported in the commands: torch takes seconds, for which help and a refusal need not wait.


def train(options: argparse.Namespace) -> int:
    """Train a run, new or resumed, and evaluate it."""
    given: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in vars(options).items():
        section, dot, key = name.partition(".")
        if dot and value is not None:
            given[section][key] = value
    if options.source is not None:
        given["data"]["source"] = options.source
    if options.resume is not None:
        if options.config or options.out or any(given.values()):
            raise InputError("--resume takes no other settings: a run resumes as it began")
        run, settings, entry = tasks.open_run(options.resume, trained=False)
        if settings.task != options.task:
            raise InputError(f"{options.resume}: resume it with cdt-fast train {settings.task} --resume")
    else:
        entry = TASKS[options.task]
        settings = entry.settings.load(options.config) if options.config else entry.settings()
        for section, values in given.items():
            settings.update(section, values)
        settings.check_owners(given["model"])
        tasks.make_absolute(settings)
        tasks.resolve_reference(settings)
        # Imported before there is a folder: it takes a while, and a signal meanwhile must leave no empty run behind.
        launch = importlib.import_module("cdt_fast.training.launch")
        importlib.import_module("cdt_fast.training.loop")
        run = launch.create_run(options.out, settings)
    folder = shlex.quote(str(run.path))
    resume, measure = f"cdt-fast train {settings.task} --resume {folder}", f"cdt-fast evaluate {folder}"
    return _train_and_evaluate(options, run, settings, entry, options.resume is not None, resume, measure)


def reproduce(options: argparse.Namespace) -> int:
    """Train what is left of an experiment, and compare its runs."""
    from cdt_fast.training import launch

    again = "the same command"
    launch.check_single_process("reproduce trains one run after the other; launch each with cdt-fast train")
    only = None if options.runs is None else options.runs.split(",")
    experiment = experiments.Experiment.load(options.name).narrowed(only, options.steps, options.baseline)
    seeds = None if options.seeds is None else experiments.parse_seeds(options.seeds)
    out = Path(options.out or Path("runs") / experiment.name)
    shown: set[Path] = set()
    while True:
        planned = experiments.plan(experiment, options.source, options.model, seeds, out)
        states = [run.state() for run in planned]  # all, so that a folder of another run is refused first
        # Before there is a folder, as in `train`.
        importlib.import_module("cdt_fast.training.loop")
        worked = False
        for number, run in enumerate(planned, 1):
            state = run.state()  # once more: other processes train as well
            if run.path in shown and state == "done":
                continue
            done = " is done" if state == "done" else ", which was begun" if state == "begun" else ""
            print(f"run {number} of {len(planned)}: {run.path}{done}", file=sys.stderr)
            shown.add(run.path)
            if state == "done":
                continue
            tasks.resolve_reference(run.settings)
            try:
                folder = RunFolder(run.path) if state == "begun" else RunFolder.create(run.path, run.settings)
                entry = TASKS[experiment.task]
                status = _train_and_evaluate(options, folder, run.settings, entry, state == "begun", again, again)
            except RunInUse as error:
                print(f"cdt-fast: {error}; the next one first", file=sys.stderr)
                continue
            worked = True
            if status:
                return status
        if states == ["done"] * len(states):
            break
        if not worked:
            time.sleep(_WAIT)  # for those that other processes train
    return _summarize(options, experiment, [run for run in planned if run.chosen], out)


_WAIT = 5.0  # seconds


def _summarize(
    options: argparse.Namespace, experiment: experiments.Experiment, runs: list[experiments.PlannedRun], out: Path
) -> int:
    """Compare the runs of each source, or of a study those of all sources with its baseline."""
    if not experiment.baseline:
        for folder in dict.fromkeys(run.path.parent for run in runs):
            options.folders = [str(run.path) for run in runs if run.path.parent == folder]
            options.out = str(folder / "comparison")
            compare(options)
        return 0
    from cdt_fast.experiments import study, study_report

    cells: dict[str, dict[str, list[Any]]] = {}
    for run in runs:
        evaluated = tasks.open_evaluated(run.path)
        cells.setdefault(Path(run.source).stem, {}).setdefault(run.run, []).append(evaluated)
    given = [(f"--{name}", getattr(options, name)) for name in ("runs", "baseline", "steps", "seeds")]
    words = [word for name, value in given if value is not None for word in (name, str(value))]
    command = shlex.join(["cdt-fast", "reproduce", experiment.name, *options.source, *words, "--out", str(out)])
    print(f"study: {study_report.write_study(out, experiment.title, cells, experiment.baseline, command)}")
    if options.json is not None:
        write_json(options.json, {"tables": study.tables(cells, experiment.baseline)})
    return 0


def search(options: argparse.Namespace) -> int:
    """Train trials of a run with other settings, and measure the best of them."""
    from cdt_fast.training import launch

    launch.check_single_process("search trains one trial after the other; launch each with cdt-fast train")
    check_integer("--trials", options.trials, 1)
    _, settings, entry = tasks.open_run(options.folder, trained=False)
    from cdt_fast.experiments import search as searching  # which computes, as what follows

    over = [searching.parse_searched(text, settings) for text in options.over]
    loop, status, trials = importlib.import_module("cdt_fast.training.loop"), 0, []

    def train(folder: RunFolder, chosen: RunSettings, begun: bool) -> None:
        nonlocal status
        options.memory_hint = memory_hint(chosen)
        try:
            loop.train(folder, chosen, entry.load(), resume=begun)
        except loop.Interrupted as stop:
            print(f"cdt-fast: {stop}; continue with: the same command", file=sys.stderr)
            status = 128 + stop.signal_number

    out = Path(options.out)
    for trial in searching.search(settings, over, options.trials, out, options.seed, train):
        trials.append(trial)
        values = ", ".join(f"{key} {value}" for key, value in trial.values.items())
        print(f"trial {len(trials)} of {options.trials}: {values}: {trial.loss:.5g}", file=sys.stderr)
    if status:
        return status
    table = searching.as_table(trials)
    print(as_text(table))
    write_text(out / "search.md", as_markdown(table) + "\n")
    if options.json is not None:
        write_json(options.json, {"table": table})
    best = RunFolder(searching.ranked(trials)[0].folder)
    print(f"\nthe best, {best.path}, on test data:")
    return _evaluate(best, tasks.open_run(best.path)[1], entry.load())


def list_experiments() -> str:
    """Every experiment and an example, for the end of the help."""
    example = "cdt-fast reproduce video clip.mp4 --seeds 0 --out runs/clip"
    return f"experiments:\n{experiments.listing()}\n\nexample: {example}"


def _train_and_evaluate(
    options: argparse.Namespace,
    run: RunFolder,
    settings: RunSettings,
    entry: TaskEntry,
    resumed: bool,
    resume: str,
    measure: str,
) -> int:
    """The exit status; a signal is answered by what resumes the training, or measures what was trained."""
    from cdt_fast.training import launch, loop

    options.memory_hint = memory_hint(settings)
    task = entry.load()
    try:
        loop.train(run, settings, task, resume=resumed)
    except loop.Interrupted as stop:
        print(f"cdt-fast: {stop}; continue with: {resume}", file=sys.stderr)
        return 128 + stop.signal_number
    except RunInUse:
        raise
    except BaseException:
        if not resumed:
            run.remove_if_untouched()
        raise
    options.hint = f"; the training is done, measure it with: {measure}"
    return _evaluate(run, settings, task) if launch.is_first_process() else 0


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate a run."""
    run, settings, entry = tasks.open_run(options.folder)
    if options.gammas is not None:
        settings.set("evaluation", "gammas", options.gammas)
    options.memory_hint = memory_hint(settings)
    if options.shifts and options.clips is None:
        raise InputError("--shifts needs --clips: the clips that are shifted")
    if options.clips is not None:
        return _beside_others(options, run, settings, entry.load())
    return _evaluate(run, settings, entry.load(), options.json)


def _beside_others(options: argparse.Namespace, run: RunFolder, settings: RunSettings, task: Any) -> int:
    from cdt_fast.tables import as_text

    if options.gammas is not None:
        raise InputError("--gammas and --clips cannot be given together: clips are measured at noise of 10 to 50")
    found = task.beside_others(run, settings, options.clips, shifts=options.shifts)
    if options.json is not None:
        write_json(options.json, found.values)
    print(as_text(found.table))
    return 0


def _evaluate(run: RunFolder, settings: RunSettings, task: Any, json_file: str | None = None) -> int:
    from cdt_fast.training import evaluation, report

    measured = evaluation.evaluate_run(run, settings, task)
    if json_file is not None:
        write_json(json_file, measured.evaluation.model_dump(mode="json"))
    _print_notes([measured])
    _print_tables([measured])
    print(report.judgment(measured, [measured]))
    try:
        path = report.write_report(run.path, [measured], f"cdt-fast evaluate {shlex.quote(str(run.path))}")
    except MissingExtra as error:
        print(f"no report.md: {error}")
    else:
        print(f"report: {path}")
    return 0


def compare(options: argparse.Namespace) -> int:
    """Set evaluated runs side by side."""
    runs = tasks.open_all(options.folders)
    tasks.check_comparable(runs)
    from cdt_fast.training import report

    _print_notes(runs)
    _print_tables(runs)
    for run in runs:
        print(f"{run.label}: {report.judgment(run, runs)}")
    if options.json is not None:
        write_json(options.json, {run.label: run.evaluation.model_dump(mode="json") for run in runs})
    command = shlex.join(["cdt-fast", "compare", *options.folders, "--out", options.out])
    print(f"report: {report.write_report(options.out, runs, command)}")
    return 0


def _print_notes(runs: list[Any]) -> None:
    from cdt_fast.training import report

    for note in report.unfinished(runs):
        print(f"cdt-fast: {note}", file=sys.stderr)


def _print_tables(runs: list[Any]) -> None:
    from cdt_fast.tables import as_text
    from cdt_fast.training import report

    for table in report.tables(runs):
        print("\n" + as_text(table))
    print()


def denoise(options: argparse.Namespace) -> int:
    """Denoise a video."""
    run, settings, entry = tasks.open_run(options.folder)
    written = entry.load().denoise(
        run,
        settings,
        options.source,
        options.target,
        depth=options.depth,
        budget=options.budget,
        sigma=_noise_level(options.sigma),
        grids=options.grids,
        overwrite=options.overwrite,
    )
    if options.json is not None:
        write_json(options.json, written)
    for note in written["notes"]:
        print(f"cdt-fast: note: {note}", file=sys.stderr)
    noise = "" if written["sigma"] is None else f", noise of {written['sigma']:.3g} gray levels"
    print(
        f"{options.target}: {written['frames']} frames, {written['width']}x{written['height']}, "
        f"{written['frame_rate']:.4g} a second, {written['depth']:.3g} of {written['layers']} layers{noise}"
    )
    return 0


def _noise_level(word: str) -> float | None:
    """What --sigma says; None for auto."""
    if word == "auto":
        return None
    try:
        return float(word)
    except ValueError:
        raise InputError(f"--sigma must be a number of gray levels, or auto, got {word!r}") from None


def fetch(options: argparse.Namespace) -> int:
    """Download a data set."""
    from cdt_fast import fetch

    print(fetch.fetch(options.name, options.to))
    return 0


def check(options: argparse.Namespace) -> int:
    """Decode all of a source."""
    from cdt_fast.video import data

    contents = data.check(options.source)
    if options.json is not None:
        write_json(options.json, contents)
    print(data.describe_check(contents))
    return 0 if not contents.get("problems") else 1


def bench(options: argparse.Namespace) -> int:
    """Run the bench."""
    from cdt_fast.bench.run import run_command

    return run_command(options)


def info(options: argparse.Namespace) -> int:
    """Say what is installed."""
    from cdt_fast.info import collect

    facts = collect()
    if options.json is not None:
        write_json(options.json, facts)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")
    return 0
