"""What `cdt-fast train` offers for each task: its examples, and an option for each setting."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.training.config import CONFIGS, SECTIONS, RunConfig


@dataclass(frozen=True)
class ShownTask:
    """How `train` shows a task."""

    name: str
    text: str
    examples: tuple[str, ...]


TASKS = (
    ShownTask(
        "video",
        "train a denoiser on video, then evaluate it on held-out frames",
        ("clip.mp4 --out runs/mine", "clip.mp4 --out runs/plain --no-constrained", "--resume runs/mine"),
    ),
    ShownTask(
        "text",
        "train a classifier of texts or of pairs of texts, then evaluate it on held-out ones under perturbation",
        (
            "aclImdb --out runs/imdb",
            "reviews.tsv --text-column Text --label-column Sentiment --max-tokens 128",
            "MNLI --model path/to/encoder --gamma 1 --epochs 2 --out runs/nli",
            "--resume runs/imdb",
        ),
    ),
    ShownTask(
        "lm",
        "train a language model on instructions with answers, then evaluate it on held-out ones",
        (
            "alpaca_data.json --out runs/small",
            "alpaca_data.json --model path/to/llama --lora-rank 16 --taps 0,8,16,24,32 --inner-fraction 0.125",
            "--resume runs/small",
        ),
    ),
)


def add_settings(command: argparse.ArgumentParser, task: ShownTask) -> None:
    """Add what `train` takes for a task: SOURCE, where to write, and its settings, a group a section."""
    call = f"cdt-fast train {task.name}"
    command.epilog = "\n".join(["examples:", *(f"  {call} {example}" for example in task.examples)])
    command.usage = f"{call} [SOURCE] [--out RUN] [--config FILE] [SETTINGS]"
    config = CONFIGS[task.name]()
    source = next(entry for entry in fields(config.data) if entry.name == "source")
    default = "" if config.data.source is None else f" ({config.data.source})"
    command.add_argument("source", nargs="?", metavar="SOURCE", help=source.metadata["help"] + default)
    command.add_argument("--out", metavar="RUN", help="new run folder (runs/SOURCE-constrained or -unconstrained)")
    command.add_argument("--config", metavar="FILE", help="settings as TOML, such as the config.toml of a run")
    command.add_argument("--resume", metavar="RUN", help="continue a run from its last checkpoint; takes no settings")
    for section in SECTIONS:
        group = command.add_argument_group(f"[{section}]")
        settings = getattr(config, section)
        hints = typing.get_type_hints(type(settings))
        for entry in fields(settings):
            if entry.name != "source":
                _add_setting(group, section, entry, hints[entry.name], getattr(settings, entry.name))


def _add_setting(group: Any, section: str, entry: Any, annotation: Any, default: Any) -> None:
    name = f"--{entry.name.replace('_', '-')}"
    destination = f"{section}.{entry.name}"
    text = entry.metadata["help"]
    if annotation in (bool, bool | None):
        shown = {True: " (yes)", False: " (no)"}.get(default, "")
        group.add_argument(name, dest=destination, action=argparse.BooleanOptionalAction, help=text + shown)
        return
    shown = "" if default is None else f" ({','.join(map(str, default)) if isinstance(default, list) else default})"
    choices = entry.metadata["choices"]
    metavar = "{" + ",".join(choices) + "}" if choices else "VALUE"
    group.add_argument(name, dest=destination, metavar=metavar, help=(text + shown).replace("%", "%%"))


def check_effect(config: RunConfig, given: Iterable[str]) -> None:
    """Refuse settings of [model] on the command line that the chosen network does not have: its help names whose it is.

    Args:
        config: all settings.
        given: the names of those of [model] that the command line names.

    Raises:
        InputError: one of them would have no effect.
    """
    own = {"text": "text-ut", "lm": "llama-small"}.get(config.task)
    kind = own if config.model.model == own else "encoder"
    metadata = {entry.name: entry.metadata for entry in fields(config.model)}
    for name in given:
        owner, colon, _ = metadata[name]["help"].partition(": ")
        if colon and own is not None and owner in (own, "encoder") and owner != kind:
            whose = "a pretrained encoder" if owner == "encoder" else owner
            raise InputError(
                f"--{name.replace('_', '-')} is a setting of {whose}, and the model is {config.model.model}"
            )
