"""How like its original a denoised frame is: PSNR and SSIM."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cdt_fast.video.noise import LEVELS

_SIDE, _DEVIATION = 11, 1.5  # of the window of SSIM, as in its paper
_BRIGHTNESS, _CONTRAST = 0.01**2, 0.03**2


def psnr_of(rmse: float) -> float | None:
    """`20 log10(255 / RMSE)` in dB of an error on 0..255; None where there is no error."""
    return 20 * math.log10(LEVELS / rmse) if rmse > 0 else None


def mean_psnr(values: Sequence[float | None]) -> float | None:
    """The plain mean over noise levels; None where one of them has no error."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def ssim(frames: Tensor, clean: Tensor) -> Tensor:
    """The structural similarity of every frame (Wang et al., 2004), `[b, T]`.

        SSIM = mean over windows of (2 μ_x μ_y + C₁)(2 σ_xy + C₂) / ((μ_x² + μ_y² + C₁)(σ_x² + σ_y² + C₂))

    with Gaussian windows of 11 x 11 pixels and deviation 1.5 that lie within the frame (smaller where a frame is), and
    C₁ = 0.01², C₂ = 0.03².

    Args:
        frames, clean: `[b, T, h, w]`, values in [0, 1].
    """
    pair = torch.stack([frames, clean]).flatten(0, 2).unsqueeze(1)
    first, second = pair.chunk(2)
    moments = torch.cat([first, second, first * first, second * second, first * second])
    for axis, shape in ((2, (1, 1, -1, 1)), (3, (1, 1, 1, -1))):
        weights = _gaussian(min(_SIDE, moments.shape[axis])).to(moments)
        moments = torch.nn.functional.conv2d(moments, weights.view(shape))
    x, y, xx, yy, xy = moments.chunk(5)
    brightness = (2 * x * y + _BRIGHTNESS) / (x * x + y * y + _BRIGHTNESS)
    structure = (2 * (xy - x * y) + _CONTRAST) / ((xx - x * x) + (yy - y * y) + _CONTRAST)
    return (brightness * structure).mean((1, 2, 3)).view(clean.shape[:2])


def _gaussian(side: int) -> Tensor:
    position = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    weights = torch.exp(-position.square() / (2 * _DEVIATION**2))
    return weights / weights.sum()
