"""Denoisers without weights, which a trained model has to beat: hard thresholds of a cosine transform, and a blur."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

# The factor of the noise's standard deviation that is customary for hard thresholds of an orthonormal transform.
THRESHOLD_FACTOR = 2.7
# Grids of patches along each side that the shifted transform is the mean of.
SHIFTS = 4


def orthonormal_dct(size: int) -> Tensor:
    """The orthonormal DCT-II `[size, size]` in float32, a frequency a row."""
    position = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (position + 0.5) * position.unsqueeze(1)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(torch.float32)


def dct_denoise(frames: Tensor, noise_deviation: float, patch: int, over_time: bool = False) -> Tensor:
    """Hard threshold of the DCT of every patch of every frame.

    Args:
        frames: `[b, T, h, w]`, h and w multiples of `patch`.
        noise_deviation: standard deviation of the noise, in the units of `frames`.
        patch: side of a patch in pixels.
        over_time: of the three-dimensional DCT of every patch position over the window.
    """
    batch, time, height, width = frames.shape
    space = orthonormal_dct(patch).to(frames)
    blocks = frames.view(batch, time, height // patch, patch, width // patch, patch)
    coefficients = torch.einsum("fi,btrick,gk->btrfcg", space, blocks, space)
    transform = orthonormal_dct(time).to(frames)
    if over_time:
        coefficients = torch.einsum("st,btrfcg->bsrfcg", transform, coefficients)
    # The mean is kept whatever its size: it is the brightness of the patch, not detail.
    kept = coefficients.abs() >= THRESHOLD_FACTOR * noise_deviation
    kept[:, :, :, 0, :, 0] = True
    coefficients = coefficients * kept
    if over_time:
        coefficients = torch.einsum("st,bsrfcg->btrfcg", transform, coefficients)
    return torch.einsum("fi,btrfcg,gk->btrick", space, coefficients, space).reshape(frames.shape)


dct3d_denoise = partial(dct_denoise, over_time=True)


def dct3d_shifted_denoise(frames: Tensor, noise_deviation: float, patch: int) -> Tensor:
    """The mean of `dct3d_denoise` over `SHIFTS²` grids of patches, each a part of a patch further; arguments as above.

    At the borders the frames are continued by their mirror image.
    """
    places = [patch * number // SHIFTS for number in range(min(SHIFTS, patch))]
    height, width = frames.shape[-2:]
    total = torch.zeros_like(frames)
    for top in places:
        for left in places:
            moved = continued(frames, (left, -(left + width) % patch, top, -(top + height) % patch))
            total += dct3d_denoise(moved, noise_deviation, patch)[..., top : top + height, left : left + width]
    return total / len(places) ** 2


def blur(frames: Tensor, noise_deviation: float, patch: int) -> Tensor:
    """The mean of 3 x 3 pixels, whatever the noise; arguments as above."""
    mirrored = torch.nn.functional.pad(frames, (1, 1, 1, 1), mode="reflect")
    return torch.nn.functional.avg_pool2d(mirrored, 3, stride=1)


def continued(frames: Tensor, sides: tuple[int, int, int, int]) -> Tensor:
    """Frames `[b, T, h, w]` with so many columns before and after them, and rows before and after them.

    They are continued by their mirror image, where they are large enough for it, else by their border.
    """
    height, width = frames.shape[-2:]
    mirrored = max(sides[:2]) < width and max(sides[2:]) < height
    return torch.nn.functional.pad(frames, sides, mode="reflect" if mirrored else "replicate")
