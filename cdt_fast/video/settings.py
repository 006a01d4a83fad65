"""The settings of `train video`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cdt_fast.checks import InputError
from cdt_fast.constraints.presets import PRESETS, ObjectiveName
from cdt_fast.training.settings import (
    ConstraintSettings,
    EvaluationSettings,
    NoiseLevels,
    NonNegative,
    Positive,
    RunSettings,
    Section,
    TrainingSettings,
    setting,
)

_CHESSBOARD = 4  # the shifted grids along each side of which a video is by default denoised on every other one
# The least and the greatest noise that is meant in a unit: gray levels beyond rounding, and standard deviations of the
# frames that leave something of them.
_MEANT = {"level": (0.5, 255.0), "deviation": (0.0, 5.0)}
_UNITS = {"level": "gray levels of 0..255", "deviation": "standard deviations of the training frames"}


class VideoDataSettings(Section):
    """[data]: which frames, and how they become sequences of patches."""

    source: str | None = setting(None, "video file, frame folder, .npy or a tree of them, or demo, a generated clip")
    frames: Literal["crops", "resized"] = setting(
        "crops", "train on crops at full resolution, gray and colors, or on the luma of whole frames made square"
    )
    window: Positive = setting(8, "T, frames per window")
    stride: Positive | None = setting(None, "frames between training windows of whole frames (default: window)")
    size: Positive = setting(64, "side in pixels of the frames that a network trains on, a multiple of patch")
    patch: Positive = setting(8, "side in pixels of a square patch")
    patch_frames: Positive = setting(8, "frames of a patch; window is a multiple of it (vit: 1)")
    overlap: Positive | None = setting(
        None,
        "train, evaluate and denoise with the mean over so many shifted grids of patches along each side, which every "
        "layer starts from (default: eight, every other one of 4 x 4)",
    )
    sequence: Literal["time", "space"] = setting("time", "what one sequence runs over (vit: space)")
    gamma: NoiseLevels = setting([1.0, 50.0], "training noise: one level, or LOW,HIGH of a range")
    unit: Literal["level", "deviation"] = setting(
        "level",
        "what noise levels are multiples of: gray levels of 0..255, or the training frames' standard deviation",
    )


class VideoModelSettings(Section):
    """[model]: the network."""

    model: Literal["dust", "ut", "vit"] = setting("dust", "network")
    layers: Positive = setting(3, "L")
    code_size: Positive | None = setting(None, "dust, ut: m, atoms of a dictionary (default: pixels of a patch)")
    tied: bool | None = setting(None, "dust, ut: one dictionary for all layers (default: only when unconstrained)")
    adaptive: bool = setting(True, "dust, ut: the layers see patches less their mean, in units of the noise")
    nonlinearity: Literal["soft_threshold", "hard_threshold"] = setting("hard_threshold", "dust: of the codes")
    sparsity: NonNegative | list[NonNegative] | None = setting(
        None,
        "dust: lambda_1, one number or one a layer; the threshold is lambda_1 / c (default: 2.7, from layer 2 on 3.5; "
        "soft: 1.5)",
    )
    scale: float = setting(0.02, "dust, ut: beta, factor of the attention scores")
    pretrained: str | None = setting(None, "vit: folder of a transformers ViT to start from (default: random weights)")
    width: Annotated[int, Field(ge=2)] = setting(192, "vit: d")
    heads: Positive = setting(3, "vit: attention heads")


class VideoTrainingSettings(TrainingSettings):
    """[training] of video."""

    steps: Positive = setting(200, "optimizer steps")
    batch: Positive = setting(1, "windows per micro-batch")
    lr: NonNegative = setting(5e-5, "learning rate of Adam")


# The preset, but for the objective, which is another one without constraints. The constraints are on from the start: an
# epoch has thousands of crops, and the first layer does not begin from nothing.
_DENOISER = {**{name: value for name, value in PRESETS["video"].items() if name != "objective"}, "warmup_epochs": 0}


class VideoSettings(RunSettings):
    """All settings of a run on video."""

    task: ClassVar[str] = "video"
    networks: ClassVar[tuple[str, ...]] = ("dust", "ut", "vit")
    units: ClassVar[dict[str, tuple[str, ...]]] = {"unit": ("gamma", "gammas"), "adaptive": ("sparsity", "reference")}
    data: VideoDataSettings = Field(default_factory=VideoDataSettings)
    model: VideoModelSettings = Field(default_factory=VideoModelSettings)
    constraints: ConstraintSettings = Field(default_factory=lambda: ConstraintSettings(**_DENOISER))
    training: VideoTrainingSettings = Field(default_factory=VideoTrainingSettings)
    evaluation: EvaluationSettings = Field(
        default_factory=lambda: EvaluationSettings(gammas=[5.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    )

    @property
    def objective(self) -> ObjectiveName:
        """As `RunSettings.objective`; a denoiser under constraints minimizes all depths on a relative scale."""
        return "log" if self.constraints.objective is None and self.constrained else super().objective

    @property
    def coefficients(self) -> list[float] | None:
        """As `RunSettings.coefficients`; of a denoiser depth 0, which reads the noisy input, is no exit."""
        if self.objective == "last" or self.model.pretrained is not None:
            return None
        return [0.0] + [1.0] * self.model.layers

    @property
    def untrained_depth(self) -> str:
        """As `RunSettings.untrained_depth`."""
        return "which is the noisy input where grids overlap" if self.overlapping else ""

    def needs(self) -> list[tuple[bool, str, str]]:
        """As `RunSettings.needs`."""
        model, pretrained = self.model.model, self.model.pretrained
        return [
            *super().needs(),
            (self.data.frames == "resized", "frames is resized", "stride"),
            (pretrained is None, "pretrained is none", "layers width heads"),
            (self.tokens != 1, "a sequence has several tokens", "scale"),
            (model == "dust", "model is dust", "nonlinearity sparsity"),
            (model != "vit", "model is dust or ut", "code_size tied adaptive scale"),
            (model == "vit", "model is vit", "pretrained width heads"),
        ]

    def check(self) -> None:
        """Refuse settings of the data and of the network that do not fit each other.

        Raises:
            InputError: it names the setting, what was given and what is expected.
        """
        self.check_noise()
        data, model = self.data, self.model.model
        paper = f"that is for crops, the paper's whole frames are --preset paper-{model}"
        for refused, words in (
            (
                data.frames == "crops" and model != "dust",
                f"[model] model must be dust, got {model}; {paper}",
            ),
            (
                data.frames == "crops" and data.sequence != "time",
                f"[data] sequence must be time, got {data.sequence}: attention over places blurs; {paper}",
            ),
            (
                data.frames == "crops" and data.overlap == 1,
                f"[data] overlap must not be 1: on one grid the layers after the first change nothing; {paper}",
            ),
            (
                self.overlapping and (data.sequence != "time" or model != "dust"),
                "[data] overlap must be 1 but for model dust and sequence time, which alone work on a mean over grids; "
                f"got {data.overlap or 'eight grids'}",
            ),
            (
                data.window % data.patch_frames,
                f"[data] window must be a multiple of patch_frames ({data.patch_frames}), got {data.window}",
            ),
            (data.size % data.patch, f"[data] size must be a multiple of patch ({data.patch}), got {data.size}"),
        ):
            if refused:
                raise InputError(words)

    def check_noise(self) -> None:
        """As `RunSettings.check_noise`."""
        unit = self.data.unit
        least, most = _MEANT[unit]
        for name, levels in (("[data] gamma", self.noise), ("[evaluation] gammas", self.evaluation.gammas)):
            if max(levels) > most or 0 < max(levels) < least:
                other = next(word for word in _UNITS if word != unit)
                raise InputError(
                    f"{name} reaches {max(levels):g} {_UNITS[unit]}, and must be {least:g} to {most:g}; with unit "
                    f"{other} it counts in {_UNITS[other]}"
                )
        if self.adaptive and self.noise[1] == 0:
            raise InputError(
                "[data] gamma is 0, and an adaptive network works in units of the noise: train it with noise, or "
                "another with --no-adaptive"
            )

    def grid_places(self, grids: int | None) -> list[tuple[int, int]]:
        """Return rows and columns by which `grids²` grids of patches are moved.

        None: the default, eight grids, every other one of 4 x 4 like the squares of one color of a chessboard: nearly
        as good as all sixteen.
        """
        along = _CHESSBOARD if grids is None else grids
        places = [(row, column) for row in range(along) for column in range(along)]
        side = self.data.patch
        return [(side * r // along, side * c // along) for r, c in places if grids is not None or (r + c) % 2 == 0]

    @property
    def tokens(self) -> int:
        """T of a sequence."""
        times, places = self.data.window // self.data.patch_frames, (self.data.size // self.data.patch) ** 2
        return times if self.data.sequence == "time" else places

    @property
    def overlapping(self) -> bool:
        """Whether the training is on several grids."""
        return self.data.overlap != 1

    @property
    def adaptive(self) -> bool:
        """Whether the network takes the noise's standard deviation."""
        return self.model.model != "vit" and self.model.adaptive
