"""Denoisers without weights, which a trained model has to beat: hard thresholds of a cosine transform."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The factor of the noise's standard deviation that is customary for hard thresholds of an orthonormal transform.
THRESHOLD_FACTOR = 2.7


def orthonormal_dct(size: int) -> Tensor:
    """The orthonormal DCT-II `[size, size]` in float32, a frequency a row."""
    position = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (position + 0.5) * position.unsqueeze(1)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(torch.float32)


def dct_denoise(frames: Tensor, noise_deviation: float, patch: int) -> Tensor:
    """Hard threshold of the DCT of every patch of every frame.

    Args:
        frames: `[b, T, h, w]`, h and w multiples of `patch`.
        noise_deviation: standard deviation of the noise, in the units of `frames`.
        patch: side of a patch in pixels.
    """
    return _threshold(frames, noise_deviation, patch, over_time=False)


def dct3d_denoise(frames: Tensor, noise_deviation: float, patch: int) -> Tensor:
    """Hard threshold of the three-dimensional DCT of every patch position over the window; arguments as above."""
    return _threshold(frames, noise_deviation, patch, over_time=True)


def _threshold(frames: Tensor, noise_deviation: float, patch: int, over_time: bool) -> Tensor:
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
