"""The settings of `train video`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cdt_fast.training.settings import (
    ConstraintSettings,
    EvaluationSettings,
    NonNegative,
    Positive,
    RunSettings,
    Section,
    TrainingSettings,
    setting,
)

_UNROLLED, _VIT = "dust, ut", "vit"


class VideoDataSettings(Section):
    """[data]: which frames, and how they become sequences of patches."""

    source: str | None = setting("demo", "video file, frame folder, .npy or a tree of them; 'demo' is a generated clip")
    window: Positive = setting(20, "T, frames per window")
    stride: Positive | None = setting(None, "frames between training windows (default: window, no overlap)")
    size: Positive = setting(160, "side in pixels that frames are resized to, a multiple of patch")
    patch: Positive = setting(16, "side in pixels of a square patch")
    sequence: Literal["time", "space", "spacetime"] = setting("time", "what one sequence runs over (vit: space)")
    gamma: NonNegative = setting(0.15, "training noise as a multiple of the standard deviation of the clean frames")


class VideoModelSettings(Section):
    """[model]: the network."""

    model: Literal["dust", "ut", "vit"] = setting("dust", "network")
    layers: Positive = setting(5, "L")
    code_size: Positive = setting(1024, "m, atoms of a dictionary", _UNROLLED)
    tied: bool | None = setting(None, "one dictionary for all layers (default: only when unconstrained)", _UNROLLED)
    sparsity: NonNegative = setting(0.2, "lambda_1; the threshold is lambda_1 * step ('ut' has none)", _UNROLLED)
    step: float | None = setting(None, "1/c (default: 1 / squared spectral norm of the initial dictionary)", _UNROLLED)
    scale: float = setting(1.0, "beta, factor of the attention scores", _UNROLLED)
    initial_codes: Literal["analysis", "zero"] = setting("analysis", "H_0: X D / c, or zero", _UNROLLED)
    readout: Literal["own", "next", "shared"] = setting("own", "dictionary that reads each depth", _UNROLLED)
    pretrained: str | None = setting(None, "folder of a transformers ViT to start from (default: random weights)", _VIT)
    width: Annotated[int, Field(ge=2)] = setting(192, "d", _VIT)
    heads: Positive = setting(3, "attention heads", _VIT)


class VideoTrainingSettings(TrainingSettings):
    """[training] of video."""

    steps: Positive = setting(1000, "optimizer steps")
    batch: Positive = setting(4, "windows per micro-batch")
    lr: NonNegative = setting(1e-3, "learning rate of Adam")
    cuda_graph: bool | None = setting(
        None, "launch a step as one CUDA graph (default: on a GPU, where one process trains)"
    )


class VideoSettings(RunSettings):
    """All settings of a run on video."""

    task: ClassVar[str] = "video"
    data: VideoDataSettings = Field(default_factory=VideoDataSettings)
    model: VideoModelSettings = Field(default_factory=VideoModelSettings)
    constraints: ConstraintSettings = Field(default_factory=ConstraintSettings)
    training: VideoTrainingSettings = Field(default_factory=VideoTrainingSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)

    @property
    def sample_length(self) -> tuple[str, int, int]:
        return "window", self.data.window, 1
