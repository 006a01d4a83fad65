"""The parser of the command line: its commands, and an option for each setting of a task."""

import argparse
import difflib
import typing
from collections.abc import Callable
from typing import Any, NoReturn

import cdt_fast
from cdt_fast import experiments
from cdt_fast.bench import suites
from cdt_fast.cli import commands
from cdt_fast.constraints.presets import PAPER_ROWS, PRESETS
from cdt_fast.tasks import TASKS, TaskEntry
from cdt_fast.training.settings import SECTIONS, Section, kinds_of

# The settings that people change: `--help` shows these, `--help-all` the others too.
_USUAL = {
    *("gamma", "patch", "model", "layers", "code_size", "embedding", "taps", "max_tokens"),
    *("text_column", "label_column", "constrained", "rate", "objective", "steps", "epochs", "batch", "lr"),
    *("precision", "device", "seed", "gammas"),
}


class Parser(argparse.ArgumentParser):
    """A parser that keeps the layout of the examples and answers a wrong call in one line."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # No abbreviations: --warm would be one setting today and another one tomorrow.
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(*arguments, formatter_class=layout, allow_abbrev=False, **options)
        self.unusual: dict[argparse.Action, str] = {}  # the help of what only `--help-all` shows

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Answered here and not by the parser above, which knows neither the command nor its options.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for option in self._option_string_actions if option.startswith("--")]
            close = difflib.get_close_matches(unknown[0].partition("=")[0].replace("_", "-"), known, n=1)
            self.error(f"unknown argument: {unknown[0]}{f'; did you mean {close[0]}?' if close else ''}")
        for action in self._actions:  # "" as a path would be the current folder
            if vars(parsed).get(action.dest) == "" and "." not in action.dest:
                self.error(str(argparse.ArgumentError(action, "must not be empty")))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any, **__: Any) -> None:
        for action, text in parser.unusual.items():
            action.help = text
        parser.print_help()
        parser.exit()


def build_parser() -> Parser:
    """Return the parser of `cdt-fast`; `run` of what it parses is the command's function."""
    text, example = "Train transformers whose every layer lowers the loss.", "train video clip.mp4 --out runs/mine"
    parser = Parser(prog="cdt-fast", description=text, epilog=f"example: cdt-fast {example}")
    parser.add_argument("--version", action="version", version=f"cdt-fast {cdt_fast.__version__}")
    shown = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")

    train = _command(shown, "train", None, "train a network", "train video clip.mp4 --out runs/mine")
    tasks = train.add_subparsers(dest="task", required=True, parser_class=Parser, metavar="TASK")
    for name, task in TASKS.items():
        _add_settings(_command(tasks, name, commands.train, task.text), name, task)

    text = "measure a run on its held-out data, and write its report"
    add = _command(shown, "evaluate", commands.evaluate, text, "evaluate runs/mine --gammas 10,30,50").add_argument
    add("folder", nargs="?", metavar="RUN", help="run folder (with --clips: the denoiser of the package)")
    text = "noise levels in place of those of the run's settings; evaluation.json and the report are replaced"
    add("--gammas", metavar="LIST", help=text)
    add("--limit", metavar="N", help="measure no more than N test samples, for a trial")
    text = "measure a denoiser of video on these clean clips, beside other denoisers: PSNR, SSIM, time a frame"
    add("--clips", nargs="+", metavar="CLIP", help=text)
    text = "with --clips: page of the table and a picture (clips.html)"
    add("--out", metavar="FILE", help=text)

    text = "set runs side by side: tables, and a report with pictures"
    add = _command(shown, "compare", commands.compare, text, "compare runs/constrained runs/plain").add_argument
    add("folders", nargs="+", metavar="RUN", help="run folders, evaluated on the same data")
    add("--out", default="comparison", metavar="DIR", help="folder of the report (comparison)")

    text = "denoise a video"
    add = _command(shown, "denoise", commands.denoise, text, "denoise noisy.mp4 clean.mp4").add_argument
    add("source", metavar="IN", help="video file, frame folder or .npy")
    text = "video file to write, same size, times and sound: .mp4, .m4v, .mov or .mkv"
    add("target", metavar="OUT", help=text)
    text = "run folder, in place of the network that comes with the package"
    add("--run", dest="run_folder", metavar="RUN", help=text)
    add("--depth", type=int, metavar="K", help="leave after K layers (default: all)")
    text = "standard deviation of the noise, of each color by itself, in gray levels of 0..255; auto: estimated (auto)"
    add("--sigma", type=_level, default="auto", metavar="LEVEL", help=text)
    text = "only frames A up to (not including) B, without sound, for a look, as in 0:50"
    add("--frames", dest="part", type=_part, metavar="A:B", help=text)
    add("--overwrite", action="store_true", help="replace OUT if it exists")

    text = "show in three minutes, on one page: a video denoised, two networks trained, a step timed"
    add = _command(shown, "demo", commands.demo, text, "demo clip.mp4").add_argument
    add("clip", nargs="?", metavar="CLIP", help="clean video to add noise to and denoise (a generated scene)")
    add("--out", default="runs/demo", metavar="DIR", help="folder of the page (runs/demo)")

    text = "train the runs of an experiment by its name, and compare them; called again, it resumes where it stopped"
    command = _command(shown, "reproduce", commands.reproduce, text)
    command.epilog, add = experiments.listing(), command.add_argument
    add("name", metavar="NAME", help="which experiment")
    add("source", metavar="SOURCE", help="where its data are")
    whole = _list_of(int, "whole numbers, as in 3,7")
    add("--seeds", type=whole, metavar="LIST", help="seeds of each run, as in 0,1,2 (the experiment's)")
    add("--runs", type=lambda names: names.split(","), metavar="LIST", help="some of its runs by name (all)")
    add("--layers", type=whole, metavar="LIST", help="some of its depths, as in 3,7 (all)")
    levels = _list_of(float, "numbers, as in 0,0.15")
    add("--gammas", type=levels, metavar="LIST", help="some of its levels of training noise, as in 0.15 (all)")
    add("--steps", metavar="N", type=int, help="optimizer steps of a training (the experiment's)")
    add("--limit", metavar="N", type=int, help="test samples that a run is measured on, for a trial (all)")
    add("--model", metavar="DIR", help="pretrained network to train, or to take the word embeddings of a text UT from")
    add("--out", metavar="DIR", help="folder of the runs and of their comparison (runs/NAME-SOURCE)")

    text = "measure ops and training steps against other ways to do the same"
    add = _command(shown, "bench", commands.bench, text, "bench --suite step ops --repeats 9").add_argument
    add("--suite", nargs="+", choices=suites.NAMES, metavar="NAME", help=f"{', '.join(suites.NAMES)} (all)")
    add("--case", metavar="TEXT", help="only the cases whose name contains this (all)")
    add("--device", choices=("cpu", "cuda"), help="where to measure (cuda where there is a GPU)")
    add("--size", choices=suites.SIZES, help="shapes of the cases: toy, or for a CPU or GPU (the device's)")
    add("--repeats", type=int, metavar="N", help="timed rounds of a case (5 to 25, some 8 seconds)")
    add("--quick", action="store_true", help="a few cases in about two minutes, and one table")
    text = "folder of the results files; a run adds to them (benchmarks; with --quick none)"
    add("--out", metavar="DIR", help=text)

    text = "say what is installed, which device is used, and why"
    _command(shown, "info", commands.info, text, "info")
    return parser


