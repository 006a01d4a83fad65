"""The settings of a run, a section of `config.toml` each: what every task shares, and how they are read and written.

The types, bounds and descriptions of a section are what the TOML file, the command line and its help are made by.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from typing_extensions import Self

from cdt_fast.checks import suggestion
from cdt_fast.constraints import presets
from cdt_fast.constraints.presets import DEFAULTS, PAPER_ROWS, options_of
from cdt_fast.errors import InputError
from cdt_fast.files import read_toml, shown, write_text

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Sections = Mapping[str, Mapping[str, Any]]  # values by section and name
Bounds = Annotated[dict[int, float | str], Field(min_length=1)]
NoiseLevels = NonNegative | list[NonNegative]  # one level, or LOW and HIGH of a range
# Beyond a million times the signal squares leave float32.
Levels = Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=1)]

SECTIONS = ("data", "model", "constraints", "training", "evaluation")
_CONSTRAINED = "constrained=true"
ANY = "any value"
# Settings of earlier versions, each with the values at which it did nothing: a file that names such a value is read.
GONE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("coefficients", "reference_losses"), ("none",)),
    "step": ("none",),
    "initial_codes": ("analysis",),
    "readout": ("own",),
    "split": ("auto",),
    "checkpoint_every": (ANY,),
    "log_every": (ANY,),
    "rank_timeout": (ANY,),
    "cuda_graph": (ANY,),
    "warmup_steps": (0,),
    "weight_decay": (0.0,),
    "clip": (1.0,),
    "tensorboard": (True, False),
    "setup": ("denoiser",),
    "preset": ("none",),
    **dict.fromkeys(("agreement", "depth_schedule", "depth_rotation", "spectral_bound"), ("none",)),
    "generated": (0.5,),
    "perturbation": ("gaussian",),
    "perturbation_rate": (0.15,),
    **dict.fromkeys(("layer_dropout", "code_noise", "jacobian"), (0.0,)),
    "ratio": ("mean",),
    "tail": (0.1,),
    "proportional_gain": (0.2,),
    "smoothing": (0.0,),
    "gain_growth": (1.0,),
    "gain_limit": (10.0,),
    "barrier_width": (1.0,),
    "tighten_steps": (0,),
    "dual": ("adam",),
    "slack_lr": ("none",),
    "dual_every": (1,),
    "exit_scale": (1.0,),
    "prompts": (0,),
    "exit_agreements": ([],),
    "inner_kl": (0.0,),
}
_INSTEAD = {
    "setup": f"the paper's experiments are presets: --preset {', '.join(PAPER_ROWS)}",
    "dual": "betas = 'none' is gradient ascent",
    "preset": 'a preset stands before all sections of a file: preset = "…"',
}


def setting(default: Any, description: str, needs: str = "", unit_of: str = "") -> Any:
    """A field of a section, with its help.

    Args:
        default: its value where none is given.
        description: of the help.
        needs: where it has an effect, as in "model=dust,ut frames!=crops": all conditions on other settings hold.
        unit_of: the settings whose numbers are in a unit that this one chooses.
    """
    return Field(
        default, description=description, title=needs, json_schema_extra={"unit_of": unit_of}, validate_default=False
    )


def constraint(default: Any, description: str, needs: str = "") -> Any:
    """A `setting` that has an effect only with constraints."""
    return setting(default, description, f"{_CONSTRAINED} {needs}".strip())


def needs_shown(field: Any) -> str:
    """Where a setting has an effect, for the help; without what the heading of its section says."""
    return " ".join(condition for condition in field.title.split() if condition != _CONSTRAINED)


def gone(name: str) -> str:
    """What a refusal says about a setting of an earlier version."""
    return f"is gone: {_INSTEAD.get(name, 'the git tag full (commit 1178e39) is the last version that has it')}"


class Section(BaseModel):
    """One section. None is written as the word "none", which TOML and the command line share."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _from_words(cls, value: Any, info: ValidationInfo) -> Any:
        """Words of the command line and of TOML: "none", numbers parted by commas, and bounds by depth."""
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
            return {depth.strip(): _number_or_word(bound) for depth, _, bound in pairs}
        numbers = all(isinstance(_number_or_word(word), float) for word in words)
        if list in kinds and numbers and (len(words) > 1 or not kinds & {int, float}):
            return words
        return value


