"""The options of the descent constraints, their defaults and the named presets; without torch, for `cdt-fast --help`.

`DEFAULTS` is the one place that the constructor of `DescentConstraints` and the settings of the command line take their
defaults from; a preset in `PRESETS` names what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from cdt_fast.checks import InputError, suggestion

ObjectiveName = Literal["last", "depths", "log"]
Resilience = Literal["slack", "decay"]
Coupling = Literal["chain", "detach", "absolute"]
ReferenceMode = Literal["constraint", "anchor"]
PaperPreset = Literal["paper-dust", "paper-ut", "paper-vit", "paper-text-ut", "paper-encoder", "paper-llama"]
Preset = Literal["video", "text", "lm", "safe", PaperPreset]

# reference="auto": ε₀ is the mean of ℓ_0 over this many measurements: of the untrained network, and not of one batch.
REFERENCE_MEASUREMENTS = 20

# dual_lr=None: the first with Adam and the objective "last", where a larger rate lets early misses shape the network
# for good; else the second: beside the weights of other objectives (about 1 / loss) a smaller one does nothing.
DUAL_LR, OTHER_DUAL_LR = 0.002, 0.05


@dataclass(frozen=True)
class DescentOptions:
    """The options of `cdt_fast.DescentConstraints`, which says what they mean, with their defaults."""

    rate: float | Sequence[float] | None = 0.01  # at 0.1 an encoder's last layers overfit (docs/results.md)
    reference: float | Literal["auto"] | None = "auto"
    objective: ObjectiveName = "last"
    coefficients: Sequence[float] | None = None
    bounds: Mapping[int, float | str] | None = None
    reference_losses: Sequence[float] | None = None
    dual_lr: float | None = None
    betas: tuple[float, float] | None = (0.0, 0.9)
    resilience: Resilience | None = "slack"
    slack_cost: float = 10.0
    coupling: Coupling = "detach"
    reference_mode: ReferenceMode = "anchor"
    normalize: bool = True
    margin: float = 0.02


DEFAULTS = DescentOptions()


class PaperRow(NamedTuple):
    """A row of the paper's tables: everything in it, and a choice of ours for what is not."""

    task: str
    constraints: Mapping[str, Any]  # options of the constraints
    settings: Mapping[str, Mapping[str, Any]]  # those of `cdt-fast train`, by section
    pretrained: str  # the setting of [model] that has to name a pretrained network, or ""


# Both sides by Adam, on raw violations. The dual rate, and the slack cost of video and language models, are our choice.
_PAPER: dict[str, Any] = {"objective": "last", "coupling": "chain", "normalize": False, "margin": 0.0} | {
    "betas": (0.9, 0.999),
    "dual_lr": 0.05,
    "resilience": "slack",
}
# Gray frames of 160 x 160, patches of 16 x 16, windows of 20 frames; a network for one noise level.
_FRAMES = {"frames": "resized", "window": 20, "size": 160, "patch": 16, "patch_frames": 1}
# Of 3, 5 and 7 layers in the tables, 7, the longest chain. One dictionary for all (tied) only when unconstrained.
_UNROLLED = {"layers": 7, "code_size": 1024, "tied": None, "scale": 1.0}


def _row(
    task: str, rate: float, reference: float, model: Any, pretrained: str = "", gamma: float = 0.15, **cost: float
) -> PaperRow:
    """Return a row; steps and lr of video are guesses."""
    if task == "video":
        lr = 1e-4 if model["model"] == "vit" else 1e-3
        data = {**_FRAMES, "gamma": gamma}
        settings = {"data": data, "training": {"steps": 1000, "batch": 32, "lr": lr}}
        mode, gammas = "constraint", [0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0]
    else:
        settings, mode, gammas = {"data": {"gamma": gamma}}, "anchor", [0.25 * step for step in range(9)]
    settings |= {"model": model, "constraints": {"constrained": True, "warmup_epochs": 1}}
    settings |= {"evaluation": {"gammas": gammas}}
    options = {**_PAPER, "rate": rate, "reference": reference, "reference_mode": mode, **cost}
    return PaperRow(task, options, settings, pretrained)


_DUST = {"model": "dust", **_UNROLLED, "nonlinearity": "soft_threshold", "sparsity": 0.2}
_TEXT_UT = {"model": "text-ut", "layers": 3}
PAPER_ROWS: dict[str, PaperRow] = {
    "paper-dust": _row("video", 0.25, 6.5, _DUST),
    "paper-ut": _row("video", 0.22, 5.5, {"model": "ut", **_UNROLLED}),
    "paper-vit": _row("video", 0.29, 0.44, {"model": "vit", "layers": 12, "width": 768}, "pretrained"),
    # The tables have IMDb and MNLI: this is IMDb. Of 3, 5, 7 and 9 layers, 3 is where the constraints gain most.
    "paper-text-ut": _row("text", 0.1, 0.9, _TEXT_UT, gamma=0.8, slack_cost=3.45),
    # Every block's output is read by the encoder's own token, whose loss at depth 0 is why texts have an anchor.
    "paper-encoder": _row("text", 0.226, 1.0, {"inner_pooling": "own"}, "model", gamma=1.0, slack_cost=1.07),
    "paper-llama": _row("lm", 0.05, 12.0, {"taps": None}, "model", gamma=0.0),
}
# What differs from the defaults. "video", "text" and "lm" are what `cdt-fast train` starts from.
PRESETS: dict[str, Mapping[str, Any]] = {
    # Of a denoiser all depths are wanted.
    "video": {"objective": "log", "margin": 0.01},
    # A hundred steps: slow multipliers gain nothing at the last depth, and exits lose (docs/results.md).
    "text": {"reference": 0.9, "dual_lr": 0.05},
    # A rate of 0.02 is as good at the last depth, worse at exits, and not met either (docs/results.md).
    "lm": {"rate": 0.05, "dual_lr": 0.05},
    # For a new problem: no depth is ever pushed up, relative violations, no dual momentum.
    "safe": {"objective": "last", "reference_mode": "constraint", "betas": (0.0, 0.999), "resilience": "decay"},
    **{name: row.constraints for name, row in PAPER_ROWS.items()},
}


def options_of(preset: str | None = None, **overrides: Any) -> dict[str, Any]:
    """The value of every option of the constraints: its default, what the preset names, and `overrides` last."""
    if preset is not None and preset not in list(PRESETS):
        raise InputError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    options = asdict(DEFAULTS)
    for name in overrides:
        if name not in options:
            raise InputError(f"the constraints have no option {name!r}{suggestion(name, options)}")
    return {**options, **({} if preset is None else PRESETS[preset]), **overrides}
