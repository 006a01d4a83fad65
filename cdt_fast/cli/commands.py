"""The commands of the command line: each takes the parsed options, and may return an exit status other than 0."""

import argparse
import itertools
import os
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cdt_fast import experiments, page, tasks
from cdt_fast.checks import InputError, printable
from cdt_fast.tables import as_text
from cdt_fast.tasks import TASKS
from cdt_fast.training.interruption import Interrupted
from cdt_fast.training.run_folder import RunFolder, RunInUse
from cdt_fast.training.settings import SECTIONS, RunSettings

# What computes is imported in the commands: torch takes seconds, for which help and a refusal need not wait. `train`
# and `reproduce` import it before there is a folder: a signal meanwhile must leave no empty run behind.


def train(options: argparse.Namespace) -> None:
    """Train a run, new or resumed, and evaluate it."""
    given: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in vars(options).items():
        section, dot, key = name.partition(".")
        if dot and value is not None:
            given[section][key] = value
    if options.resume is not None:
        if options.config or options.preset or options.out or any(given.values()):
            raise InputError("--resume takes no other settings: a run resumes as it began")
        run, settings = tasks.open_run(options.resume, trained=False)
        if settings.task != options.task:
            raise InputError(f"{options.resume}: resume it with cdt-fast train {settings.task} --resume")
    else:
        settings = TASKS[options.task].settings.chosen(given, options.preset, options.config)
        tasks.make_absolute(settings)
        from cdt_fast.training import loop  # noqa: F401 - see above

        run = RunFolder.create(options.out or _free_folder(settings), settings)
    options.again = f"cdt-fast train {settings.task} --resume {shlex.quote(str(run.path))}"
    _train_and_evaluate(run, settings, resumed=options.resume is not None)


def _free_folder(settings: RunSettings) -> Path:
    name = f"{Path(settings.data.source).stem}-{'' if settings.constrained else 'un'}constrained"
    folders = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())


def reproduce(options: argparse.Namespace) -> None:
    """Train what is left of an experiment, and compare its runs."""
    from cdt_fast.experiments import running  # see above

    chosen = {name: getattr(options, name) for name in ("runs", "steps", "limit", "seeds", "layers", "gammas", "model")}
    experiment = experiments.Experiment.load(options.name).narrowed(**chosen)
    out = Path(options.out or Path("runs") / f"{experiment.name}-{Path(options.source).stem}")
    planned = experiments.plan(experiment, options.source, out)
    missing = [run for run in planned if run.state() != "done"]  # a folder of another run is refused here
    data = None
    if missing:
        minutes, data = running.forecast(experiment, missing)
        print(f"{len(missing)} of {len(planned)} runs to train: about {minutes:.0f} min", file=sys.stderr)
    for number, run in enumerate(planned, 1):
        with suppress(RunInUse):  # another process trains it
            if (state := run.state()) == "done":
                continue
            print(f"run {number} of {len(planned)}: {run.path}", file=sys.stderr)
            folder = RunFolder(run.path) if state == "begun" else RunFolder.create(run.path, run.settings)
            _train_and_evaluate(folder, run.settings, data, resumed=state == "begun")
    if left := [run for run in planned if run.state() != "done"]:
        names = ", ".join(run.path.name for run in left)
        print(f"left to another process, which then compares all: {names}; if there is none, call this again")
        return
    for cell in experiment.cells:
        folders = [str(run.path) for run in planned if run.cell == cell]
        compare(argparse.Namespace(folders=folders, out=str(out / "comparison" / cell.name)))
    table = running.results_table(experiment, planned)
    page.write_page(out / "results.html", experiment.title, [page.table(table), *running.picture(planned)])
    print(f"\n{as_text(table)}\n{out / 'results.html'}")


def _train_and_evaluate(run: RunFolder, settings: RunSettings, data: Any = None, *, resumed: bool) -> None:
    from cdt_fast.training import loop

    try:
        data = loop.train(run, settings, tasks.task_of(settings), data, resume=resumed)
    except (Interrupted, RunInUse):
        raise
    except BaseException:
        if not resumed:
            run.remove_if_untouched()
        raise
    with run.lock():
        _evaluate(run, settings, data)


