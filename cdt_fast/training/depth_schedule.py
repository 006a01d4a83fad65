"""Baselines that train without constraints, and other depths from step to step (docs/maths.md §2).

    "random"        C = e_d, d drawn uniformly from 1..L anew for every step
    "gradual"       C_l = 1 from step (L − l) S / (2L) of S on, for l = L..1: from the last exit to the first
    "rotational"    C_L = 1, and C_l = 1 at every R-th step, one after the other: where l + step is a multiple of R

The weights are w = C; with the objective "depths" and its coefficients c they are w_l = C_l c_l / Σ_k C_k c_k. The
last two are then the curricula of LayerSkip (Elhoushi et al., 2024, §3.1.2), whose c are the coefficients "layerskip".

The weights are numbers of the host, so that a depth of weight zero costs no backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cdt_fast.errors import InputError
from cdt_fast.training.settings import DepthSchedule, RunSettings


def scheduled_weights(
    schedule: DepthSchedule,
    layers: int,
    step: int,
    steps: int,
    seed: int,
    rotation: int = 1,
    coefficients: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The weights of the depths 0..L at a step of a training of `steps`; a function of its arguments alone.

    `layers` is L, `rotation` R, `seed` is of the draws of "random", and `coefficients` are c `[L+1]` (None: w = C).
    """
    if schedule == "random":
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        depth = 1 + int(torch.randint(layers, (), generator=generator))
        chosen = [other == depth for other in range(layers + 1)]
    elif schedule == "gradual":
        chosen = [False, *(2 * layers * step >= (layers - depth) * steps for depth in range(1, layers + 1))]
    else:
        chosen = [False, *((depth + step) % rotation == 0 for depth in range(1, layers)), True]
    if coefficients is None:
        return tuple(map(float, chosen))
    weights = [c if taken else 0.0 for c, taken in zip(coefficients, chosen, strict=True)]
    total = sum(weights)
    return tuple(weight / total if total else 0.0 for weight in weights)


def check_depth_schedule(settings: RunSettings, ranks: int = 1) -> None:
    """Require that nothing else weighs the depths, and that one process trains: others would wait for gradients."""
    schedule, rotation = settings.training.depth_schedule, settings.training.depth_rotation
    if (rotation is not None) != (schedule == "rotational"):
        raise InputError(
            f"[training] depth_rotation is {rotation} and depth_schedule {schedule!r}: 'rotational' alone needs, and "
            "has, a rotation, the steps between two of one depth"
        )
    if schedule is None:
        return
    if ranks > 1:
        raise InputError(f"[training] depth_schedule is {schedule!r}, which trains in one process, got {ranks}")
    if settings.constrained or settings.objective == "log" or (settings.objective == "depths" and schedule == "random"):
        raise InputError(
            f"[training] depth_schedule is {schedule!r}, which weighs the depths, as do constraints and an objective: "
            "train with --no-constrained and without --objective"
        )
