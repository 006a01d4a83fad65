"""The noise that a denoiser is trained and tested with."""

from __future__ import annotations

import math

import torch

from cdt_fast.errors import InputError


def add_noise(
    clean: torch.Tensor, gamma: float, sigma: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """x = s + γ σ ε with ε ~ N(0, 1).

    Args:
        clean: s, any shape, floating point.
        gamma: γ, the noise level; 0 leaves the values as they are.
        sigma: σ, the standard deviation of the clean training data in the units of `clean`.
        generator: of the device of `clean`; draws the noise, so that it can be drawn again.

    Returns:
        A new tensor, with the shape, dtype and device of `clean`.

    Raises:
        InputError: `clean` is not floating point, or γ or σ is negative or not finite.
    """
    if not clean.is_floating_point():
        raise InputError(f"clean has dtype {clean.dtype}; expected floating point (divide uint8 frames by 255)")
    for name, value in (("gamma", gamma), ("sigma", sigma)):
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{name} is {value}; expected a finite number, zero or more")
    noise = torch.randn(clean.shape, generator=generator, device=clean.device, dtype=clean.dtype)
    return clean + gamma * sigma * noise