def evaluate(options: argparse.Namespace) -> None:
    """Evaluate a run, or with --clips measure its denoiser on other clips beside others."""
    if options.clips is None:
        if options.folder is None:
            raise InputError("RUN is missing: cdt-fast evaluate RUN")
        if options.out is not None:
            raise InputError("--out is for --clips: the report of a run is in its folder")
        run, settings = tasks.open_run(options.folder)
        given = {name: getattr(options, name) for name in ("gammas", "limit") if getattr(options, name) is not None}
        settings.update("evaluation", given)
        settings.check_noise()
        _evaluate(run, settings, **given)
        return
    if options.gammas is not None or options.limit is not None:
        raise InputError("--gammas and --limit are for RUN alone: clips are measured whole, at noise of 10 to 50")
    out = options.out or "clips.html"
    if not out.lower().endswith((".html", ".htm")):
        raise InputError(f"--out must be the page to write, a .html file, got {out}")
    from cdt_fast.video import comparison
    from cdt_fast.video.denoising import open_denoiser

    words = [*filter(None, [options.folder]), "--clips", *options.clips, *(["--out", out] if options.out else [])]
    command = shlex.join(["cdt-fast", "evaluate", *words])
    found = comparison.compare_denoisers(*open_denoiser(options.folder)[:2], comparison.read_clips(options.clips))
    print(as_text(comparison.as_table(found)), flush=True)
    comparison.write_report(out, found, command)
    print(f"report: {out}")


def _evaluate(run: RunFolder, settings: RunSettings, data: Any = None, **given: str) -> None:
    from cdt_fast.training import evaluation

    measured = evaluation.evaluate_run(run, settings, tasks.task_of(settings), data)
    words = itertools.chain(("cdt-fast", "evaluate", str(run.path)), *((f"--{name}", given[name]) for name in given))
    _report([measured], run.in_place().path, shlex.join(words))


def compare(options: argparse.Namespace) -> None:
    """Set evaluated runs side by side."""
    out = RunFolder(options.out)
    if out.config.exists():
        raise InputError(f"--out {options.out}: is a run, whose own report.html would be replaced; give another folder")
    runs = [tasks.open_evaluated(path) for path in {os.path.realpath(path): path for path in options.folders}.values()]
    names = [run.folder.name for run in runs]
    if len(set(names)) < len(names):  # folders of one name are called by their paths
        runs = [replace(run, name=str(run.folder.path)) for run in runs]
    tasks.check_comparable(runs)
    words = ("cdt-fast", "compare", *(run.folder.path for run in runs), "--out", out.path)
    _report(runs, out.path, shlex.join(map(str, words)))


def _report(runs: list[Any], folder: Path, command: str) -> None:
    from cdt_fast.training import report

    written = report.write_report(folder, runs, command)
    print(f"\n{as_text(report.verdict_table(runs))}\n")
    print(*report.remarks(runs), f"report: {written}", sep="\n")


def denoise(options: argparse.Namespace) -> None:
    """Denoise a video."""
    from cdt_fast.video.denoising import denoise_video, open_denoiser

    model, settings, caution = open_denoiser(options.run_folder)
    chosen = {name: getattr(options, name) for name in ("depth", "sigma", "overwrite", "part")}
    begin = time.perf_counter()
    written = denoise_video(model, settings, options.source, options.target, caution=caution, **chosen)
    seconds = time.perf_counter() - begin
    for note in written["notes"]:
        print(f"cdt-fast: note: {printable(note)}", file=sys.stderr)
    noise = "" if written["sigma"] is None else f", noise of {written['sigma']:.3g} gray levels"
    print(
        f"{options.target}: {written['frames']} frames, {written['width']}x{written['height']}, "
        f"{written['frame_rate']:.4g} a second, {written['depth']} of {written['layers']} layers{noise}; "
        f"done in {seconds:.0f} s, {written['frames'] / seconds:.1f} frames a second"
    )


def demo(options: argparse.Namespace) -> None:
    """Show what the package is worth."""
    from cdt_fast import demo as shown

    shown.run(options.clip, Path(options.out))


def bench(options: argparse.Namespace) -> int:
    """Run the bench."""
    from cdt_fast.bench.run import run_command

    return run_command(options)


def info(options: argparse.Namespace) -> None:
    """Say what is installed."""
    from cdt_fast.info import collect

    facts = collect()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")
