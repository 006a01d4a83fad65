"""The sections of a run's settings: those of every task, and those of video. The command line has its options here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from cdt_fast.constraints.presets import DEFAULTS, PRESETS, Coupling, Dual, ReferenceMode, Resilience


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
    rate: float | list[float] = setting(
        DEFAULTS.rate, "alpha, one number or one a layer: the share of the loss a layer removes"
    )
    reference: float | str | None = setting(
        DEFAULTS.reference, "epsilon_0, bound of the loss at depth 0: a number, 'auto' or 'none'"
    )
    reference_mode: str = setting(DEFAULTS.reference_mode, "how the reference enters", get_args(ReferenceMode))
    coupling: str = setting(DEFAULTS.coupling, "what bounds a layer's loss", get_args(Coupling))
    normalize: bool = setting(DEFAULTS.normalize, "dual steps on relative violations")
    margin: float = setting(
        DEFAULTS.margin, "share by which bounds are lowered in training, so that held-out losses meet them", least=0
    )
    dual: str = setting(DEFAULTS.dual, "rule that moves the multipliers", get_args(Dual))
    dual_lr: float = setting(DEFAULTS.dual_lr, "step size of the multipliers")
    betas: list[float] = setting(list(DEFAULTS.betas), "Adam's decay of the two moments of the dual gradient")
    proportional_gain: float = setting(DEFAULTS.proportional_gain, "proportional gain of 'pi'")
    smoothing: float = setting(DEFAULTS.smoothing, "decay of the average that the proportional part of 'pi' follows")
    resilience: str = setting(
        DEFAULTS.resilience or "none", "what gives way when bounds cannot be met", (*get_args(Resilience), "none")
    )
    slack_cost: float = setting(DEFAULTS.slack_cost, "cost of squared slack: the larger, the harder the constraints")
    slack_lr: float | None = setting(DEFAULTS.slack_lr, "step size of the slacks (default: 0.1 / slack_cost)")
    dual_every: int = setting(DEFAULTS.dual_every, "optimizer steps a dual step", least=1)
    warmup_epochs: int = setting(1, "epochs with the constraints off at the start", least=0)


@dataclass
class SharedTrainingSettings:
    """[training]: the primal side of the loop, as far as it is that of every task."""

    accumulate: int = setting(1, "micro-batches an optimizer step", least=1)
    schedule: str = setting("cosine", "learning rate over the run", ("cosine", "linear", "constant"))
    warmup_steps: int = setting(0, "steps over which the learning rate rises to lr", least=0)
    clip: float | None = setting(1.0, "largest gradient norm ('none' for no bound)", least=0)
    weight_decay: float = setting(0.0, "decoupled weight decay (AdamW)", least=0)
    precision: str = setting("fp32", "arithmetic of the matrix products", ("fp32", "tf32", "bf16"))
    device: str = setting("auto", "where to compute", ("auto", "cpu", "cuda"))
    seed: int = setting(0, "seed of data order and noise", least=0)
    validate_every: int = setting(50, "optimizer steps between validations", least=1)
    checkpoint_every: int = setting(50, "optimizer steps between checkpoints", least=1)
    log_every: int = setting(10, "optimizer steps between lines of metrics.jsonl", least=1)
    tensorboard: bool = setting(False, "also write the metrics for TensorBoard")
    cuda_graph = False  # a setting of video alone, where all batches have one shape


@dataclass
class TrainingSettings(SharedTrainingSettings):
    """[training] of video."""

    steps: int = setting(1000, "optimizer steps", least=1)
    batch: int = setting(4, "windows a micro-batch", least=1)
    lr: float = setting(1e-3, "learning rate of Adam", least=0)
    cuda_graph: bool = setting(
        False, "launch a step as one CUDA graph, for a GPU that waits for the launches of small batches"
    )


@dataclass
class EvaluationSettings:
    """[evaluation]: the noise levels that are reported."""

    gammas: list[float] = setting([0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0], "noise levels of the evaluation", least=0)