def _list_of(kind: type, expected: str) -> Callable[[str], list[Any]]:
    def convert(words: str) -> list[Any]:
        try:
            return [kind(word) for word in words.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {expected}, got {words!r}") from None

    return convert


def _level(word: str) -> float | None:
    try:
        return None if word == "auto" else float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of gray levels, or auto, got {word!r}") from None


def _part(words: str) -> tuple[int, int]:
    first, colon, stop = words.partition(":")
    if not (colon and (first or "0").isdecimal() and stop.isdecimal() and int(first or "0") < int(stop)):
        expected = "the first frame and the one after the last, as in 0:50"
        raise argparse.ArgumentTypeError(f"must be {expected}, got {words!r}")
    return int(first or "0"), min(int(stop), 2**62)


def _command(shown: Any, name: str, run: Any, text: str, example: str = "") -> Parser:
    command: Parser = shown.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.epilog = f"example: cdt-fast {example}"
    command.set_defaults(run=run, again="the same command", hint="")
    return command


def _add_settings(command: Parser, name: str, task: TaskEntry) -> None:
    call = f"cdt-fast train {name}"
    command.epilog = "\n".join(["examples:", *(f"  {call} {example}" for example in task.examples)])
    command.usage = f"{call} [SOURCE] [--out RUN] [--preset NAME] [--config FILE] [SETTINGS]"
    settings = task.settings()
    source = type(settings.data).model_fields["source"]
    default = "" if settings.data.source is None else f" ({settings.data.source})"
    command.add_argument("data.source", nargs="?", metavar="SOURCE", help=f"{source.description}{default}")
    command.add_argument("--out", metavar="RUN", help="new run folder (runs/SOURCE-constrained or -unconstrained)")
    names = [preset for preset in PRESETS if preset not in PAPER_ROWS or PAPER_ROWS[preset].task == name]
    text = f"what the settings start from: constraints, or a whole row of the paper ({', '.join(names)})"
    command.add_argument("--preset", metavar="NAME", help=text)
    command.add_argument("--config", metavar="FILE", help="settings as TOML, such as the config.toml of a run")
    command.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all settings, and exit")
    command.add_argument("--resume", metavar="RUN", help="continue a run from its last checkpoint; takes no settings")
    for section in SECTIONS:
        group = command.add_argument_group(f"[{section}]")
        for setting in type(getattr(settings, section)).model_fields:
            if setting != "source":
                action = _add_setting(group, section, getattr(settings, section), setting)
                if setting not in _USUAL:
                    command.unusual[action], action.help = str(action.help), argparse.SUPPRESS


def _add_setting(group: Any, section: str, values: Section, name: str) -> argparse.Action:
    option, destination = f"--{name.replace('_', '-')}", f"{section}.{name}"
    field, default = type(values).model_fields[name], getattr(values, name)
    text = str(field.description).replace("%", "%%")
    if bool in kinds_of(field.annotation):
        text += {True: " (yes)", False: " (no)"}.get(default, "")
        return group.add_argument(option, dest=destination, action=argparse.BooleanOptionalAction, help=text)
    if default is not None:
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        text = f"{text.partition(' (default:')[0]} ({shown})"
    parts = typing.get_args(field.annotation)
    literals = [part for part in (field.annotation, *parts) if typing.get_origin(part) is typing.Literal]
    choices = [str(choice) for literal in literals for choice in typing.get_args(literal)]
    metavar = "{" + ",".join(dict.fromkeys(choices)) + "}" if len(choices) > 1 else "VALUE"
    return group.add_argument(option, dest=destination, metavar=metavar, help=text)
