"""cdt_fast: train transformers whose every layer lowers the loss.

`ops` holds the fused operations, `nn` the same as modules, `models` the networks built on them, `DescentConstraints`
the constraints that make every layer descend. `attach_layer_losses` gives a transformers model the losses of its
depths; `with_descent` and `DescentCallback` train it under constraints in transformers' Trainer, TRL's SFTTrainer and
Lightning; `perturbed` adds noise to its word embeddings. Training, data and the command line are in the submodules of
their names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdt_fast import models, nn, ops
    from cdt_fast.constraints.descent import DescentConstraints
    from cdt_fast.constraints.feasibility import FeasibilityReport
    from cdt_fast.errors import InputError, MissingExtra
    from cdt_fast.integrations import DescentCallback, with_descent
    from cdt_fast.models.layer_losses import LayerLosses, attach_layer_losses, predicted_overhead
    from cdt_fast.sequence.perturbation import perturbed

__version__ = "0.1.0"

__all__ = [
    "DescentCallback",
    "DescentConstraints",
    "FeasibilityReport",
    "InputError",
    "LayerLosses",
    "MissingExtra",
    "attach_layer_losses",
    "models",
    "nn",
    "ops",
    "perturbed",
    "predicted_overhead",
    "with_descent",
]

# Where each public name is; None: a module of that name. Imported when it is asked for: torch alone takes a second or
# two, for which `cdt-fast --help` need not wait.
_PLACES = {
    "DescentCallback": "cdt_fast.integrations",
    "DescentConstraints": "cdt_fast.constraints.descent",
    "FeasibilityReport": "cdt_fast.constraints.feasibility",
    "InputError": "cdt_fast.errors",
    "LayerLosses": "cdt_fast.models.layer_losses",
    "MissingExtra": "cdt_fast.errors",
    "attach_layer_losses": "cdt_fast.models.layer_losses",
    "models": None,
    "nn": None,
    "ops": None,
    "perturbed": "cdt_fast.sequence.perturbation",
    "predicted_overhead": "cdt_fast.models.layer_losses",
    "with_descent": "cdt_fast.integrations",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _PLACES[name]
    value = (
        importlib.import_module(f"cdt_fast.{name}") if place is None else getattr(importlib.import_module(place), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
