"""The settings of a run, one class a section of `config.toml`: what all tasks share, and how they are read and written.

The fields of a section, with their types, bounds and descriptions, define the TOML file, the command line and its help.
"""

import math
import os
import re
import types
import typing
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from cdt_fast.checks import InputError, suggestion
from cdt_fast.constraints import presets
from cdt_fast.constraints.presets import DEFAULTS, PAPER_ROWS, options_of
from cdt_fast.files import read_toml, shown, write_text

Positive = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Sections = Mapping[str, Mapping[str, Any]]  # values by section and name
Bounds = Annotated[dict[int, float | str], Field(min_length=1)]
NoiseLevels = NonNegative | list[NonNegative]  # one level, or LOW and HIGH of a range
# Beyond a million times the signal, squares leave float32.
Levels = Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=1)]

# The warm-up of a training without constraints: they only weigh the depths by the objective, and judge the result.
_NEVER = 2**62
SECTIONS = ("data", "model", "constraints", "training", "evaluation")


def setting(default: Any, description: str) -> Any:
    """Define a field of a section; the help shows the description."""
    return Field(default, description=description)


class Section(BaseModel):
    """One section. None is written as the word "none", in TOML and on the command line."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _from_words(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert words of the command line and of TOML: "none", numbers separated by commas, bounds by depth."""
        kinds = kinds_of(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and bool not in kinds:
            raise ValueError("must not be true or false")
        if not isinstance(value, str):
            return value
        if value == "none" and type(None) in kinds:
            return None
        words = value.split(",")
        if dict in kinds:
            pairs = [word.partition("=") for word in words]
            if not all(equals for _, equals, _ in pairs):
                raise ValueError("must be values by depth, as in 12=1.01x,3=0.9")
            bounds = {depth.strip().lstrip("0") or "0": _number_or_word(bound) for depth, _, bound in pairs}
            if len(bounds) < len(pairs):
                raise ValueError("must name a depth once")
            return bounds
        numbers = all(isinstance(_number_or_word(word), float) for word in words)
        return words if list in kinds and numbers and (len(words) > 1 or not kinds & {int, float}) else value


def kinds_of(annotation: Any) -> set[Any]:
    """Return the types that a field accepts, without bounds and contents: list and NoneType of `list[float] | None`."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return kinds_of(parts[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(kinds_of, parts))
    return {origin or annotation}


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.strip()


class ConstraintSettings(Section):
    """[constraints]: the bounds on the layers' losses, and how their multipliers move."""

    constrained: bool = setting(True, "train with descent constraints")
    objective: presets.ObjectiveName | None = setting(
        None, "what is minimized over the depths (default: last; for a denoiser of video with constraints log)"
    )
    rate: float | list[float] | None = setting(
        DEFAULTS.rate, "alpha, one number or one a layer: the share of the loss a layer removes; 'none': no descent"
    )
    reference: float | Literal["auto"] | None = setting(
        DEFAULTS.reference, "epsilon_0, bound of the loss at depth 0: a number, 'auto' or 'none'"
    )
    reference_mode: presets.ReferenceMode = setting(DEFAULTS.reference_mode, "how the reference enters")
    coupling: presets.Coupling = setting(DEFAULTS.coupling, "what bounds a layer's loss")
    bounds: Bounds | None = setting(
        DEFAULTS.bounds,
        "largest losses of chosen depths, as in 12=1.01x,3=0.9; with an x a factor of the loss after the warm-up",
    )
    normalize: bool = setting(DEFAULTS.normalize, "dual steps on relative violations")
    margin: NonNegative = setting(
        DEFAULTS.margin, "share by which bounds are lowered in training, so that held-out losses meet them"
    )
    dual_lr: float | None = setting(
        DEFAULTS.dual_lr, "step size of the multipliers (default: 0.002 with adam and the objective last, else 0.05)"
    )
    betas: list[float] | None = setting(
        list(DEFAULTS.betas or ()),
        "decay of the two moments of Adam, which moves the multipliers; 'none': gradient ascent",
    )
    resilience: presets.Resilience | None = setting(
        DEFAULTS.resilience, "what gives way when bounds cannot be met; 'none': nothing"
    )
    slack_cost: float = setting(DEFAULTS.slack_cost, "cost of squared slack: the larger, the harder the constraints")
    warmup_epochs: Count = setting(1, "epochs with the constraints off at the start")


class TrainingSettings(Section):
    """[training]: what all tasks share of the loop and its optimizer; each task adds `batch` and `lr`."""

    accumulate: Positive = setting(1, "micro-batches per optimizer step")
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "learning rate over the run")
    precision: Literal["auto", "bf16", "fp32", "ieee"] = setting(
        "auto",
        "matrix products: bf16 with float32 masters, fp32 (TF32 on a GPU) or ieee; auto: bf16 on a GPU, and on "
        "a CPU that has them for video and texts, else fp32",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where to compute")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(0, "seed of data order and noise")
    validate_every: Positive | None = setting(
        None,
        "optimizer steps between validations, each with a checkpoint (as many as see twice the validation's samples, "
        "50 or more)",
    )


class EvaluationSettings(Section):
    """[evaluation]: what is measured at the end."""

    gammas: Levels = setting([0.25 * step for step in range(9)], "noise levels of the evaluation, ascending")
    limit: Positive | None = setting(None, "test samples that are measured, for a trial (all)")


class RunSettings(BaseModel):
    """All settings of a run; a task has a subclass with its own sections and their defaults."""

    model_config = ConfigDict(extra="forbid")

    task: ClassVar[str]
    networks: ClassVar[tuple[str, ...]]  # values of [model] model that are networks of this package, and no folders
    preset: str | None = None  # what the settings started from instead of the defaults alone
    data: Any = Field(default_factory=Section)
    model: Any = Field(default_factory=Section)
    constraints: ConstraintSettings = Field(default_factory=ConstraintSettings)
    training: Any = Field(default_factory=TrainingSettings)
    evaluation: Any = Field(default_factory=EvaluationSettings)

    @property
    def noise(self) -> tuple[float, float]:
        """Return the training's least and greatest noise level; InputError: gamma is neither a level nor a range."""
        gamma = self.data.gamma
        if not isinstance(gamma, list):
            return gamma, gamma
        if len(gamma) != 2 or gamma[0] >= gamma[1]:
            raise InputError(f"[data] gamma must be one level, or LOW,HIGH with LOW below HIGH, got {gamma}")
        return gamma[0], gamma[1]

    @property
    def shown_noise(self) -> str:
        """Return the noise levels of the training, in words."""
        least, greatest = self.noise
        return f"{least:g}" if least == greatest else f"{least:g} to {greatest:g}"

    @property
    def constrained(self) -> bool:
        """Return whether the run trains under descent constraints."""
        return self.constraints.constrained

    @property
    def objective(self) -> presets.ObjectiveName:
        """Return what the run minimizes: without constraints the last loss alone, unless the settings name another."""
        if self.constraints.objective is not None:
            return self.constraints.objective
        return DEFAULTS.objective if self.constrained else "last"

    @property
    def coefficients(self) -> list[float] | None:
        """Return the weights of the depths in the objective; None: ones."""
        return None

    def steps_per_epoch(self, samples: int) -> int:
        """Return the optimizer steps that see each of `samples` once; the last may see fewer than the others."""
        return math.ceil(samples / (self.training.batch * self.training.accumulate))

    def validation_interval(self, samples: int) -> int:
        """Return the optimizer steps between validations of so many samples. Without a setting training sees twice as
        many in between: a validation, of forwards alone, then adds a sixth to its time."""
        return self.training.validate_every or max(50, 2 * self.steps_per_epoch(samples))

    def warmup_steps(self, samples: int) -> int:
        """Return the optimizer steps with the constraints off: all, if the run has no constraints."""
        return self.constraints.warmup_epochs * self.steps_per_epoch(samples) if self.constrained else _NEVER

    def check_noise(self) -> None:
        """Refuse noise levels that make no sense in their unit, or that the network cannot train at."""
        gammas = self.evaluation.gammas
        if any(first >= second for first, second in pairwise(gammas)):
            raise InputError(f"[evaluation] gammas must be ascending noise levels, got {gammas}")

    def needs(self) -> list[tuple[bool, str, str]]:
        """List what settings need to have an effect: whether it holds, what it is, and the names of the settings."""
        chosen = self.constraints
        names = " ".join(name for name in type(chosen).model_fields if name not in ("constrained", "objective"))
        either = chosen.rate is not None or chosen.reference_mode == "constraint"
        return [
            (chosen.rate is not None, "rate is other than none", "coupling"),
            (either, "rate is other than none or reference_mode is constraint", "reference margin"),
            (chosen.constrained, "constrained is true", names),
        ]

    def idle(self) -> dict[str, str]:
        """Return the settings that have no effect, by name, with what they need."""
        return {name: words for holds, words, names in self.needs() if not holds for name in names.split()}

    def values(self) -> dict[str, Any]:
        """Return all values by section and name, as in "[data] window"."""
        parts = ((section, vars(getattr(self, section))) for section in SECTIONS)
        return {f"[{section}] {name}": value for section, values in parts for name, value in values.items()}

    def set(self, section: str, name: str, value: Any) -> None:
        """Set one value; InputError: the section or name is unknown, or the value breaks its field's type or bounds."""
        settings = getattr(self, section, None)
        if not isinstance(settings, Section):
            raise InputError(f"unknown section [{section}]{suggestion(section, SECTIONS)}")
        if name not in type(settings).model_fields:
            raise InputError(f"unknown key '{name}' in [{section}]{suggestion(name, type(settings).model_fields)}")
        try:
            setattr(settings, name, value)
        except ValidationError as error:
            problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors(include_url=False)]
            words = re.sub("(Input|List|Dictionary) should", "must", " or ".join(dict.fromkeys(problems)))
            raise InputError(f"[{section}] {name} {words}, got {shown(value)}") from None

    def update(self, section: str, values: Mapping[str, Any]) -> None:
        """Set several values of a section."""
        for name, value in values.items():
            self.set(section, name, value)

    def use_preset(self, name: str | None) -> None:
        """Set all that a preset, or a row of the paper, names; InputError: there is none, or it is of another task."""
        if name is None:
            return
        options, row = options_of(name), PAPER_ROWS.get(name)
        if row is not None and row.task != self.task:
            raise InputError(f"--preset {name} is of cdt-fast train {row.task}, and this is train {self.task}")
        if name == self.task:  # whose default is another objective without constraints
            options["objective"] = None
        known = type(self.constraints).model_fields
        self.update("constraints", {option: value for option, value in options.items() if option in known})
        for section, values in ({} if row is None else row.settings).items():
            self.update(section, values)
        self.preset = name

    @classmethod
    def chosen(cls, given: Sections, preset: str | None = None, file: str | os.PathLike[str] | None = None) -> Self:
        """Return the settings of a new run: the defaults, over them a preset (in place of the file's), over that a TOML
        file, which may be for runs of several kinds, then what is given. InputError: as `load` and `set`; a given
        setting has no effect."""
        sections: dict[str, Any] = {} if file is None else read_toml(file)
        settings = cls()
        settings.use_preset(preset)
        try:
            if sections.pop("task", cls.task) != cls.task:
                raise InputError(f'task must be "{cls.task}"')
            in_file = sections.pop("preset", None)
            settings.use_preset(in_file if preset is None else None)
            for section, values in sections.items():
                if not isinstance(values, dict):
                    raise InputError(f"unknown key '{section}' outside of a section")
                settings.update(section, values)
            whole = all(vars(getattr(settings, name)).keys() <= {*sections.get(name, ())} for name in SECTIONS)
            if whole and preset not in (None, in_file):
                raise InputError(f"sets all settings, as a run's does, and --preset {preset} then none; leave one out")
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        for section, values in given.items():
            settings.update(section, values)
        needed = PAPER_ROWS[settings.preset].pretrained if settings.preset in PAPER_ROWS else ""
        if needed and needed not in {*sections.get("model", ()), *given.get("model", ())}:
            raise InputError(f"--preset {settings.preset} needs --{needed}, the folder of a pretrained network")
        idle = settings.idle()
        for section, names in given.items():
            for name in names:
                if name in idle and getattr(getattr(settings, section), name) is not None:
                    raise InputError(f"[{section}] {name} has no effect unless {idle[name]}")
        return settings

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as TOML, None as the word "none"."""
        document: dict[str, Any] = {"task": self.task}
        if self.preset is not None:
            document["preset"] = self.preset
        for section in SECTIONS:
            values = getattr(self, section).model_dump(mode="json")  # keys are words
            document[section] = {name: "none" if value is None else value for name, value in values.items()}
        write_text(path, tomli_w.dumps(document))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read settings from TOML, over its preset and the defaults; InputError: as `set`, or it cannot be read."""
        return cls.chosen({}, file=path)
