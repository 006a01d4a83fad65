"""Generated scenes of shapes that hide each other: half of what a denoiser is trained on, and the demo clip."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdt_fast.checks import InputError

_LEAVES = (60, 160)  # shapes of a generated picture
_SMALLEST = 4.0  # the radius that half of what is cast is within a factor of 1.4 of, in pixels
_PAN = 2.5  # of the camera over them along each axis, in pixels a frame
_TURN, _ZOOM = 0.02, 0.01  # of the camera, radians and a share a frame
_PIECES = 6  # that move across the demo clip


def demo_clip(frames: int = 240, size: int = 160, seed: int = 0) -> np.ndarray:
    """Return the demo clip, uint8 [frames, size, size]: pieces of one scene move across another; size is 8 or more."""
    if frames < 1 or size < 8:
        raise InputError(f"frames is {frames} and size is {size}; expected at least 1 and 8")
    draw, side = np.random.default_rng(seed), size // 4
    clip = np.repeat(_leaves(size, draw)[None], frames, 0)
    for _ in range(_PIECES):
        piece, start, speed = _leaves(side, draw), draw.uniform(0, size, 2), draw.uniform(-2, 2, 2)
        for number, frame in enumerate(clip):  # what leaves on one side comes back on the other
            paste(frame, piece, *(np.rint(start + speed * number).astype(int) % (size + side) - side).tolist())
    return np.rint(clip).astype(np.uint8)


def paste(picture: Any, piece: Any, top: int, left: int) -> None:
    """Write what falls inside of a picture `[h, w]` of a piece of it at some place, in place."""
    there = picture[max(0, top) : max(0, top + piece.shape[0]), max(0, left) : max(0, left + piece.shape[1])]
    there[:] = piece[max(0, -top) :, max(0, -left) :][: there.shape[0], : there.shape[1]]


def moving_leaves(frames: int, size: int, draw: np.random.Generator) -> Tensor:
    """Return float32 `[frames, size, size]` in 0..255: a camera pans, and may turn or zoom, over "dead leaves".

    These are shapes that hide each other, whose sizes follow a power law, as in photographs; denoisers trained on them
    do nearly as well on photographs as those trained on photographs (Achddou, Gousseau and Ladjal, "Synthetic images as
    a regularity prior for image restoration neural networks", 2021).
    """
    side = 2 * size
    picture = torch.from_numpy(_leaves(side, draw))[None, None]
    if draw.random() < 0.5:
        picture = torch.nn.functional.avg_pool2d(picture, 3, 1, 1)
    mean = picture.mean()
    picture = mean + draw.uniform(0.2, 1) * (picture - mean)
    times = np.arange(frames) - frames / 2
    pan = 2 * _PAN / side * draw.uniform(-1, 1, 2) * (draw.random() < 0.8)
    turned, zoomed = ((draw.random() < 0.3) * draw.uniform(-most, most) * times for most in (_TURN, _ZOOM))
    view = draw.uniform(0.5, 1) * (1 + zoomed)
    rows = [[view * np.cos(turned), -view * np.sin(turned), pan[0] * times]]
    rows.append([view * np.sin(turned), view * np.cos(turned), pan[1] * times])
    path = torch.from_numpy(np.array(rows, dtype=np.float32).transpose(2, 0, 1).copy())
    grid = torch.nn.functional.affine_grid(path, [frames, 1, size, size], align_corners=False)
    seen = picture.expand(frames, -1, -1, -1)
    return torch.nn.functional.grid_sample(seen, grid, padding_mode="reflection", align_corners=False)[:, 0]


def _leaves(side: int, draw: np.random.Generator) -> np.ndarray:
    """Return float32 `[side, side]` in 0..255: ellipses and rectangles, plain, shaded, striped or grainy."""
    row, column = np.mgrid[:side, :side].astype(np.float32)
    # Grain of mean 0 and deviation 1, whose amplitude falls with a power of the frequency.
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = np.inf
    white = np.fft.rfft2(draw.standard_normal((side, side)))
    grain = np.fft.irfft2(white * frequency ** -draw.uniform(0.3, 1.5), (side, side))
    grain = (grain / grain.std()).astype(np.float32)
    picture = (draw.uniform(0, 255) + draw.uniform(0, 25) * grain).astype(np.float32)
    for _ in range(draw.integers(*_LEAVES)):
        radius = min(side / 2, _SMALLEST / math.sqrt(draw.uniform(1e-3, 1)))
        middle = draw.uniform(-radius / 2, side + radius / 2, 2)
        box = tuple(slice(max(0, int(place - radius)), max(0, int(place + radius) + 2)) for place in middle)
        angle = draw.uniform(0, math.pi)
        down, across = (row[box] - middle[0]) / radius, (column[box] - middle[1]) / radius
        along = math.cos(angle) * across + math.sin(angle) * down
        aside = (math.cos(angle) * down - math.sin(angle) * across) / draw.uniform(0.3, 1)
        inside = along**2 + aside**2 < 1 if draw.random() < 0.5 else np.maximum(abs(along), abs(aside)) < 0.8
        level = draw.uniform(0, 255) + draw.uniform(-40, 40) * along
        if draw.random() < 0.4:
            waves = 2 * math.pi * radius / draw.uniform(2.5, 20)
            level += draw.uniform(0, 50) * np.sin(waves * along + draw.uniform(0, 2 * math.pi))
        if draw.random() < 0.6:
            level += draw.uniform(0, 25) * grain[box]
        picture[box] = np.where(inside, level, picture[box])
    return picture.clip(0, 255)
