"""Noise by window: that of a window does not depend on the windows beside it, nor on the machine's other work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cdt_fast.video.data import Windows, add_noise

LEVELS = 255.0

# Noise of the evaluation: the same for every run, and apart from the noise of any training.
_NOISE_SEED = 20_260_117


def add_noise_by_window(
    clean: Tensor, gamma: float, sigma: float, generator: torch.Generator, seeds: Sequence[int]
) -> Tensor:
    """`add_noise` with a seed a window.

    Args:
        clean: the windows, one after the other along the first dimension: frames, or the tokens of `to_patches`.
        gamma, sigma: as in `add_noise`.
        generator: of the device of `clean`; it is seeded anew for each window.
        seeds: one a window.
    """
    noisy = []
    for window, seed in zip(clean.chunk(len(seeds)), seeds, strict=True):
        generator.manual_seed(seed)
        noisy.append(add_noise(window, gamma, sigma, generator))
    return torch.cat(noisy)


def noisy_batches(
    windows: Windows,
    gamma: float,
    sigma: float,
    device: torch.device,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Tensor, Tensor]]:
    """`(noisy, clean)` frames `[b, T, h, w]` in [0, 1] of all windows; the noise depends on the window alone."""
    generator = torch.Generator(device)
    for start in range(0, len(windows), batch):
        indices = range(start, min(start + batch, len(windows)))
        frames = windows.batch(indices).to(device).to(dtype) / LEVELS
        seeds = [_NOISE_SEED + index for index in indices]
        yield add_noise_by_window(frames, gamma, sigma, generator, seeds), frames
