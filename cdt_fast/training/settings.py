"""The settings of a run, a section of `config.toml` each: what every task shares, and how they are read and written.

The types, bounds and descriptions of a section are what the TOML file, the command line and its help are made by.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from typing_extensions import Self

from cdt_fast.checks import suggestion
from cdt_fast.constraints import presets
from cdt_fast.constraints.presets import DEFAULTS, options_of
from cdt_fast.errors import InputError
from cdt_fast.files import read_toml, shown, write_text

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Bounds = Annotated[dict[int, float | str], Field(min_length=1)]
Shares = Annotated[dict[int, float], Field(min_length=1)]
NoiseLevels = NonNegative | list[NonNegative]  # one level, or LOW and HIGH of a range
# Beyond a million times the signal squares leave float32.
Levels = Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=1)]

SECTIONS = ("data", "model", "constraints", "training", "evaluation")


def setting(default: Any, description: str, owner: str | None = None) -> Any:
    """A field of a section, with its help; `owner`, its title, is the network that alone has it (None: all do)."""
    return Field(default, description=description, title=owner, validate_default=False)


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
    preset: presets.Preset | Literal["paper"] | None = setting(
        None, "take the settings below from a preset, before those given; 'paper' is that of the task"
    )
    objective: presets.ObjectiveName | None = setting(
        None, "what is minimized over the depths (default: last; for a denoiser of video with constraints log)"
    )
    coefficients: list[NonNegative] | presets.DepthScale | None = setting(
        None, "weights of the depths in the objective: numbers, or a scale over the depths (default: ones)"
    )
    exit_scale: NonNegative = setting(1.0, "factor of a scale's coefficients at the depths before the last")
    rate: float | list[float] | None = setting(
        DEFAULTS.rate, "alpha, one number or one a layer: the share of the loss a layer removes; 'none': no descent"
    )
    reference: float | Literal["auto"] | None = setting(
        DEFAULTS.reference, "epsilon_0, bound of the loss at depth 0: a number, 'auto' or 'none'"
    )
    reference_mode: presets.ReferenceMode = setting(DEFAULTS.reference_mode, "how the reference enters")
    coupling: presets.Coupling = setting(DEFAULTS.coupling, "what bounds a layer's loss")
    bounds: Bounds | None = setting(
        DEFAULTS.bounds, "largest losses of chosen depths, as in 12=1.01x,3=0.9; with an x a factor of a reference's"
    )
    agreement: Shares | None = setting(
        DEFAULTS.agreement,
        "least shares of the tokens or texts that chosen depths answer as the last one does, as in 8=0.8",
    )
    reference_losses: list[float] | str | None = setting(
        DEFAULTS.reference_losses,
        "what factors are taken of: a loss a depth, or the folder of a run (default: the end of the warm-up)",
    )
    ratio: presets.Ratio = setting(
        DEFAULTS.ratio, "what judges a layer: the ratio of mean losses, the mean of micro-batches' ratios, or the worst"
    )
    tail: float = setting(DEFAULTS.tail, "share of the micro-batches that 'cvar' calls the worst")
    normalize: bool = setting(DEFAULTS.normalize, "dual steps on relative violations")
    margin: NonNegative = setting(
        DEFAULTS.margin, "share by which bounds are lowered in training, so that held-out losses meet them"
    )
    tighten_steps: Count = setting(
        DEFAULTS.tighten_steps, "steps after the warm-up over which rate and margin grow from zero to what they are"
    )
    dual: presets.Dual = setting(DEFAULTS.dual, "rule that moves the multipliers")
    dual_lr: float | None = setting(
        DEFAULTS.dual_lr, "step size of the multipliers (default: 0.002 with adam and the objective last, else 0.05)"
    )
    betas: list[float] = setting(list(DEFAULTS.betas), "Adam's decay of the two moments of the dual gradient")
    proportional_gain: float = setting(DEFAULTS.proportional_gain, "proportional gain of 'pi'")
    smoothing: float = setting(DEFAULTS.smoothing, "decay of the average that the proportional part of 'pi' follows")
    gain_growth: float = setting(
        DEFAULTS.gain_growth, "what the gain of 'pi' is multiplied by where a violation does not fall in 50 updates"
    )
    gain_limit: float = setting(DEFAULTS.gain_limit, "the largest gain that 'pi' grows to")
    barrier_width: float = setting(DEFAULTS.barrier_width, "violation that doubles a multiplier of 'barrier'")
    resilience: presets.Resilience | Literal["none"] = setting(
        DEFAULTS.resilience or "none", "what gives way when bounds cannot be met"
    )
    slack_cost: float = setting(DEFAULTS.slack_cost, "cost of squared slack: the larger, the harder the constraints")
    slack_lr: float | None = setting(DEFAULTS.slack_lr, "step size of the slacks (default: 0.1 / slack_cost)")
    dual_every: Positive = setting(DEFAULTS.dual_every, "optimizer steps per dual step")
    warmup_epochs: Count = setting(1, "epochs with the constraints off at the start")


class TrainingSettings(Section):
    """[training]: the primal side of the loop, as far as it is that of every task; each adds `batch` and `lr`."""

    accumulate: Positive = setting(1, "micro-batches per optimizer step")
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "learning rate over the run")
    warmup_steps: Count = setting(0, "steps over which the learning rate rises to lr")
    clip: NonNegative | None = setting(1.0, "largest gradient norm ('none' for no bound)")
    depth_schedule: Literal["random", "gradual", "rotational"] | None = setting(
        None,
        "without constraints: train one depth a step, drawn at random, switch depths on from the last to the first, or "
        "the last and others in turn; with the objective 'depths' its coefficients weigh those that are on",
    )
    depth_rotation: Annotated[int, Field(ge=2)] | None = setting(
        None, "steps between two of an inner depth under 'rotational'"
    )
    weight_decay: NonNegative = setting(0.0, "decoupled weight decay (AdamW)")
    precision: Literal["auto", "bf16", "fp32", "ieee"] = setting(
        "auto",
        "matrix products: bf16 with float32 masters, fp32 (TF32 on a GPU) or ieee; auto: bf16 on a GPU, else fp32",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where to compute")
    seed: Count = setting(0, "seed of data order and noise")
    validate_every: Positive = setting(50, "optimizer steps between validations")
    checkpoint_every: Positive = setting(50, "optimizer steps between checkpoints")
    log_every: Positive = setting(10, "optimizer steps between lines of metrics.jsonl")
    rank_timeout: Positive = setting(300, "of several processes: seconds after which one that waits for another ends")


class EvaluationSettings(Section):
    """[evaluation]: the noise levels that are reported."""

    gammas: Levels = setting([0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0], "noise levels of the evaluation")


class RunSettings(BaseModel):
    """All settings of a run, a section each; a task has a subclass with its own sections and their defaults."""

    model_config = ConfigDict(extra="forbid")

    task: ClassVar[str]
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
    def coefficients(self) -> list[float] | presets.DepthScale | None:
        """The weights of the depths in the objective; None: those of `DescentConstraints`."""
        return self.constraints.coefficients

    def set(self, section: str, name: str, value: Any) -> None:
        """Set one value, checked against the type and the bounds of its field; a preset sets what it names.

        Raises:
            InputError: an unknown section or name, or a value of the wrong kind.
        """
        if (section, name, value) == ("constraints", "preset", "paper"):
            value = f"paper-{self.task}"
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
        if name == "preset" and settings.preset is not None:  # pyright: ignore[reportAttributeAccessIssue]
            for taken, preset_value in options_of(value).items():
                if taken == "objective" and value == self.task:  # whose default is another one without constraints
                    settings.objective = None  # pyright: ignore[reportAttributeAccessIssue]
                elif taken in type(settings).model_fields:
                    given = list(preset_value) if isinstance(preset_value, tuple) else preset_value
                    setattr(settings, taken, "none" if taken == "resilience" and given is None else given)

    def update(self, section: str, values: Mapping[str, Any]) -> None:
        """Set several values of a section; a preset first, so that what is given beside it wins."""
        for name in sorted(values, key=lambda name: name != "preset"):
            self.set(section, name, values[name])

    def check_owners(self, given: Iterable[str]) -> None:
        """Refuse those of the given settings of [model] that the chosen network does not have."""
        for name in given:
            owner = type(self.model).model_fields[name].title
            if owner is not None and self.network not in owner.split(", "):
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option} is a setting of {owner}, and the model is {self.model.model}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as TOML, None as the word "none"."""
        document: dict[str, Any] = {"task": self.task}
        for section in SECTIONS:
            values = getattr(self, section).model_dump(mode="json")  # keys are words
            document[section] = {name: "none" if value is None else value for name, value in values.items()}
        write_text(path, tomli_w.dumps(document))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read settings from TOML; what the file does not name keeps its default.

        Raises:
            InputError: the file cannot be read, or names something unknown or of the wrong kind.
        """
        document = read_toml(path)
        settings = cls()
        if document.pop("task", cls.task) != cls.task:
            raise InputError(f'{path}: task must be "{cls.task}"')
        try:
            for section, values in document.items():
                if not isinstance(values, dict):
                    raise InputError(f"unknown key '{section}' outside of a section")
                values.pop("tensorboard", None)  # runs of earlier versions have it
                settings.update(section, values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        return settings
