"""The command line, `cdt-fast`."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cdt_fast.cli_settings import TASKS, add_settings, check_effect
from cdt_fast.errors import InputError, MissingExtra, printable
from cdt_fast.files import write_json
from cdt_fast.training.config import CONFIGS, SECTIONS, RunConfig
from cdt_fast.training.memory import is_out_of_memory, memory_hint

BAD_INPUT = 2


class _Terminated(BaseException):
    """SIGTERM: like KeyboardInterrupt, so that what is half done is cleaned up on the way out."""


class _Parser(argparse.ArgumentParser):
    """A parser that keeps the layout of the examples and answers a wrong call in one line.

    Attributes:
        ending: what the help ends with, where it has to be read from files first.
    """

    ending: Callable[[], str] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # No abbreviations: --warm would be one setting today and another one tomorrow.
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(*arguments, formatter_class=layout, allow_abbrev=False, **options)

    def format_help(self) -> str:
        if self.ending is not None:
            self.epilog = self.ending()
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Answered here and not by the parser above, which knows neither the command nor its options.
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for option in self._option_string_actions if option.startswith("--")]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            self.error(f"unknown argument: {unknown[0]}{f'; did you mean {close[0]}?' if close else ''}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Bad input is one line on stderr and status 2."""
    options = argparse.Namespace(hint="", memory_hint="")
    try:
        options = _parser().parse_args(arguments)
        with _terminated_by_exception():
            return options.run(options)
    except (InputError, MissingExtra) as error:
        message = str(error)
    except BrokenPipeError:
        # Whoever read the output has seen enough, as `head` does; nothing more can be written there, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        message = where + ("the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = f"out of memory{options.memory_hint}"
    except (KeyboardInterrupt, _Terminated) as stop:
        number = signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT
        print(f"cdt-fast: stopped by {number.name}{options.hint}", file=sys.stderr)
        return 128 + number
    print("cdt-fast: " + printable(" ".join(message.split())), file=sys.stderr)
    return BAD_INPUT


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cdt-fast",
        description="Train transformers whose every layer lowers the loss.",
        epilog="example: cdt-fast train video clip.mp4 --out runs/mine",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")
    _add_train(commands)

    command = _command(commands, "evaluate", _evaluate, "measure a run on its held-out data, and write its report")
    command.epilog = "example: cdt-fast evaluate runs/mine --gammas 0.1,0.5,1.0 --json mine.json"
    command.add_argument("folder", metavar="RUN", help="run folder")
    command.add_argument("--gammas", metavar="LIST", help="noise levels, in place of those of the run's settings")
    _add_json(command)

    command = _command(commands, "compare", _compare, "set runs side by side: tables, and a report with pictures")
    command.epilog = "example: cdt-fast compare runs/constrained runs/unconstrained --out comparison"
    command.add_argument("folders", nargs="+", metavar="RUN", help="run folders, evaluated on the same data")
    command.add_argument("--out", default="comparison", metavar="DIR", help="folder of the report (comparison)")
    _add_json(command)

    command = _command(commands, "denoise", _denoise, "denoise a video with a trained run")
    command.epilog = "example: cdt-fast denoise runs/mine noisy.mp4 clean.mp4 --depth 3"
    command.add_argument("folder", metavar="RUN", help="run folder")
    command.add_argument("source", metavar="IN", help="video file, frame folder or .npy")
    command.add_argument(
        "target", metavar="OUT", help="video file to write, same size and frame rate: .mp4, .mov, .mkv or .avi"
    )
    command.add_argument("--depth", type=int, metavar="K", help="leave after K layers (default: all)")
    command.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    _add_json(command)

    data = _command(commands, "data", None, "fetch or check data")
    data.epilog = "example: cdt-fast data check clips/"
    actions = data.add_subparsers(dest="action", required=True, parser_class=_Parser, metavar="ACTION")
    command = _command(actions, "fetch", _fetch, "download a public data set, with checksum and resume")
    command.epilog = "example: cdt-fast data fetch ucsd --to datasets"
    command.add_argument("name", metavar="NAME", help="avenue, ucsd or shanghaitech")
    command.add_argument("--to", default="datasets", metavar="DIR", help="folder to unpack into (datasets)")
    command = _command(actions, "check", _check, "say what a source holds, by decoding all of it")
    command.epilog = "example: cdt-fast data check 'Avenue Dataset' --json avenue.json"
    command.add_argument("source", metavar="SOURCE", help="video file, frame folder, .npy, or a tree of them")
    _add_json(command)

    _add_reproduce(commands)
    _add_bench(commands)

    command = _command(commands, "info", _info, "say what is installed, which device is used, and why")
    command.epilog = "example: cdt-fast info --json info.json"
    _add_json(command)
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> _Parser:
    command: _Parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    # What to add when a signal ends the command, and when memory does.
    command.set_defaults(run=run, hint="", memory_hint="")
    return command


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="also write what was measured as JSON")


