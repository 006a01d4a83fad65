"""The settings of a run: one dataclass a section of `config.toml`, from which the command line takes its options."""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import tomli_w

from cdt_fast.constraints.presets import options_of
from cdt_fast.errors import InputError
from cdt_fast.files import read_toml, write_text
from cdt_fast.sequence.settings import (
    LanguageConstraintSettings,
    LanguageDataSettings,
    LanguageModelSettings,
    LanguageTrainingSettings,
    TextConstraintSettings,
    TextDataSettings,
    TextEvaluationSettings,
    TextModelSettings,
    TextTrainingSettings,
)
from cdt_fast.training.settings import (
    ConstraintSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    TrainingSettings,
)


@dataclass
class RunConfig:
    """All settings of a run, a section each; of video, and in the subclasses of the other tasks.

    Which settings the sections `data`, `model` and `training` hold is the task's affair: see
    `cdt_fast.training.settings` and `cdt_fast.sequence.settings`.
    """

    data: Any = field(default_factory=DataSettings)
    model: Any = field(default_factory=ModelSettings)
    constraints: ConstraintSettings = field(default_factory=ConstraintSettings)
    training: Any = field(default_factory=TrainingSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    task: str = "video"

    def set(self, section: str, name: str, value: Any) -> None:
        """Set one value, checked against the type and the choices of its field.

        Raises:
            InputError: an unknown section or name, or a value of the wrong kind.
        """
        settings = getattr(self, section, None)
        if not is_dataclass(settings) or isinstance(settings, type):
            raise InputError(f"unknown section [{section}]{_suggest(section, SECTIONS)}")
        known = {entry.name: entry for entry in fields(settings)}
        if name not in known:
            raise InputError(f"unknown key '{name}' in [{section}]{_suggest(name, list(known))}")
        annotation = typing.get_type_hints(type(settings))[name]
        metadata = known[name].metadata
        value = converted(f"[{section}] {name}", value, annotation, metadata["choices"])
        numbers = value if isinstance(value, list) else [value]
        if not numbers:
            raise InputError(f"[{section}] {name} must hold at least one number, got []")
        if metadata["least"] is not None and any(
            number is not None and not number >= metadata["least"] for number in numbers
        ):
            raise InputError(f"[{section}] {name} must be at least {metadata['least']}, got {value!r}")
        setattr(settings, name, value)
        if name == "preset" and isinstance(value, str):
            for taken, preset_value in options_of(value).items():
                if taken in known:
                    setattr(settings, taken, list(preset_value) if isinstance(preset_value, tuple) else preset_value)

    def update(self, section: str, values: dict[str, Any]) -> None:
        """Set several values of a section; a preset first, so that what is given beside it wins."""
        for name in sorted(values, key=lambda name: name != "preset"):
            self.set(section, name, values[name])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as TOML, None as the word "none"."""
        document: dict[str, Any] = {"task": self.task}
        for section in SECTIONS:
            settings = getattr(self, section)
            values = {entry.name: getattr(settings, entry.name) for entry in fields(settings)}
            document[section] = {name: "none" if value is None else value for name, value in values.items()}
        write_text(path, tomli_w.dumps(document))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunConfig:
        """Read settings from TOML; what the file does not name keeps its default.

        Raises:
            InputError: the file cannot be read, or names something unknown or of the wrong kind.
        """
        document = read_toml(path)
        config = cls()
        if document.pop("task", config.task) != config.task:
            raise InputError(f'{path}: task must be "{config.task}"')
        try:
            for section, values in document.items():
                if not isinstance(values, dict):
                    raise InputError(f"unknown key '{section}' outside of a section")
                config.update(section, values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        return config


@dataclass
class TextConfig(RunConfig):
    """All settings of a run on labeled texts."""

    data: Any = field(default_factory=TextDataSettings)
    model: Any = field(default_factory=TextModelSettings)
    constraints: ConstraintSettings = field(default_factory=TextConstraintSettings)
    training: Any = field(default_factory=TextTrainingSettings)
    evaluation: EvaluationSettings = field(default_factory=TextEvaluationSettings)
    task: str = "text"


@dataclass
class LanguageConfig(RunConfig):
    """All settings of a run on instructions with answers."""

    data: Any = field(default_factory=LanguageDataSettings)
    model: Any = field(default_factory=LanguageModelSettings)
    constraints: ConstraintSettings = field(default_factory=LanguageConstraintSettings)
    training: Any = field(default_factory=LanguageTrainingSettings)
    evaluation: EvaluationSettings = field(default_factory=TextEvaluationSettings)
    task: str = "lm"


SECTIONS = ("data", "model", "constraints", "training", "evaluation")
CONFIGS: dict[str, type[RunConfig]] = {kind().task: kind for kind in (RunConfig, TextConfig, LanguageConfig)}


def load_config(path: str | os.PathLike[str]) -> RunConfig:
    """Read settings from TOML as those of the task that the file names (video where it names none).

    Raises:
        InputError: as `RunConfig.load`, or the task is unknown.
    """
    task = read_toml(path).get("task", "video")
    if task not in list(CONFIGS):
        raise InputError(f"{path}: task must be one of {', '.join(CONFIGS)}, got {task!r}")
    return CONFIGS[task].load(path)


def converted(name: str, value: Any, annotation: Any, choices: tuple[str, ...] | None) -> Any:
    """`value` (from TOML, or a word of the command line) as the type of a field.

    Raises:
        InputError: it is none of the types or not one of the choices.
    """
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if type(None) in options and (value is None or value == "none"):
        return None
    if choices is not None:
        if value in choices:
            return value
        raise InputError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    for option in options:
        try:
            return _as_type(value, option)
        except (KeyError, OverflowError, TypeError, ValueError):
            continue
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "'none'"}
    expected = " or ".join(words.get(option, "a list of numbers") for option in options)
    raise InputError(f"{name} must be {expected}, got {value!r}")


def _as_type(value: Any, option: Any) -> Any:
    if typing.get_origin(option) is list:
        return [
            _as_type(entry, typing.get_args(option)[0])
            for entry in (value.split(",") if isinstance(value, str) else value)
        ]
    if option is bool:
        words = {"true": True, "false": False}
        return value if isinstance(value, bool) else words[value]
    if isinstance(value, bool) or (option is int and isinstance(value, float)):
        raise TypeError
    if option is str and not isinstance(value, str):
        raise TypeError
    result = option(value)
    if isinstance(result, float) and not math.isfinite(result):
        raise ValueError
    return result


def _suggest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"
