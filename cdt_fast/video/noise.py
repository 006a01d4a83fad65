"""Noise by window: that of a window does not depend on the windows beside it, nor on the machine's other work."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cdt_fast.video.data.windows import Windows

LEVELS = 255.0
LITTLE_NOISE = 0.5  # gray levels: what rounding to bytes leaves
LEAST_DEVIATION = LITTLE_NOISE / LEVELS  # of less noise a network that divides by the deviation is told this
_MEDIAN_OF_NORMAL = 0.6744897501960817  # of the absolute values of normal numbers, in standard deviations
_PIXELS_FOR_NOISE = 2**20  # of larger frames every so many pairs of rows are enough, whose estimate is good to .2 %
# Noise of the evaluation: the same for every run, and apart from the noise of any training.
_NOISE_SEED = 20_260_117
_GOLDEN = 0.6180339887498949


def add_noise_by_window(
    clean: Tensor, noise: tuple[float, float], sigma: float, generator: torch.Generator, seeds: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return x = s + γ σ ε with ε ~ N(0, 1), and the standard deviation of the noise `[windows]`. `clean` has the
    windows one after the other along its first dimension: frames, or the tokens of `to_patches`. γ is drawn from the
    range `noise` for each window, and `sigma` is in the unit of `clean`."""
    least, greatest = noise
    noisy, deviations = [], []
    for window, seed in zip(clean.chunk(len(seeds)), seeds, strict=True):
        generator.manual_seed(seed)
        if least == greatest:
            deviation = clean.new_full((), least * sigma)
        else:
            share = torch.rand((), generator=generator, device=clean.device, dtype=clean.dtype)
            deviation = sigma * _level(least, greatest, share)
        drawn = torch.randn(window.shape, generator=generator, device=clean.device, dtype=clean.dtype)
        noisy.append(window + deviation * drawn)
        deviations.append(deviation)
    return torch.cat(noisy), torch.stack(deviations)


def unit_noise_batches(
    windows: Windows, device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the numbers of all windows `[b]`, their frames `[b, T, h, w]` in [0, 1], and noise of deviation 1."""
    generator = torch.Generator(device)
    together = max(1, 2**19 // (windows.window * windows.size**2))  # about half a million pixels
    for indices in torch.arange(len(windows)).split(together):
        frames = windows.batch(indices).to(device).to(dtype) / LEVELS
        drawn = torch.empty_like(frames)
        for noise, index in zip(drawn.split(1), indices.tolist(), strict=True):
            noise.normal_(generator=generator.manual_seed(_NOISE_SEED + index))
        yield indices, frames, drawn


def noisy_batches(
    windows: Windows, noise: tuple[float, float], sigma: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield all frames of `unit_noise_batches` with noise, of levels spread as in training, and without, and its
    standard deviation `[b]`."""
    for indices, frames, drawn in unit_noise_batches(windows, device, dtype):
        deviation = (sigma * _level(*noise, (0.5 + indices.double() * _GOLDEN) % 1)).to(device, dtype)
        yield with_noise(frames, deviation, drawn), frames, deviation


def _level(least: float, greatest: float, share: Tensor) -> Tensor:
    """Return levels of a range, evenly on a logarithmic scale, so that little noise counts as well; from 0 evenly."""
    return least * (greatest / least) ** share if least else greatest * share


def with_noise(frames: Tensor, deviation: Tensor, drawn: Tensor) -> Tensor:
    """Return frames `[b, T, h, w]` with noise of a deviation `[b]`, of what was drawn with deviation 1."""
    return frames + deviation[:, None, None, None] * drawn


def estimated_noise(frames: Tensor) -> float:
    """Return the standard deviation of white noise in frames `[..., h, w]`, from the finest diagonal differences, which
    have little else: `σ = median |x_{i,j} − x_{i,j+1} − x_{i+1,j} + x_{i+1,j+1}| / (2 · 0.6745)`, i even; or else 0.
    Rows and columns that are flat and the same in all frames, bars beside the picture, are left out."""
    if min(frames.shape[-2:]) < 2:
        return 0.0
    step = 2 * -(-frames.numel() // _PIXELS_FOR_NOISE)
    below, above = (rows.flatten(0, -3) for rows in (frames[None, ..., 1::step, :], frames[None, ..., :-1:step, :]))
    across = (below - above).diff(dim=-1)
    first = above[0]
    still = ((below == first) & (above == first)).all(0)
    dead = still[:, 1:] & still[:, :-1] & (first.diff(dim=-1) == 0)
    # Bars span the picture. Flat still parts inside of it count: else a clean screen recording would be of its edges.
    inside = across[:, ~dead.all(1)][..., ~dead.all(0)]
    seen = inside if inside.numel() else across
    return seen.abs_().median().item() / (2 * _MEDIAN_OF_NORMAL)
