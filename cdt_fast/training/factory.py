"""The constraints of a run and its steps an epoch, from its settings."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from cdt_fast.checks import InputError
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.constraints.presets import DEFAULTS
from cdt_fast.training.settings import RunSettings

# The warm-up of a training without constraints: they only weigh the depths by the objective, and judge the result.
NEVER = 2**62


def steps_per_epoch(settings: RunSettings, samples: int) -> int:
    """Return the optimizer steps that see each of `samples` once; the last may see fewer than the others."""
    return math.ceil(samples / (settings.training.batch * settings.training.accumulate))


def warmup_steps(settings: RunSettings, samples: int) -> int:
    """Return the optimizer steps with the constraints off: all, if the run has no constraints."""
    return settings.constraints.warmup_epochs * steps_per_epoch(settings, samples) if settings.constrained else NEVER


def _bounds(settings: RunSettings) -> dict[int, Any] | None:
    """Return the bounds of the settings, by the positions of their depths among the taps."""
    given, taps = settings.constraints.bounds, getattr(settings.model, "taps", None)
    if given is None or taps is None:
        return given
    for depth in given:
        if depth not in taps:
            raise InputError(f"[constraints] bounds holds depth {depth}, which is not read: --taps are {taps}")
    return {taps.index(depth): value for depth, value in given.items()}


def check_trained_depths(settings: RunSettings) -> None:
    """Refuse a bound at depth 0 if nothing trains there."""
    reason, chosen = settings.untrained_depth, settings.constraints
    referred = chosen.reference_mode == "constraint" and chosen.reference is not None
    for name, holds in (("reference_mode constraint", referred), ("bounds", 0 in (chosen.bounds or {}))):
        if settings.constrained and reason and holds:
            raise InputError(f"[constraints] {name} must not be of depth 0, {reason}: nothing trains there")


def build_constraints(
    settings: RunSettings, num_constraints: int, largest_reference: float | None = None
) -> DescentConstraints:
    """Build the constraints that the settings describe, on the CPU.

    A reference that is a number is at most `largest_reference`, the loss of a guess: above it the first layer could
    raise the loss and keep its bound.

    Raises:
        InputError: the settings do not fit each other or the number of layers.
    """
    chosen = settings.constraints
    options = {name: getattr(chosen, name) for name in asdict(DEFAULTS) if hasattr(chosen, name)}
    options |= {
        "objective": settings.objective,
        "coefficients": settings.coefficients,
        "bounds": _bounds(settings),
    }
    if largest_reference is not None and isinstance(chosen.reference, float):
        options["reference"] = min(chosen.reference, largest_reference)
    constraints = DescentConstraints(num_constraints, **options)
    if settings.constrained and not chosen.warmup_epochs and constraints.needs_warmup:
        raise InputError(
            "[constraints] bounds holds a factor of the loss at the end of the warm-up, but warmup_epochs is 0: give "
            "it a warm-up"
        )
    return constraints