def kinds_of(annotation: Any) -> set[Any]:
    """What a field may hold, without bounds and contents: `list[float] | None` is a list or None."""
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
    """[constraints]: what every layer must achieve, and how the multipliers see to it."""

    constrained: bool = setting(True, "train with descent constraints")
    objective: presets.ObjectiveName | None = setting(
        None, "what is minimized over the depths (default: last; for a denoiser of video with constraints log)"
    )
    rate: float | list[float] | None = constraint(
        DEFAULTS.rate, "alpha, one number or one a layer: the share of the loss a layer removes; 'none': no descent"
    )
    reference: float | Literal["auto"] | None = constraint(
        DEFAULTS.reference, "epsilon_0, bound of the loss at depth 0: a number, 'auto' or 'none'"
    )
    reference_mode: presets.ReferenceMode = constraint(DEFAULTS.reference_mode, "how the reference enters")
    coupling: presets.Coupling = constraint(DEFAULTS.coupling, "what bounds a layer's loss", "rate!=none")
    bounds: Bounds | None = constraint(
        DEFAULTS.bounds,
        "largest losses of chosen depths, as in 12=1.01x,3=0.9; with an x a factor of the loss after the warm-up",
    )
    normalize: bool = constraint(DEFAULTS.normalize, "dual steps on relative violations")
    margin: NonNegative = constraint(
        DEFAULTS.margin, "share by which bounds are lowered in training, so that held-out losses meet them"
    )
    dual_lr: float | None = constraint(
        DEFAULTS.dual_lr, "step size of the multipliers (default: 0.002 with adam and the objective last, else 0.05)"
    )
    betas: list[float] | None = constraint(
        list(DEFAULTS.betas or ()),
        "decay of the two moments of Adam, which moves the multipliers; 'none': gradient ascent",
    )
    resilience: presets.Resilience | Literal["none"] = constraint(
        DEFAULTS.resilience or "none", "what gives way when bounds cannot be met"
    )
    slack_cost: float = constraint(DEFAULTS.slack_cost, "cost of squared slack: the larger, the harder the constraints")
    warmup_epochs: Count = constraint(1, "epochs with the constraints off at the start")


