"""Noise by window: that of a window does not depend on the windows beside it, nor on the machine's other work."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, special
from torch.nn.functional import avg_pool2d

from cdt_fast.video.data.windows import Windows

LEVELS = 255.0
LITTLE_NOISE = 0.5  # gray levels: what rounding to bytes leaves
LEAST_DEVIATION = LITTLE_NOISE / LEVELS  # of less noise a network that divides by the deviation is told this
_MEDIAN_OF_NORMAL = 0.6744897501960817  # of the absolute values of normal numbers, in standard deviations
_PIXELS_FOR_NOISE = 2**21  # of larger frames every so many rows are enough
_PIECES_FOR_NOISE = 2**16
_STRIP = 16  # rows
# Best for the noise of cameras, coded or not: no smaller share of it in the finest differences, and a little more of it
# than the filter says.
_LEAST_FINE, _STRONGER = 0.4, 1.1
_TINY = 1e-12
_LEAST_CLIPPED = 1e-3  # share of the pixels that is worth the time
_LIKE = 0.35  # of a picture that is black itself, noise explains half of what is at 0
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
        yield frames + deviation[:, None, None, None] * drawn, frames, deviation


def _level(least: float, greatest: float, share: Tensor) -> Tensor:
    """Return levels of a range, evenly on a logarithmic scale, so that little noise counts as well; from 0 evenly."""
    return least * (greatest / least) ** share if least else greatest * share


class Noise(NamedTuple):
    """Noise as white noise after the filters `[a, 1 − 2a, a]` along rows and along columns, each with its a."""

    deviation: float
    blur: tuple[float, float]  # a along rows, a along columns; 0 of white noise


WHITE = 0.0, 0.0


def estimated_noise(frames: Tensor, told: float | None = None, *, coded: bool = False) -> Noise:
    """Return the noise in frames `[..., h, w]` of one scene, its deviation, which may be `told`, in their unit.

    The noise of a camera or a coder has little in the finest differences, and detail has much. So its variance, of
    white noise with as much, is read at half the size, where the lesser of two counts:

    - that of the changes between frames, at the .3-quantile of the blocks: a lower one misses noise that grows with the
      brightness, and a higher one takes motion for noise;
    - `mean λ_{i ≤ k}` of the ascending eigenvalues of the covariance of pieces `[frames, rows, columns]`, with the
      greatest k at which it is at most their median: the picture, moving too, is in few of them. A coder takes the
      noise out of some: of `coded` frames it is at least `-cov(x_t − x_{t−1}, x_{t+1} − x_t)`, at that quantile too,
      which is σ² of noise, as this turns back, and less of a picture that moves on.

    The share r of a direction's finest differences in it tells the blur: `r = (a² + (1 − 3a)²) / (a² + (1 − a)²)`. It
    is read in the blocks up to that quantile, and of both directions together in whole frames too, where the greater
    one counts, as motion looks blurred. The filter leaves the variance `((1 − 2a)² + 2a²) / (a² + (1 − a)²)` of it.

    Bars beside the picture and repeated frames are left out; a single picture, or a small one, has `finest_noise`.
    """
    frames = _without_bars(frames.reshape(-1, *frames.shape[-2:]))
    finest = finest_noise(frames)
    if min(frames.shape[-2:]) < 2 * _STRIP:
        return Noise(finest if told is None else told, WHITE)
    every = -(-frames.numel() // _PIXELS_FOR_NOISE)
    strips = frames[:, : frames.shape[1] // _STRIP * _STRIP].unflatten(1, (-1, _STRIP))[:, ::every]
    half = avg_pool2d(strips, 2)
    moves = [True, *(half[1:] != half[:-1]).flatten(1).any(1).tolist()]
    strips, half = strips[moves], half[moves]
    if len(half) == 1:
        return Noise(finest_noise(frames[:1]) if told is None else told, WHITE)
    variance, (quiet, across, down, both) = _changes(half, strips)
    least = max(_least_variance(half), _turning(half) if coded and len(half) > 3 else 0.0)
    coarse = 2 * max(0.0, min(variance, least)) ** 0.5
    share = min(1.0, max(both / quiet, finest / max(coarse, _TINY), _TINY))
    if told is not None:  # no more blurred than its own finest share says, (a² + (1 − 3a)²) / ((1 − 2a)² + 2a²)
        part = min(1.0, max(0.3, min(both, finest) / told))
        a = (3 - 2 * part - (4 * part - 1 - 2 * part**2) ** 0.5) / (10 - 6 * part)
        share = max(share, (a**2 + (1 - 3 * a) ** 2) / (a**2 + (1 - a) ** 2))
    uneven = min(1 / share, max(share, across / down))
    blur_across, left_across = _filter(share * uneven)
    blur_down, left_down = _filter(share / uneven)
    found = coarse * min(1.0, _STRONGER * (left_across * left_down) ** 0.5)
    return Noise(found if told is None else told, (blur_across, blur_down))


def _filter(share: float) -> tuple[float, float]:
    """Return the a of a direction by the share of its finest differences, and the variance that the filter leaves."""
    r = min(1.0, max(_LEAST_FINE, share))
    a = (3 - r - (6 * r - 1 - r**2) ** 0.5) / (10 - 2 * r)
    return a, ((1 - 2 * a) ** 2 + 2 * a**2) / (a**2 + (1 - a) ** 2)


def _without_bars(frames: Tensor) -> Tensor:
    """Return the part of frames `[T, h, w]` that is not as flat and still as its corners."""
    for corner in (0, -1):
        differs = (frames[:: -(-len(frames) // 4)] != frames[0, corner, corner]).any(0)  # four frames are enough
        if not differs.any():
            return frames[:1]
        rows, columns = (differs.any(along).nonzero() for along in (1, 0))
        frames = frames[:, int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    return frames


def _changes(half: Tensor, strips: Tensor) -> tuple[float, list[float]]:
    """Return the variance of white noise whose changes have the quantile found in blocks of strips `[T, n, h, w]` at
    half the size, and the deviations of white noise as in the blocks up to it: by the halves, and by the finest
    differences across, down and both."""
    changes, width = half.diff(dim=0), 2 * half.shape[-1]
    variances = (avg_pool2d(changes.square(), 4) - avg_pool2d(changes, 4).square()).mean(0) * (8 / 15)
    quantile = variances.quantile(0.3)
    quiet = variances <= quantile
    a, b, c, d = (strips[..., row::2, column:width:2].diff(dim=0) for row in (0, 1) for column in (0, 1))
    finest = (avg_pool2d(each.square(), 4).mean(0) / 8 for each in (b + d - a - c, c + d - a - b, a + d - b - c))
    found = [max(_TINY, each[quiet].mean().item()) ** 0.5 for each in (4 * variances, *finest)]
    # The quantile of χ² after Wilson and Hilferty; two changes on end share a frame.
    pairs = len(half) - 1
    spread = 2 / 9 * (1.5 - 0.5 / pairs) / (15 * pairs)
    return quantile.item() / (1 - spread - 0.5244 * spread**0.5) ** 3, found


def _turning(half: Tensor) -> float:
    """Return minus the covariance of successive changes, at a quantile of the blocks of strips `[T, n, h, w]`."""
    before, after = half[1:-1] - half[:-2], half[2:] - half[1:-1]
    back = (avg_pool2d(before, 4) * avg_pool2d(after, 4) - avg_pool2d(before * after, 4)).mean(0)
    return back.quantile(0.3).item() * (16 / 15)


def _least_variance(frames: Tensor) -> float:
    """Return the mean of the least eigenvalues of the covariance of pieces of strips `[T, n, h, w]`."""
    # As many numbers in a piece as a tenth of the pixels can tell the covariance of.
    length = min(8, max(2, min(len(frames) // 2, int((frames.numel() / 10) ** 0.5) // 9)))
    step = max(1, frames.numel() // (2 * _PIECES_FOR_NOISE))
    pieces = frames.unfold(0, length, 2).unfold(2, 3, 1).unfold(3, 3, step).flatten(4).flatten(0, 3)
    values = torch.linalg.eigvalsh(torch.cov(pieces.double().T))
    order = torch.arange(len(values), device=values.device)
    means = values.cumsum(0) / (order + 1)
    return means[means <= values[order // 2]][-1].item()


def unclipped(shown: Tensor, noisy: Tensor) -> Tensor:
    """Return denoised frames `[T, h, w]` in [0, 1] without what the clipping of the noise in `noisy` adds near 0 and 1.

    With `x = σ t` the mean of noisy pixels that were clipped at 0 is `σ (t Φ(t) + φ(t))`, which is inverted (as after
    Foi, "Clipped noisy images", 2009). σ is that of what was removed away from the ends. It is done where about as many
    pixels are at the end as such noise brings there: a picture that is black itself stays as it is.
    """
    if max((noisy <= 0).float().mean(), (noisy >= 1).float().mean()) < _LEAST_CLIPPED:
        return shown
    removed = (noisy - shown).square()
    deviation = removed.mean().sqrt()
    for _ in range(2):
        away = (shown - 0.5).abs() < 0.5 - min(2 * deviation, 0.25)
        deviation = removed[away].mean().sqrt() if away.any() else deviation
    t = np.linspace(0, 4, 1025)
    means = t * special.ndtr(torch.from_numpy(t)).numpy() + np.exp(-t * t / 2) / np.sqrt(2 * np.pi)
    inverse = torch.from_numpy(np.interp(t, means, t)).to(noisy)
    for _ in range(2):
        shown, noisy = 1 - shown, 1 - noisy
        found = torch.stack(
            [inverse[(frame * (256 / deviation)).nan_to_num(0).clamp(0, 1024).long()] for frame in shown]
        )
        clipped = (noisy <= 0).float().mean()
        if clipped >= _LEAST_CLIPPED and abs(special.ndtr(-found).mean() / clipped - 1) < _LIKE:
            shown = torch.where(found < inverse[-1], deviation * found, shown)
    return shown


def finest_noise(frames: Tensor) -> float:
    """Return the standard deviation of white noise in frames `[..., h, w]`, from the finest diagonal differences:
    `σ = median |x_{i,j} − x_{i,j+1} − x_{i+1,j} + x_{i+1,j+1}| / (2 · 0.6745)`, i even; 0 of a row or a column."""
    if min(frames.shape[-2:]) < 2:
        return 0.0
    step = 2 * -(-frames.numel() // _PIXELS_FOR_NOISE)
    across = (frames[..., 1::step, :] - frames[..., :-1:step, :]).diff(dim=-1)
    return across.abs_().median().item() / (2 * _MEDIAN_OF_NORMAL)
