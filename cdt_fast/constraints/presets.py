"""The options of the descent constraints, their defaults and the named presets; without torch, for `cdt-fast --help`.

`DEFAULTS` is the one place that the constructor of `DescentConstraints` and the settings of the command line take their
defaults from; a preset in `PRESETS` names what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from cdt_fast.checks import suggestion
from cdt_fast.errors import InputError

ObjectiveName = Literal["last", "depths", "log"]
Dual = Literal["ascent", "adam", "pi", "barrier"]
Resilience = Literal["slack", "decay"]
Coupling = Literal["chain", "detach", "absolute"]
Ratio = Literal["mean", "sample", "cvar"]
ReferenceMode = Literal["constraint", "anchor"]
DepthScale = Literal["uniform", "linear", "sum", "sqrt", "inverse", "inverse-sqrt", "layerskip"]
Preset = Literal["video", "text", "lm", "paper-video", "paper-text", "paper-lm", "safe"]

# reference="auto": ε₀ is the mean of ℓ_0 over this many measurements. Few, so that it describes the untrained network;
# more than one, so that a single odd batch does not set the bound for the whole run.
REFERENCE_MEASUREMENTS = 20

# rate, margin: every layer lowers the loss, in training by a little more than is asked for. Where each has to remove a
# tenth, the last layers of a pretrained encoder learn their texts by heart (docs/results_text.md).

# dual_lr=None: what Adam moves a multiplier by, whatever the violation, where the last loss is the objective, and what
# all else has. Where it is large, the first third of a training, in which every bound is missed, shapes the network for
# good; but beside the weights of other objectives, of the order of 1 / loss, a small one is nothing.
DUAL_LR, OTHER_DUAL_LR = 0.002, 0.05


@dataclass(frozen=True)
class DescentOptions:
    """The options of `cdt_fast.DescentConstraints`, which says what they mean, with their defaults."""

    rate: float | Sequence[float] | None = 0.01
    reference: float | Literal["auto"] | None = "auto"
    objective: ObjectiveName = "last"
    coefficients: Sequence[float] | None = None
    bounds: Mapping[int, float | str] | None = None
    reference_losses: Sequence[float] | None = None
    agreement: Mapping[int, float] | None = None
    dual: Dual = "adam"
    dual_lr: float | None = None
    betas: tuple[float, float] = (0.0, 0.9)
    proportional_gain: float = 0.2
    smoothing: float = 0.0
    gain_growth: float = 1.0
    gain_limit: float = 10.0
    barrier_width: float = 1.0
    resilience: Resilience | None = "slack"
    slack_cost: float = 10.0
    slack_lr: float | None = None
    coupling: Coupling = "detach"
    reference_mode: ReferenceMode = "anchor"
    ratio: Ratio = "mean"
    tail: float = 0.1
    normalize: bool = True
    margin: float = 0.02
    tighten_steps: int = 0
    warmup_steps: int = 0
    dual_every: int = 1


DEFAULTS = DescentOptions()

# The paper's are reconstructions: rates and references are tabled; violations enter as they are, with no margin.
_PAPER: dict[str, Any] = {
    "objective": "last",
    "dual": "adam",
    "betas": (0.9, 0.999),
    "dual_lr": 0.05,
    "resilience": "slack",
    "coupling": "chain",
    "normalize": False,
    "margin": 0.0,
}
# What each names, in place of the default. "video", "text" and "lm" are what `cdt-fast train` starts from.
PRESETS: dict[str, dict[str, Any]] = {
    # Of a denoiser all depths are wanted.
    "video": {"objective": "log", "margin": 0.01},
    # A hundred steps: slow multipliers gain nothing at the last depth, and exits lose (docs/results_video.md).
    "text": {"reference": 0.9, "dual_lr": 0.05},
    # A rate of 0.02 is as good at the last depth, worse at exits, and not met either (docs/results_lm.md).
    "lm": {"rate": 0.05, "dual_lr": 0.05},
    "paper-video": {**_PAPER, "rate": 0.25, "reference": 6.5, "reference_mode": "constraint"},
    "paper-text": {**_PAPER, "rate": 0.1, "reference": 0.9, "reference_mode": "anchor"},
    "paper-lm": {**_PAPER, "rate": 0.05, "reference": 12.0, "reference_mode": "anchor"},
    # For a new problem: no depth is ever pushed up, relative violations, no dual momentum.
    "safe": {
        "objective": "last",
        "reference_mode": "constraint",
        "betas": (0.0, 0.999),
        "resilience": "decay",
    },
}


def options_of(preset: str | None = None, **overrides: Any) -> dict[str, Any]:
    """The value of every option of the constraints: its default, what the preset names, and `overrides` last.

    Raises:
        InputError: there is no such preset or no such option.
    """
    if preset is not None and preset not in PRESETS:
        raise InputError(f"there is no preset {preset!r}{suggestion(str(preset), PRESETS)}")
    options = asdict(DEFAULTS)
    for name in overrides:
        if name not in options:
            raise InputError(f"the constraints have no option {name!r}{suggestion(name, options)}")
    return {**options, **({} if preset is None else PRESETS[preset]), **overrides}
