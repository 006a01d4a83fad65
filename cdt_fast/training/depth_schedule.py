"""Baselines that train without constraints, and other depths from step to step (docs/maths.md §2).

    "random"    w = e_d, d drawn uniformly from 1..L anew for every step
    "gradual"   w_l = 1 from step (L − l) S / (2L) of S on, for l = L..1: from the last exit to the first

The weights are numbers of the host, so that a depth of weight zero costs no backward.
"""

from __future__ import annotations

from typing import Literal

import torch

from cdt_fast.errors import InputError
from cdt_fast.training.settings import RunSettings

_SPREAD = 1_000_003  # seeds of runs apart
_SEEDS = 2**63


def scheduled_weights(
    schedule: Literal["random", "gradual"], layers: int, step: int, steps: int, seed: int
) -> tuple[float, ...]:
    """The weights of the depths 0..L at a step of a training of `steps`; a function of its arguments alone."""
    if schedule == "random":
        generator = torch.Generator().manual_seed((seed * _SPREAD + step) % _SEEDS)
        depth = 1 + int(torch.randint(layers, (), generator=generator))
        return tuple(float(other == depth) for other in range(layers + 1))
    return (0.0, *(float(2 * layers * step >= (layers - depth) * steps) for depth in range(1, layers + 1)))


def check_depth_schedule(settings: RunSettings, ranks: int = 1) -> None:
    """Require that nothing else weighs the depths, and that one process trains.

    Raises:
        InputError: constraints or an objective do, or several processes would wait for gradients that no depth gives.
    """
    schedule = settings.training.depth_schedule
    if schedule is None:
        return
    if ranks > 1:
        raise InputError(f"[training] depth_schedule is {schedule!r}, which trains in one process, got {ranks}")
    for other, present in (("constraints", settings.constrained), ("an objective", settings.objective != "last")):
        if present:
            remedy = "--no-constrained" if settings.constrained else "--no-constrained and without --objective"
            raise InputError(
                f"[training] depth_schedule is {schedule!r}, which weighs the depths, and so do {other}: train with "
                f"{remedy}"
            )
