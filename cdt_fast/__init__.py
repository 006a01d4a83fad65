"""cdt_fast: train transformers whose every layer lowers the loss.

`ops` holds the fused operations, `models` the networks built on them, `DescentConstraints` the constraints that make
every layer descend; `attach_layer_losses` gives a transformers model the losses of its depths. Training, data and the
command line are in the submodules of their names.
"""

from cdt_fast import models, ops
from cdt_fast.descent import DescentConstraints
from cdt_fast.errors import InputError, MissingExtra
from cdt_fast.feasibility import FeasibilityReport
from cdt_fast.models.layer_losses import attach_layer_losses, predicted_overhead

__version__ = "0.1.0"

__all__ = [
    "DescentConstraints",
    "FeasibilityReport",
    "InputError",
    "MissingExtra",
    "attach_layer_losses",
    "models",
    "ops",
    "predicted_overhead",
]