def _add_bench(commands: Any) -> None:
    from cdt_fast.bench.arguments import add_arguments

    command = _command(commands, "bench", _bench, "measure ops and training steps against other ways to do the same")
    command.epilog = "example: cdt-fast bench --suite step quality --repeats 9 --out benchmarks"
    add_arguments(command)


def _add_train(commands: Any) -> None:
    train = _command(commands, "train", None, "train a network")
    train.epilog = "example: cdt-fast train video clip.mp4 --out runs/mine"
    tasks = train.add_subparsers(dest="task", required=True, parser_class=_Parser, metavar="TASK")
    for task in TASKS:
        add_settings(_command(tasks, task.name, _train, task.text), task)


def _add_reproduce(commands: Any) -> None:
    text = "train the runs of an experiment by its name, and compare them"
    command = _command(commands, "reproduce", _reproduce, text)
    command.description = "Train the runs of an experiment and compare them. Called again, it goes on where it stopped."
    command.ending = _experiments
    command.add_argument("name", metavar="NAME", help="which experiment")
    command.add_argument("source", metavar="SOURCE", help="where its data are")
    command.add_argument("--model", metavar="MODEL", help="folder or hub name, where the experiment needs one")
    command.add_argument("--seeds", metavar="LIST", help="seeds of each run, as in 0,1,2 (the experiment's)")
    command.add_argument("--out", metavar="DIR", help="folder of the runs and of their comparison (runs/NAME)")
    _add_json(command)


def _experiments() -> str:
    from cdt_fast import experiments

    example = "cdt-fast reproduce video clip.mp4 --seeds 0 --out runs/clip"
    return f"experiments:\n{experiments.listing()}\n\nexample: {example}"


def _reproduce(options: argparse.Namespace) -> int:
    from cdt_fast import experiments
    from cdt_fast.training import launch
    from cdt_fast.training.config import converted
    from cdt_fast.training.run_folder import RunFolder

    again = "the same command"
    launch.check_single_process("reproduce trains one run after the other; launch each with cdt-fast train")
    experiment = experiments.Experiment.load(options.name)
    seeds = None if options.seeds is None else converted("--seeds", options.seeds, list[int], None)
    out = Path(options.out or Path("runs") / experiment.name)
    planned = experiments.plan(experiment, options.source, options.model, seeds, out)
    for run in planned:
        _make_absolute(run.config)
    states = [run.state() for run in planned]
    # Before there is a folder, as in _train.
    importlib.import_module("cdt_fast.training.loop")
    for number, (run, state) in enumerate(zip(planned, states, strict=True), 1):
        done = " is done" if state == "done" else ", which was begun" if state == "begun" else ""
        print(f"run {number} of {len(planned)}: {run.path}{done}", file=sys.stderr)
        if state == "done":
            continue
        folder = RunFolder(run.path) if state == "begun" else RunFolder.create(run.path, run.config)
        status = _train_and_evaluate(options, folder, run.config, state == "begun", again, again)
        if status:
            return status
    options.folders, options.out = [str(run.path) for run in planned], str(out / "comparison")
    return _compare(options)


def _train(options: argparse.Namespace) -> int:
    given: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in vars(options).items():
        section, dot, key = name.partition(".")
        if dot and value is not None:
            given[section][key] = value
    if options.source is not None:
        given["data"]["source"] = options.source
    from cdt_fast.training import launch
    from cdt_fast.training.run_folder import RunFolder

    if options.resume is not None:
        if options.config or options.out or any(given.values()):
            raise InputError("--resume takes no other settings: a run goes on as it began")
        run, config = RunFolder.open(options.resume, trained=False)
        if config.task != options.task:
            raise InputError(f"{options.resume}: resume it with cdt-fast train {config.task} --resume")
    else:
        config = CONFIGS[options.task].load(options.config) if options.config else CONFIGS[options.task]()
        for section, values in given.items():
            config.update(section, values)
        check_effect(config, given["model"])
        _make_absolute(config)
        # Imported before there is a folder: it takes a while, and a signal meanwhile must leave no empty run behind.
        importlib.import_module("cdt_fast.training.loop")
        run = launch.create_run(options.out, config)
    resume = options.resume is not None
    folder = shlex.quote(str(run.path))
    go_on, measure = f"cdt-fast train {config.task} --resume {folder}", f"cdt-fast evaluate {folder}"
    return _train_and_evaluate(options, run, config, resume, go_on, measure)


