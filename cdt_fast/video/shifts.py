"""What clips go through besides white noise: other noise, blur, compression, lost frames, a light that changes."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cdt_fast.errors import require
from cdt_fast.video.noise import LEVELS

# Clean frames `[T, h, w]` in [0, 1] and a seeded generator to what is seen of them.
Shift = Callable[[Tensor, torch.Generator], Tensor]
_SIGMA = 20.0  # gray levels of the white noise beside what is no noise itself
_EVERY = 4  # frames


def _white(frames: Tensor, generator: torch.Generator, sigma: float = _SIGMA) -> Tensor:
    return frames + sigma / LEVELS * torch.randn(frames.shape, generator=generator)


def _poisson(frames: Tensor, generator: torch.Generator, peak: float = 30.0) -> Tensor:
    """Photons that are counted, `peak` of them where a frame is white."""
    return torch.poisson(peak * frames.clamp(0, 1), generator=generator) / peak


def _salt_and_pepper(frames: Tensor, generator: torch.Generator, share: float = 0.05) -> Tensor:
    drawn = torch.rand(frames.shape, generator=generator)
    return frames.masked_fill(drawn < share / 2, 0.0).masked_fill(drawn > 1 - share / 2, 1.0)


def _blur(frames: Tensor, generator: torch.Generator, deviation: float = 1.0) -> Tensor:
    """A Gaussian of a deviation in pixels, then white noise."""
    reach = torch.arange(-3, 4, dtype=frames.dtype)
    kernel = torch.exp(-0.5 * (reach / deviation) ** 2)
    kernel = (kernel / kernel.sum()).view(1, 1, 1, -1)
    mirrored = torch.nn.functional.pad(frames.unsqueeze(1), (3, 3, 3, 3), mode="reflect")
    along = torch.nn.functional.conv2d(mirrored, kernel)
    return _white(torch.nn.functional.conv2d(along, kernel.mT).squeeze(1), generator)


def _jpeg(frames: Tensor, generator: torch.Generator, quality: int = 20) -> Tensor:
    image = require("PIL.Image", "video", "compressing frames as JPEG")
    found = []
    for frame in (frames * LEVELS).round().clamp(0, 255).byte().numpy():
        file = io.BytesIO()
        image.fromarray(frame).save(file, "jpeg", quality=quality)
        found.append(np.asarray(image.open(file), dtype=np.float32))
    return torch.from_numpy(np.stack(found)).to(frames) / LEVELS


def _dropped(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Every fourth frame is black but for the noise."""
    kept = torch.arange(len(frames)) % _EVERY != _EVERY - 1
    return _white(frames * kept.view(-1, 1, 1), generator)


def _frozen(frames: Tensor, generator: torch.Generator) -> Tensor:
    """In place of every fourth frame stands the one before it, its noise too."""
    index = torch.arange(len(frames))
    late = index % _EVERY == _EVERY - 1
    return _white(frames, generator)[index - late.long()]


def _drifting(frames: Tensor, generator: torch.Generator, levels: float = 40.0) -> Tensor:
    """It becomes brighter evenly, by so many gray levels from the first frame to the last; and white noise."""
    drift = torch.linspace(0, levels / LEVELS, len(frames)) if len(frames) > 1 else torch.zeros(1)
    return _white(frames + drift.view(-1, 1, 1), generator)


SHIFTS: dict[str, Shift] = {
    "Poisson, 30 photons": _poisson,
    "salt and pepper, 5 %": _salt_and_pepper,
    "blur and σ 20": _blur,
    "JPEG, quality 20": _jpeg,
    "lost frames and σ 20": _dropped,
    "frozen frames and σ 20": _frozen,
    "drift and σ 20": _drifting,
}


def seen(clean: Tensor, at: float | str, generator: torch.Generator) -> Tensor:
    """Frames `[T, h, w]` with white noise of a standard deviation in gray levels, or after one of `SHIFTS`."""
    return SHIFTS[at](clean, generator) if isinstance(at, str) else _white(clean, generator, at)
