"""The settings of a run: one dataclass a section of `config.toml`, from which the command line takes its options."""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import tomli_w

from cdt_fast.descent import PRESETS
from cdt_fast.errors import InputError
from cdt_fast.files import write_text

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # pyright: ignore[reportMissingImports]  # on 3.10 alone


def setting(default: Any, text: str, choices: tuple[str, ...] | None = None, least: float | None = None) -> Any:
    """A field with its help text, for words the ones allowed, and for numbers the least."""
    metadata = {"help": text, "choices": choices, "least": least}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DataSettings:
    """[data]: which frames, and how they become sequences of patches."""

    source: str = setting("demo", "video file, frame folder, .npy or a tree of them; 'demo' is a generated clip")
    window: int = setting(20, "T, frames of a window", least=1)
    stride: int | None = setting(None, "frames between training windows (default: window, no overlap)", least=1)
    size: int = setting(160, "side in pixels that frames are resized to, a multiple of patch", least=1)
    patch: int = setting(16, "side in pixels of a square patch", least=1)
    sequence: str = setting("time", "what one sequence runs over", ("time", "space", "spacetime"))
    gamma: float = setting(0.15, "training noise as a multiple of the standard deviation of the clean frames", least=0)


@dataclass
class ModelSettings:
    """[model]: the network."""

    model: str = setting("dust", "network", ("dust", "ut"))
    code_size: int = setting(1024, "m, atoms of a dictionary", least=1)
    layers: int = setting(5, "L", least=1)
    tied: bool | None = setting(None, "one dictionary for all layers (default: only when unconstrained)")
    sparsity: float = setting(0.2, "lambda_1; the threshold is lambda_1 * step ('ut' has none)", least=0)
    step: float | None = setting(None, "1/c (default: 1 / squared spectral norm of the initial dictionary)")
    scale: float = setting(1.0, "beta, factor of the attention scores")
    initial_codes: str = setting("analysis", "H_0: X D / c, or zero", ("analysis", "zero"))
    readout: str = setting("own", "dictionary that reads each depth", ("own", "next", "shared"))


@dataclass
class ConstraintSettings:
    """[constraints]: what every layer must achieve, and how the multipliers see to it."""

    constrained: bool = setting(True, "train with descent constraints")
    preset: str | None = setting(None, "take the settings below from a preset, before those given", tuple(PRESETS))
    rate: float | list[float] = setting(0.1, "alpha, one number or one a layer: the share of the loss a layer removes")
    reference: float | str | None = setting(
        "auto", "epsilon_0, bound of the loss at depth 0: a number, 'auto' or 'none'"
    )
    reference_mode: str = setting("constraint", "how the reference enters", ("constraint", "anchor"))
    coupling: str = setting("chain", "what bounds a layer's loss", ("chain", "detach", "absolute"))
    normalise: bool = setting(True, "dual steps on relative violations")
    margin: float = setting(
        0.1, "share by which bounds are lowered in training, so that held-out losses meet them", least=0
    )
    dual: str = setting("adam", "rule that moves the multipliers", ("ascent", "adam", "pi"))
    dual_lr: float = setting(0.05, "step size of the multipliers")
    betas: list[float] = setting([0.0, 0.9], "Adam's decay of the two moments of the dual gradient")
    proportional_gain: float = setting(0.2, "proportional gain of 'pi'")
    smoothing: float = setting(0.0, "decay of the average that the proportional part of 'pi' follows")
    resilience: str = setting("slack", "what gives way when bounds cannot be met", ("slack", "decay", "none"))
    slack_cost: float = setting(10.0, "cost of squared slack: the larger, the harder the constraints")
    slack_lr: float | None = setting(None, "step size of the slacks (default: 0.1 / slack_cost)")
    dual_every: int = setting(1, "optimiser steps a dual step", least=1)
    warmup_epochs: int = setting(1, "epochs with the constraints off at the start", least=0)


@dataclass
class TrainingSettings:
    """[training]: the primal side of the loop."""

    steps: int = setting(1000, "optimiser steps", least=1)
    batch: int = setting(4, "windows a micro-batch", least=1)
    accumulate: int = setting(1, "micro-batches an optimiser step", least=1)
    lr: float = setting(1e-3, "learning rate of Adam", least=0)
    schedule: str = setting("cosine", "learning rate over the run", ("cosine", "linear", "constant"))
    warmup_steps: int = setting(0, "steps over which the learning rate rises to lr", least=0)
    clip: float | None = setting(1.0, "largest gradient norm ('none' for no bound)", least=0)
    weight_decay: float = setting(0.0, "decoupled weight decay (AdamW)", least=0)
    precision: str = setting("fp32", "arithmetic of the matrix products", ("fp32", "tf32", "bf16"))
    device: str = setting("auto", "where to compute", ("auto", "cpu", "cuda"))
    cuda_graph: bool = setting(
        False, "launch a step as one CUDA graph, for a GPU that waits for the launches of small batches"
    )
    seed: int = setting(0, "seed of data order and noise", least=0)
    validate_every: int = setting(50, "optimiser steps between validations", least=1)
    checkpoint_every: int = setting(50, "optimiser steps between checkpoints", least=1)
    log_every: int = setting(10, "optimiser steps between lines of metrics.jsonl", least=1)
    tensorboard: bool = setting(False, "also write the metrics for TensorBoard")


@dataclass
class EvaluationSettings:
    """[evaluation]: the noise levels that are reported."""

    gammas: list[float] = setting([0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0], "noise levels of the evaluation", least=0)


@dataclass
class RunConfig:
    """All settings of a run, a section each."""

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    constraints: ConstraintSettings = field(default_factory=ConstraintSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
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
            for taken, preset_value in PRESETS[value].items():
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
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"{path}: cannot be read as TOML ({error})") from error
        config = cls()
        if document.pop("task", "video") != "video":
            raise InputError(f'{path}: task must be "video"')
        try:
            for section, values in document.items():
                if not isinstance(values, dict):
                    raise InputError(f"unknown key '{section}' outside of a section")
                config.update(section, values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        return config


SECTIONS = ("data", "model", "constraints", "training", "evaluation")


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
        return [_as_type(entry, float) for entry in (value.split(",") if isinstance(value, str) else value)]
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
