"""PSNR and SSIM of denoised frames, and denoisers without weights, which a trained one has to beat."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cdt_fast.models.dictionary import cosine_transform
from cdt_fast.video.noise import LEVELS

# The factor of the noise's standard deviation that is customary for hard thresholds of an orthonormal transform.
THRESHOLD_FACTOR = 2.7
SHIFTS = 4  # grids of patches along each side that the shifted transform is the mean of
_SIDE, _DEVIATION = 11, 1.5  # of the window of SSIM, as in its paper
_BRIGHTNESS, _CONTRAST = 0.01**2, 0.03**2


def psnr_of(rmse: float) -> float:
    """Return `20 log10(255 / RMSE)` in dB of an error on 0..255; infinity where there is no error."""
    return 20 * math.log10(LEVELS / rmse) if rmse > 0 else math.inf


def ssim(frames: Tensor, clean: Tensor) -> Tensor:
    """Return the structural similarity of every frame (Wang et al., 2004), `[b, T]`.

        SSIM = mean over windows of (2 μ_x μ_y + C₁)(2 σ_xy + C₂) / ((μ_x² + μ_y² + C₁)(σ_x² + σ_y² + C₂))

    with Gaussian windows of 11 x 11 pixels and deviation 1.5 that lie within the frame (smaller where a frame is), and
    C₁ = 0.01², C₂ = 0.03², for frames `[b, T, h, w]` in [0, 1].
    """
    pair = torch.stack([frames, clean]).flatten(0, 2).unsqueeze(1)
    first, second = pair.chunk(2)
    moments = torch.cat([first, second, first * first, second * second, first * second])
    rows, columns = (_gaussian(min(_SIDE, length)).to(moments) for length in frames.shape[-2:])
    x, y, xx, yy, xy = torch.nn.functional.conv2d(moments, torch.outer(rows, columns)[None, None]).chunk(5)
    brightness = (2 * x * y + _BRIGHTNESS) / (x * x + y * y + _BRIGHTNESS)
    structure = (2 * (xy - x * y) + _CONTRAST) / ((xx - x * x) + (yy - y * y) + _CONTRAST)
    return (brightness * structure).mean((1, 2, 3)).view(clean.shape[:2])


def _gaussian(side: int) -> Tensor:
    position = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    return torch.softmax(-position.square() / (2 * _DEVIATION**2), 0)


def dct3d_denoise(frames: Tensor, noise_deviation: float, patch: int) -> Tensor:
    """Threshold the three-dimensional DCT of every patch of frames `[b, T, h, w]`, h and w multiples of `patch`."""
    batch, time, height, width = frames.shape
    space, transform = (cosine_transform(size).to(frames) for size in (patch, time))
    blocks = frames.view(batch, time, height // patch, patch, width // patch, patch)
    coefficients = torch.einsum("fi,btrick,gk->btrfcg", space, blocks, space)
    coefficients = torch.einsum("st,btrfcg->bsrfcg", transform, coefficients)
    # The mean is kept whatever its size: it is the brightness of the patch, not detail.
    kept = coefficients.abs() >= THRESHOLD_FACTOR * noise_deviation
    kept[:, :, :, 0, :, 0] = True
    coefficients = torch.einsum("st,bsrfcg->btrfcg", transform, coefficients * kept)
    return torch.einsum("fi,btrfcg,gk->btrick", space, coefficients, space).reshape(frames.shape)


def dct3d_shifted_denoise(frames: Tensor, noise_deviation: float, patch: int) -> Tensor:
    """Return the mean of `dct3d_denoise` over `SHIFTS²` grids of patches, each a part of a patch further."""
    places = [patch * number // SHIFTS for number in range(min(SHIFTS, patch))]
    height, width = frames.shape[-2:]
    total = torch.zeros_like(frames)
    for top in places:
        for left in places:
            moved = continued(frames, (left, -(left + width) % patch, top, -(top + height) % patch))
            total += dct3d_denoise(moved, noise_deviation, patch)[..., top : top + height, left : left + width]
    return total / len(places) ** 2


BASELINES: dict[str, Callable[[Tensor, float, int], Tensor]] = {
    "identity": lambda frames, noise_deviation, patch: frames,
    "dct3d_shifted": dct3d_shifted_denoise,
}


def continued(frames: Tensor, sides: tuple[int, int, int, int]) -> Tensor:
    """Return frames `[b, T, h, w]` with so many columns before and after, and rows before and after: their mirror image
    or, where they are too small for it, their border."""
    height, width = frames.shape[-2:]
    mirrored = max(sides[:2]) < width and max(sides[2:]) < height
    return torch.nn.functional.pad(frames, sides, mode="reflect" if mirrored else "replicate")
