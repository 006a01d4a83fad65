"""From the settings of a run to its constraints, and how many steps an epoch has."""

from __future__ import annotations

import math
from typing import Any

import torch

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.training.settings import RunSettings


def samples_per_step(settings: RunSettings) -> int:
    """Samples (windows, texts, sequences) that one optimizer step sees."""
    return settings.training.batch * settings.training.accumulate


def steps_per_epoch(settings: RunSettings, samples: int) -> int:
    """Optimizer steps that see every one of `samples` once; the last may see fewer than the others."""
    return math.ceil(samples / samples_per_step(settings))


def build_constraints(
    settings: RunSettings, data: Any, device: torch.device | str, num_constraints: int
) -> DescentConstraints:
    """The constraints that the settings describe, on `device`, nothing recorded yet.

    Args:
        settings: of the run.
        data: what the run trains on, `train` of it: it says how long an epoch is; None: no warm-up.
        device: where the multipliers are.
        num_constraints: L.

    Raises:
        InputError: the settings do not fit each other or the number of layers.
    """
    chosen = settings.constraints
    epoch = 0 if data is None else steps_per_epoch(settings, len(data.train))
    return DescentConstraints(
        num_constraints,
        chosen.rate,
        chosen.reference,
        reference_mode=chosen.reference_mode,
        coupling=chosen.coupling,
        normalize=chosen.normalize,
        margin=chosen.margin,
        dual=chosen.dual,
        dual_lr=chosen.dual_lr,
        betas=tuple(chosen.betas),  # pyright: ignore[reportArgumentType]  # how many is checked there
        proportional_gain=chosen.proportional_gain,
        smoothing=chosen.smoothing,
        resilience=None if chosen.resilience == "none" else chosen.resilience,
        slack_cost=chosen.slack_cost,
        slack_lr=chosen.slack_lr,
        dual_every=chosen.dual_every,
        warmup_steps=chosen.warmup_epochs * epoch,
        device=device,
    )
