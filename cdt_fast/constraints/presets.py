"""The options of the descent constraints, their defaults and the named presets; without torch, for `cdt-fast --help`.

`DEFAULTS` is the one place that the constructor of `DescentConstraints` and the settings of the command line take their
defaults from; a preset in `PRESETS` names what differs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cdt_fast.checks import InputError, suggestion

ObjectiveName = Literal["last", "depths", "log"]
Resilience = Literal["slack", "decay"]
Coupling = Literal["chain", "input", "detach", "absolute"]
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
    """A row of the paper's tables, as paper.toml has it."""

    task: str
    constraints: Mapping[str, Any]  # options of the constraints
    settings: Mapping[str, Mapping[str, Any]]  # those of `cdt-fast train`, by section
    pretrained: str  # the setting of [model] that has to name a pretrained network, or ""


_ROWS = tomllib.loads(Path(__file__).with_name("paper.toml").read_text("utf-8"))
_SHARED = _ROWS.pop("shared")["constraints"]
_SWITCHED_ON = {"constraints": {"constrained": True, "warmup_epochs": 1}}
PAPER_ROWS = {
    name: PaperRow(row["task"], _SHARED | row["constraints"], row["settings"] | _SWITCHED_ON, row.get("needs", ""))
    for name, row in _ROWS.items()
}
# What differs from the defaults. "video", "text" and "lm" are what `cdt-fast train` starts from.
PRESETS: dict[str, Mapping[str, Any]] = {
    # Of a denoiser all depths are wanted.
    "video": {"objective": "log", "margin": 0.01},
    # A hundred steps: slow multipliers gain nothing at the last depth, and exits lose.
    "text": {"reference": 0.9, "dual_lr": 0.05},
    # A rate of 0.02 is as good at the last depth, worse at exits, and not met either.
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


def bounds_by_position(bounds: Mapping[int, Any], depths: Sequence[int]) -> dict[int, Any]:
    """The bounds on depths, by the positions of these among the depths that are read."""
    for depth in bounds:
        if depth not in depths or isinstance(depth, bool):
            read = ", ".join(map(str, depths))
            raise InputError(f"bounds holds depth {depth!r}, which is not read: the depths are {read}")
    return {depths.index(depth): bound for depth, bound in bounds.items()}
