"""The settings of `train video`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cdt_fast.constraints.presets import PRESETS, ObjectiveName
from cdt_fast.errors import InputError
from cdt_fast.training.settings import (
    ConstraintSettings,
    EvaluationSettings,
    Levels,
    NoiseLevels,
    NonNegative,
    Positive,
    RunSettings,
    Section,
    TrainingSettings,
    setting,
)

_CHESSBOARD = 4  # the shifted grids along each side of which a video is by default denoised on every other one
_UNROLLED, _DUST, _VIT, _RANDOM_VIT = "model=dust,ut", "model=dust", "model=vit", "model=vit pretrained=none"
# The least and the greatest noise that is meant in a unit: gray levels beyond rounding, and standard deviations of the
# frames that leave something of them.
_MEANT = {"level": (0.5, 255.0), "deviation": (0.0, 5.0)}


class VideoDataSettings(Section):
    """[data]: which frames, and how they become sequences of patches."""

    source: str | None = setting(None, "video file, frame folder, .npy or a tree of them, or demo, a generated clip")
    frames: Literal["crops", "resized"] = setting(
        "crops",
        "what is trained on: crops at full resolution, gray and colors, or the luma of whole frames made square",
    )
    split: Literal["auto", "time"] = setting(
        "auto", "train, validate and test on whole clips where there are three or more, or on parts of each"
    )
    window: Positive = setting(8, "T, frames per window")
    stride: Positive | None = setting(None, "frames between training windows (default: window)", "frames=resized")
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
        unit_of="gamma gammas",
    )


class VideoModelSettings(Section):
    """[model]: the network."""

    model: Literal["dust", "ut", "vit"] = setting("dust", "network")
    layers: Positive = setting(3, "L", "pretrained=none")
    code_size: Positive | None = setting(
        None, "m, atoms of a dictionary (default: as many as a patch has pixels)", _UNROLLED
    )
    tied: bool | None = setting(None, "one dictionary for all layers (default: only when unconstrained)", _UNROLLED)
    adaptive: bool = setting(
        True,
        "the layers see patches less their mean, in units of the noise",
        _UNROLLED,
        unit_of="sparsity reference",
    )
    nonlinearity: Literal["soft_threshold", "hard_threshold"] = setting(
        "hard_threshold", "of the codes ('ut': relu)", _DUST
    )
    sparsity: NonNegative | list[NonNegative] | None = setting(
        None,
        "lambda_1, one number or one a layer; the threshold is lambda_1 * step (default: 2.7, from layer 2 on 3.5; "
        "soft: 1.5)",
        _DUST,
    )
    step: float | list[float] | None = setting(
        None,
        "1/c, one number or one a layer (default: 1 / squared spectral norm of the initial dictionary; "
        "with hard thresholds or several grids 0.3 of it from layer 2 on)",
        _UNROLLED,
    )
    scale: float = setting(0.02, "beta, factor of the attention scores", f"{_UNROLLED} tokens!=1")
    initial_codes: Literal["analysis", "zero"] = setting("analysis", "H_0: X D / c, or zero", f"{_UNROLLED} overlap=1")
    readout: Literal["own", "next", "shared"] = setting("own", "dictionary that reads each depth", _UNROLLED)
    pretrained: str | None = setting(None, "folder of a transformers ViT to start from (default: random weights)", _VIT)
    width: Annotated[int, Field(ge=2)] = setting(192, "d", _RANDOM_VIT)
    heads: Positive = setting(3, "attention heads", _RANDOM_VIT)


class VideoTrainingSettings(TrainingSettings):
    """[training] of video."""

    steps: Positive = setting(200, "optimizer steps")
    batch: Positive = setting(1, "windows per micro-batch")
    lr: NonNegative = setting(5e-5, "learning rate of Adam")


class VideoEvaluationSettings(EvaluationSettings):
    """[evaluation] of video."""

    gammas: Levels = setting([5.0, 10.0, 20.0, 30.0, 40.0, 50.0], "noise levels of the evaluation")


# The preset, but for the objective, which is another one without constraints. The constraints are on from the start: an
# epoch has thousands of crops, and the first layer does not begin from nothing.
_DENOISER = {**{name: value for name, value in PRESETS["video"].items() if name != "objective"}, "warmup_epochs": 0}


class VideoSettings(RunSettings):
    """All settings of a run on video."""

    task: ClassVar[str] = "video"
    data: VideoDataSettings = Field(default_factory=VideoDataSettings)
    model: VideoModelSettings = Field(default_factory=VideoModelSettings)
    constraints: ConstraintSettings = Field(default_factory=lambda: ConstraintSettings(**_DENOISER))
    training: VideoTrainingSettings = Field(default_factory=VideoTrainingSettings)
    evaluation: VideoEvaluationSettings = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=VideoEvaluationSettings
    )

    @property
    def objective(self) -> ObjectiveName:
        """As `RunSettings.objective`; a denoiser under constraints minimizes all depths on a relative scale."""
        if self.constraints.objective is None and self.constrained:
            return "log"
        return super().objective

    @property
    def coefficients(self) -> list[float] | None:
        """As `RunSettings.coefficients`; of a denoiser depth 0, which reads the noisy input, is no exit."""
        if self.objective == "last" or self.model.pretrained is not None:
            return None
        return [0.0] + [1.0] * self.model.layers

    @property
    def untrained_depth(self) -> str:
        """As `RunSettings.untrained_depth`."""
        if self.overlapping:
            return "which is the noisy input where grids overlap"
        zero = self.model.model != "vit" and self.model.initial_codes == "zero"
        return "which is zero by initial_codes" if zero else ""

    def check_noise(self) -> None:
        """As `RunSettings.check_noise`."""
        unit = self.data.unit
        least, most = _MEANT[unit]
        words = {"level": "gray levels of 0..255", "deviation": "standard deviations of the training frames"}
        for name, levels in (("[data] gamma", self.noise), ("[evaluation] gammas", self.evaluation.gammas)):
            greatest = max(levels)
            if greatest > most or 0 < greatest < least:
                (other,) = {*words} - {unit}
                raise InputError(
                    f"{name} reaches {greatest:g} {words[unit]}, and must be {least:g} to {most:g}; with "
                    f"unit {other} it counts in {words[other]}"
                )
        if self.adaptive and self.noise[1] == 0:
            raise InputError(
                "[data] gamma is 0, and an adaptive network works in units of the noise: train it with noise, or "
                "another with --no-adaptive"
            )

    def grid_places(self, grids: int | None) -> list[tuple[int, int]]:
        """Rows and columns by which `grids²` grids of patches are moved.

        None: the default, eight grids, every other one of 4 x 4 like the squares of one color of a
        chessboard: nearly as good as all sixteen.
        """
        along = _CHESSBOARD if grids is None else grids
        places = [self.data.patch * number // along for number in range(along)]
        return [
            (top, left)
            for row, top in enumerate(places)
            for column, left in enumerate(places)
            if grids is not None or (row + column) % 2 == 0
        ]

    @property
    def tokens(self) -> int:
        """T of a sequence."""
        times, places = self.data.window // self.data.patch_frames, (self.data.size // self.data.patch) ** 2
        return {"time": times, "space": places}[self.data.sequence]

    @property
    def overlapping(self) -> bool:
        """Whether the training is on several grids."""
        return self.data.overlap != 1

    @property
    def adaptive(self) -> bool:
        """Whether the network takes the noise's standard deviation."""
        return self.model.model != "vit" and self.model.adaptive
