"""Leaving a denoiser early, window by window, by what its layers change; calibrated on validation windows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.video.noise import LEAST_DEVIATION

# What a layer costs, in units of the logarithm of the error: without a price the error alone counts, with the last one
# nothing is worth a second layer.
_NOTHING = 0.01  # dB
_PRICES = (0.0, *(10 ** (exponent / 8) for exponent in range(-28, 5)), 1e9)


class Exits(BaseModel):
    """When to leave a network of L layers.

    Attributes:
        thresholds: of depth l = 1..L−1: a window is left as it is there if its `change` is above; None: never.
        layers: that a window takes in the mean, where they were calibrated.
        gain: of PSNR there against all layers, in dB, the mean over windows.
    """

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid")

    thresholds: list[float | None]
    layers: float
    gain: float

    def threshold(self, depth: int) -> float | None:
        """Above which `change` a window is left at a depth; None: it is not."""
        return self.thresholds[depth - 1] if depth <= len(self.thresholds) else None


def change(depth: int, before: Tensor, after: Tensor, deviation: Tensor) -> Tensor:
    """How much of a window a layer has changed, `[b]`, of which a large one says that what follows gains little.

        c_1 = 1 − ‖E_1 − X‖² / (N σ²),    c_l = ‖E_l − E_{l−1}‖² / (N σ²)

    The first layer leaves of a window with much detail some of the noise; a later one that changes more than what is
    left of the noise takes detail away.

    Args:
        depth: l, from 1 on.
        before, after: E_{l−1}, where E_0 is the input X, and E_l, `[b, T, h, w]` of N pixels each.
        deviation: σ, `[b]`; at least `LEAST_DEVIATION` is taken, as by the network.
    """
    moved = (after - before).square().mean((1, 2, 3)) / deviation.clamp(min=LEAST_DEVIATION).square()
    return 1 - moved if depth == 1 else moved


def calibrated(errors: Tensor, changes: Tensor) -> list[Exits]:
    """The best exits at several prices of a layer, from the fewest errors to the fewest layers.

    From the last depth to the first the threshold is the one with which leaving costs least, error and layers, given
    the thresholds of the later depths.

    Args:
        errors: mean squared errors `[windows, L]` of depths 1..L.
        changes: `[windows, L−1]`, of depths 1..L−1.
    """
    logs = errors.double().clamp(min=torch.finfo(torch.float64).tiny).log()
    found: dict[tuple[float | None, ...], Exits] = {}
    for price in _PRICES:
        total, layers = logs[:, -1] + price * logs.shape[1], torch.full_like(logs[:, -1], logs.shape[1])
        thresholds: list[float | None] = []
        for depth in range(logs.shape[1] - 1, 0, -1):
            leaving = logs[:, depth - 1] + price * depth
            threshold = _threshold(changes[:, depth - 1].double(), leaving - total)
            thresholds.insert(0, threshold)
            if threshold is not None:
                left = changes[:, depth - 1] > threshold
                total, layers = torch.where(left, leaving, total), torch.where(left, float(depth), layers)
        gain = (logs[:, -1] - (total - price * layers)).mean().item() * 10 / math.log(10)
        found.setdefault(tuple(thresholds), Exits(thresholds=thresholds, layers=layers.mean().item(), gain=gain))
    return list(found.values())


def _threshold(changes: Tensor, costs: Tensor) -> float | None:
    """Above which changes the sum of costs is least; None: it is best to leave out none."""
    ordered, order = changes.sort(descending=True)
    sums = costs[order].cumsum(0)
    last = int(sums.argmin())
    if sums[last] >= 0:
        return None
    following = ordered[last + 1].item() if last + 1 < len(ordered) else ordered[last].item() - 1.0
    return (ordered[last].item() + following) / 2


def chosen(exits: Sequence[Exits], layers: int, budget: float | None) -> Exits | None:
    """The exits of the greatest gain that take no more layers in the mean than `budget`; None: nothing was calibrated.

    Without a budget those of the fewest layers that lose no more than `_NOTHING`: what a layer takes from windows that
    are unlike those of the validation is more.

    Raises:
        InputError: the budget is not from 1 to `layers`, or nothing was calibrated.
    """
    if budget is not None and not 1 <= budget <= layers:
        raise InputError(f"--budget must be from 1 to {layers} layers, got {budget:g}")
    if budget is None:
        best = max((each.gain for each in exits), default=0.0)
        good = [each for each in exits if each.gain >= best - _NOTHING]
        return min(good, key=lambda each: each.layers, default=None)
    if not exits:
        raise InputError(
            "--budget needs a denoiser that train video trains by default, and its evaluation: run "
            "`cdt-fast evaluate` on the run"
        )
    within = [each for each in exits if each.layers <= budget]
    if not within:
        raise InputError(f"--budget is {budget:g} layers, and none of the run's exits takes so few: evaluate it again")
    return max(within, key=lambda each: each.gain)