class TrainingSettings(Section):
    """[training]: the primal side of the loop, as far as it is that of every task; each adds `batch` and `lr`."""

    accumulate: Positive = setting(1, "micro-batches per optimizer step")
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "learning rate over the run")
    precision: Literal["auto", "bf16", "fp32", "ieee"] = setting(
        "auto",
        "matrix products: bf16 with float32 masters, fp32 (TF32 on a GPU) or ieee; auto: bf16 on a GPU, else fp32",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where to compute")
    seed: Count = setting(0, "seed of data order and noise")
    validate_every: Positive = setting(50, "optimizer steps between validations, each with a checkpoint")


class EvaluationSettings(Section):
    """[evaluation]: the noise levels that are reported."""

    gammas: Levels = setting([0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0], "noise levels of the evaluation")


class RunSettings(BaseModel):
    """All settings of a run, a section each; a task has a subclass with its own sections and their defaults.

    Attributes:
        preset: what the settings started from in place of the defaults alone.
    """

    model_config = ConfigDict(extra="forbid")

    task: ClassVar[str]
    preset: str | None = None
    data: Any = Field(default_factory=Section)
    model: Any = Field(default_factory=Section)
    constraints: ConstraintSettings = Field(default_factory=ConstraintSettings)
    training: Any = Field(default_factory=TrainingSettings)
    evaluation: Any = Field(default_factory=EvaluationSettings)

    @property
    def network(self) -> str:
        """Which of the task's networks the settings are for, as the owner of a setting names it."""
        return self.model.model

    @property
    def noise(self) -> tuple[float, float]:
        """The least and the greatest noise level of the training; InputError: gamma is neither a level nor a range."""
        gamma = self.data.gamma
        if not isinstance(gamma, list):
            return gamma, gamma
        if len(gamma) != 2 or gamma[0] >= gamma[1]:
            raise InputError(f"[data] gamma must be one level, or LOW,HIGH with LOW below HIGH, got {gamma}")
        return gamma[0], gamma[1]

    @property
    def shown_noise(self) -> str:
        """The noise levels of the training, in words."""
        least, greatest = self.noise
        return f"{least:g}" if least == greatest else f"{least:g} to {greatest:g}"

    @property
    def typical_noise(self) -> float:
        """The level in the middle of the training's."""
        return sum(self.noise) / 2

    @property
    def constrained(self) -> bool:
        """Whether the run trains under descent constraints."""
        return self.constraints.constrained

    @property
    def objective(self) -> presets.ObjectiveName:
        """What the run minimizes: without constraints the last loss alone, where nothing else is asked for."""
        if self.constraints.objective is not None:
            return self.constraints.objective
        return DEFAULTS.objective if self.constrained else "last"

    @property
    def coefficients(self) -> list[float] | None:
        """The weights of the depths in the objective; None: ones."""
        return None

    @property
    def untrained_depth(self) -> str:
        """Why nothing trains at depth 0, in words; empty where something does."""
        return ""

    def check_noise(self) -> None:
        """Refuse noise levels that no one can mean in their unit, or that the network cannot train at."""

    def set(self, section: str, name: str, value: Any) -> None:
        """Set one value, checked against the type and the bounds of its field.

        Raises:
            InputError: an unknown section or name, or a value of the wrong kind.
        """
        settings = getattr(self, section, None)
        if not isinstance(settings, Section):
            raise InputError(f"unknown section [{section}]{suggestion(section, SECTIONS)}")
        if name in GONE:
            raise InputError(f"[{section}] {name} {gone(name)}")
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

    def use_preset(self, name: str) -> None:
        """Set all that a preset names: the options of the constraints, and of a row of the paper all else of it.

        Raises:
            InputError: there is no such preset, or it is a row of another task.
        """
        options, row = options_of(name), PAPER_ROWS.get(name)
        if row is not None and row.task != self.task:
            raise InputError(f"--preset {name} is of cdt-fast train {row.task}, and this is train {self.task}")
        for taken, value in options.items():
            if taken == "objective" and name == self.task:  # whose default is another one without constraints
                self.constraints.objective = None
            elif taken in type(self.constraints).model_fields:
                given = list(value) if isinstance(value, tuple) else value
                self.set("constraints", taken, "none" if taken == "resilience" and given is None else given)
        for section, values in ({} if row is None else row.settings).items():
            self.update(section, values)
        self.preset = name

    @property
    def starting_point(self) -> Self:
        """What the settings were before any was given: the defaults, with the preset over them."""
        start = type(self)()
        if self.preset is not None:
            start.use_preset(self.preset)
        return start

    @classmethod
    def chosen(cls, given: Sections, preset: str | None = None, file: str | os.PathLike[str] | None = None) -> Self:
        """The settings of a new run: the defaults, over them a preset, over that a file, over all what is given.

        Of a file, which may be that of a run and name all, what differs from the defaults and the preset counts as
        given. It may be for runs with and without constraints: what has an effect in it, or beside the options, passes.

        Args:
            given: values by section.
            preset: one in place of that of the file.
            file: settings as TOML.

        Raises:
            InputError: as `load` and `set`; a preset or a setting that is given has no effect, or a number that is not
                would keep its value in another unit.
        """
        in_file, sections = (None, {}) if file is None else cls._read(file)
        settings = cls()
        with _naming(file if preset is None else None):
            if (name := in_file if preset is None else preset) is not None:
                settings.use_preset(name)
        start = settings.model_copy(deep=True)
        with _naming(file):
            settings._overlay(sections)
        if preset is not None and file is not None and settings == cls.load(file).model_copy(update={"preset": preset}):
            raise InputError(f"--preset {preset} has no effect: {file} names all that it sets")
        idle = [
            place
            for place in _places(sections)
            if _value(settings, place) != _value(start, place) and settings._unmet(place)
        ]
        settings._overlay(given)
        if preset not in (None, *PAPER_ROWS) and not settings.constrained:
            raise InputError(f"--preset {preset} is of constraints, and --no-constrained is to train without")
        needed = PAPER_ROWS[settings.preset].pretrained if settings.preset in PAPER_ROWS else ""
        if needed and ("model", needed) not in [*_places(sections), *_places(given)]:
            raise InputError(f"--preset {settings.preset} needs --{needed}, the folder of a pretrained network")
        for origin, places in ((file, idle), (None, _places(given))):
            with _naming(origin):
                for place in places:
                    if reason := settings._unmet(place):
                        raise InputError(reason)
        return settings

    def _overlay(self, sections: Sections) -> None:
        """Set values by section; InputError: one of them changes the unit of a number that is not among them."""
        before = self.model_copy(deep=True)
        for section, values in sections.items():
            self.update(section, values)
        named = _places(sections)
        for section, name in named:
            was, now = (_value(settings, (section, name)) for settings in (before, self))
            extra: Any = type(getattr(self, section)).model_fields[name].json_schema_extra
            stale = [
                f"{number} {shown(value)}"
                for number in extra["unit_of"].split()
                for part in SECTIONS
                if (part, number) not in named
                and isinstance(value := getattr(getattr(before, part), number, None), float | list)
                and not self._unmet((part, number))
            ]
            if was != now and stale:
                raise InputError(
                    f"[{section}] {name} is {now}, and these are numbers for {name} {was}: {', '.join(stale)}; give "
                    "others beside it"
                )

    def _unmet(self, place: tuple[str, str]) -> str:
        """Why a setting has no effect, in words; empty where it has one, or is none."""
        section, name = place
        every = {known: value for part in SECTIONS for known, value in vars(getattr(self, part)).items()}
        conditions = "" if every[name] is None else type(getattr(self, section)).model_fields[name].title
        for condition in conditions.split():
            other, negated, words = re.split("(!?)=", condition)
            value = every[other] if other in every else getattr(self, other)
            word = f"{value:g}" if isinstance(value, float) else str(value)
            word = {"None": "none", "True": "true", "False": "false"}.get(word, word)  # as in a file
            if (word in words.split(",")) == bool(negated):
                wanted = f"{'other than ' if negated else ''}{words.replace(',', ' or ')}"
                return f"[{section}] {name} has an effect only with {other} {wanted}, and {other} is {word}"
        return ""

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
        """Read settings from TOML; what the file does not name is as in its preset, or keeps its default.

        Raises:
            InputError: the file cannot be read, or names something unknown or of the wrong kind.
        """
        preset, sections = cls._read(path)
        settings = cls()
        with _naming(path):
            if preset is not None:
                settings.use_preset(preset)
            for section, values in sections.items():
                settings.update(section, values)
        return settings

    @classmethod
    def _read(cls, path: str | os.PathLike[str]) -> tuple[str | None, dict[str, dict[str, Any]]]:
        """The preset of a file, and the values of its sections."""
        document = read_toml(path)
        with _naming(path):
            if document.pop("task", cls.task) != cls.task:
                raise InputError(f'task must be "{cls.task}"')
            preset = document.pop("preset", None)
            for section, values in document.items():
                if not isinstance(values, dict):
                    raise InputError(f"unknown key '{section}' outside of a section")
                for name, idle in GONE.items():
                    if name in values and (values[name] in idle or ANY in idle):
                        del values[name]
        return preset, document


def _places(sections: Sections) -> list[tuple[str, str]]:
    """Section and name of every value."""
    return [(section, name) for section, values in sections.items() for name in values]


def _value(settings: RunSettings, place: tuple[str, str]) -> Any:
    section, name = place
    return getattr(getattr(settings, section), name)


@contextmanager
def _naming(file: str | os.PathLike[str] | None) -> Iterator[None]:
    """Begin messages about bad input with the file that it is from, if there is one."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error) if file is None else f"{file}: {error}") from None