def _train_and_evaluate(
    options: argparse.Namespace, run: Any, config: RunConfig, resume: bool, go_on: str, measure: str
) -> int:
    """The exit status; a signal is answered by what goes on with the training, or measures what was trained."""
    from cdt_fast.training import launch, loop

    options.memory_hint = memory_hint(config)
    try:
        loop.train(run, config, resume=resume)
    except loop.Interrupted as stop:
        print(f"cdt-fast: {stop}; continue with: {go_on}", file=sys.stderr)
        return 128 + stop.signal_number
    except BaseException:
        if not resume:
            run.remove_if_untouched()
        raise
    options.hint = f"; the training is done, measure it with: {measure}"
    return _evaluate_run(run, config) if launch.is_first_process() else 0


def _make_absolute(config: RunConfig) -> None:
    """The paths of the settings from the root, so that the run can be evaluated from any folder."""
    if config.data.source is None:
        raise InputError(f"SOURCE is missing: cdt-fast train {config.task} SOURCE")
    if config.data.source != "demo" or config.task != "video":
        config.data.source = str(Path(config.data.source).resolve())
    for name in ("model", "embedding"):
        given = getattr(config.model, name, None)
        if given is not None and Path(given).is_dir() and config.task != "video":
            setattr(config.model, name, str(Path(given).resolve()))


def _evaluate(options: argparse.Namespace) -> int:
    from cdt_fast.training.run_folder import RunFolder

    run, config = RunFolder.open(options.folder)
    if options.gammas is not None:
        config.set("evaluation", "gammas", options.gammas)
    options.memory_hint = memory_hint(config)
    return _evaluate_run(run, config, options.json)


def _evaluate_run(run: Any, config: RunConfig, json_file: str | None = None) -> int:
    from cdt_fast.training import report
    from cdt_fast.training.results import EvaluatedRun
    from cdt_fast.video.evaluation import evaluate_run

    evaluation = evaluate_run(run, config)
    write_json(run.evaluation, evaluation)
    if json_file is not None:
        write_json(json_file, evaluation)
    if evaluation["trained_steps"] < evaluation["steps"]:
        steps = f"step {evaluation['trained_steps']} of {evaluation['steps']}"
        print(f"cdt-fast: note: the training of {run.path} is not finished, this is {steps}", file=sys.stderr)
    measured = EvaluatedRun(run, config, evaluation)
    _print_tables([measured])
    print(evaluation["report"]["text"])
    try:
        path = report.write_report(run.path, [measured], f"cdt-fast evaluate {shlex.quote(str(run.path))}")
    except MissingExtra as error:
        print(f"no report.md: {error}")
    else:
        print(f"report: {path}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from cdt_fast.training import report
    from cdt_fast.training.results import EvaluatedRun, check_comparable

    runs = EvaluatedRun.open_all(options.folders)
    check_comparable(runs)
    _print_tables(runs)
    for run in runs:
        print(f"{run.label}: {run.evaluation['report']['text']}")
    if options.json is not None:
        write_json(options.json, {run.label: run.evaluation for run in runs})
    command = shlex.join(["cdt-fast", "compare", *options.folders, "--out", options.out])
    print(f"report: {report.write_report(options.out, runs, command)}")
    return 0


def _print_tables(runs: list[Any]) -> None:
    from cdt_fast.tables import as_text
    from cdt_fast.training import report

    for table in report.tables(runs):
        print("\n" + as_text(table))
    print()


def _denoise(options: argparse.Namespace) -> int:
    from cdt_fast.training.building import load_model
    from cdt_fast.training.run_folder import RunFolder
    from cdt_fast.video.denoising import denoise_video

    run, config = RunFolder.open(options.folder)
    written = denoise_video(
        load_model(run, config),
        config,
        options.source,
        options.target,
        depth=options.depth,
        overwrite=options.overwrite,
    )
    if options.json is not None:
        write_json(options.json, written)
    print(
        f"{options.target}: {written['frames']} frames, {written['width']}x{written['height']}, "
        f"{written['frame_rate']:.4g} a second, {written['depth']} of {config.model.layers} layers"
    )
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from cdt_fast.fetch import fetch

    print(fetch(options.name, options.to))
    return 0


def _check(options: argparse.Namespace) -> int:
    from cdt_fast.video.data import check, describe_check

    found = check(options.source)
    if options.json is not None:
        write_json(options.json, found)
    print(describe_check(found))
    return 0 if not found.get("problems") else 1


def _bench(options: argparse.Namespace) -> int:
    from cdt_fast.bench.run import run_command

    return run_command(options)


def _info(options: argparse.Namespace) -> int:
    from cdt_fast.info import collect

    found = collect()
    if options.json is not None:
        write_json(options.json, found)
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name.ljust(width)}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
