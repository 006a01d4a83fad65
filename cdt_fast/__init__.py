"""cdt_fast: train transformers whose every layer lowers the loss.

`ops` holds the fused operations, `models` the networks built on them, `DescentConstraints` the constraints that make
every layer descend. `attach_layer_losses` gives a transformers model the losses of its depths; `with_descent` and
`DescentCallback` train it under constraints in transformers' Trainer, TRL's SFTTrainer and Lightning; `perturbed` adds
noise to its word embeddings. `denoise` removes the noise of a video. Training, data and the command line are in the
submodules of their names.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdt_fast import models, ops
    from cdt_fast.checks import InputError, MissingExtra
    from cdt_fast.constraints.constraints import DescentConstraints
    from cdt_fast.constraints.feasibility import FeasibilityReport
    from cdt_fast.integrations.lightning_callback import DescentCallback
    from cdt_fast.integrations.transformers_trainer import with_descent
    from cdt_fast.models.layer_losses import LayerLosses, attach_layer_losses
    from cdt_fast.sequence.perturbation import perturbed
    from cdt_fast.video.denoising import denoise

__version__ = "0.1.0"

__all__ = ["DescentCallback", "DescentConstraints", "FeasibilityReport", "InputError", "LayerLosses", "MissingExtra"]
__all__ += ["attach_layer_losses", "denoise", "models", "ops", "perturbed", "with_descent"]

# Where the names are. Imported when they are asked for: torch alone takes a second or two, for which
# `cdt-fast --help` need not wait.
_PLACES = {
    "constraints.constraints": ("DescentConstraints",),
    "constraints.feasibility": ("FeasibilityReport",),
    "checks": ("InputError", "MissingExtra"),
    "integrations.lightning_callback": ("DescentCallback",),
    "integrations.transformers_trainer": ("with_descent",),
    "models.layer_losses": ("LayerLosses", "attach_layer_losses"),
    "sequence.perturbation": ("perturbed",),
    "video.denoising": ("denoise",),
}


def __getattr__(name: str) -> Any:
    if name in ("models", "ops"):
        return importlib.import_module(f"{__name__}.{name}")
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
