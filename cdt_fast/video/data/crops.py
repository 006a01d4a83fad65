"""Crops at full resolution: what a denoiser of whole videos is trained on, half of them in turn for generated scenes.

Of every window of a clip some squares are kept in red, green and blue: of a few places, which depend on the window's
number alone, the one with most detail. A third are as they are, the others of frames made two and three times smaller,
taken along a straight path, as by a camera that pans: to a network that has only seen what stands still, motion is
noise. A sample is one plane of one crop: the luma, or one of the three `opponent` planes of a color video.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from cdt_fast.video.data.scenes import moving_leaves, paste

CROPS = 12  # of a window
GENERATED = 0.5  # probability with which generated frames take the place of a training crop
PLANES = 4  # samples of a crop: `plane_of` says which

_LUMA = (0.299, 0.587, 0.114)
_RED, _GREEN, _BLUE = map(np.float32, _LUMA)
# An orthonormal change of basis: white noise of red, green and blue is white noise of the same deviation in these.
_OPPONENT = (
    (1 / math.sqrt(3), 1 / math.sqrt(3), 1 / math.sqrt(3)),
    (1 / math.sqrt(2), 0.0, -1 / math.sqrt(2)),
    (1 / math.sqrt(6), -2 / math.sqrt(6), 1 / math.sqrt(6)),
)
_PLACES_SEED = 20_260_118
_PLACES = 3  # that a crop is the most detailed of
_PAN = 3.0  # of smaller crops along each axis, in their pixels a frame
_SPEED = 4.0  # of pasted pieces, in pixels a frame


def to_opponent(planes: Tensor) -> Tensor:
    """Return brightness and two differences of colors `[3, ...]` of red, green and blue `[3, ...]`: orthonormal."""
    return torch.einsum("ij,j...->i...", torch.tensor(_OPPONENT, dtype=torch.float64).to(planes), planes)


def from_opponent(planes: Tensor) -> Tensor:
    """Return the inverse of `to_opponent`."""
    return torch.einsum("ji,j...->i...", torch.tensor(_OPPONENT, dtype=torch.float64).to(planes), planes)


def unscaled(crops: int) -> int:
    """Return how many crops of a window, the first ones, are at full resolution."""
    return (crops + 2) // 3


def cut_crops(frames: Iterable[np.ndarray], window: int, side: int, crops: int = CROPS) -> Iterator[np.ndarray]:
    """Yield uint8 `[crops, 3, window, side, side]` of every `window` frames; a rest that fills none is left out."""
    gathered: list[np.ndarray] = []
    number = 0
    for frame in frames:
        gathered.append(frame if frame.ndim == 3 else np.repeat(frame[..., np.newaxis], 3, axis=2))
        if len(gathered) == window:
            places, block = np.random.default_rng([_PLACES_SEED, number]), np.stack(gathered)
            more = [(0, max(0, side - length)) for length in block.shape[1:3]]
            block = np.pad(block, ((0, 0), *more, (0, 0)), mode="symmetric")
            yield np.stack([_crop(block, crop < unscaled(crops), crop, side, places) for crop in range(crops)])
            gathered, number = [], number + 1


def _crop(block: np.ndarray, whole: bool, crop: int, side: int, places: np.random.Generator) -> np.ndarray:
    lengths = block.shape[1:3]
    factor = max(1, min(1 if whole else 2 + crop % 2, min(lengths) // side))  # by which frames are made smaller
    cut = side * factor
    found = [tuple(int(places.integers(0, length - cut + 1)) for length in lengths) for _ in range(_PLACES)]
    start = max(found, key=lambda place: _detail(block[0, place[0] : place[0] + cut, place[1] : place[1] + cut]))
    path = np.linspace(-0.5, 0.5, len(block)) * len(block) * factor
    rows, columns = (
        np.clip(np.rint(first + path * (0 if whole else places.uniform(-_PAN, _PAN))).astype(int), 0, length - cut)
        for first, length in zip(start, lengths, strict=True)
    )
    chosen = np.stack([frame[r : r + cut, c : c + cut] for frame, r, c in zip(block, rows, columns, strict=True)])
    if factor > 1:
        pooled = chosen.reshape(len(chosen), side, factor, side, factor, 3).astype(np.float32)
        chosen = np.rint(pooled.mean((2, 4))).astype(np.uint8)
    return chosen.transpose(3, 0, 1, 2)


def _detail(picture: np.ndarray) -> int:
    green = picture[..., 1].astype(np.int64)
    return int(np.abs(np.diff(green, axis=0)).sum() + np.abs(np.diff(green, axis=1)).sum())


def plane_of(crop: np.ndarray, plane: int) -> Tensor:
    """Return float32 `[T, side, side]` in 0..255 of a crop `[3, T, side, side]`: 0 is luma, 1 to 3 opponent planes."""
    weights = torch.tensor(_LUMA if plane == 0 else _OPPONENT[plane - 1])
    return torch.einsum("c,cthw->thw", weights, torch.from_numpy(np.array(crop, order="C")).to(torch.float32))


def augmented(frames: Tensor, other: Callable[[np.random.Generator], Tensor], size: int, seed: int) -> Tensor:
    """Return a training sample `[T, size, size]`: a crop moved, turned, mirrored or played backwards as its seed says.

    Half are generated (`moving_leaves`), and half have a piece of another crop that moves across: what a clip shows in
    few of its frames would otherwise be lost. `frames` are a plane `[T, side, side]`, and `other` draws another crop's.
    """
    draw = np.random.default_rng(seed)
    generated = draw.random() < GENERATED
    if generated:
        frames = moving_leaves(len(frames), size, draw)
    else:
        top, left = (int(draw.integers(0, length - size + 1)) for length in frames.shape[1:])
        frames = frames[:, top : top + size, left : left + size].clone()
    if draw.integers(0, 2):  # a rectangle of other frames moves across at a steady speed
        others = moving_leaves(len(frames), size, draw) if generated else other(draw)
        height, width = (int(draw.integers(max(1, size // 8), max(2, 2 * size // 3))) for _ in range(2))
        speeds = draw.uniform(-_SPEED, _SPEED, 2)
        middle = draw.uniform(0, size, 2)
        for number, (frame, shown) in enumerate(zip(frames, others, strict=True)):
            top, left = (round(place) for place in (middle + speeds * (number - len(frames) / 2)).tolist())
            paste(frame, shown[:height, :width], top, left)
    backwards, upside_down, turned = (bool(draw.integers(0, 2)) for _ in range(3))
    frames = frames.flip([axis for axis, flipped in enumerate((backwards, upside_down)) if flipped])
    return frames.mT if turned else frames


def luma(frame: np.ndarray) -> np.ndarray:
    """Return the luma of a frame, float32 [h, w] in 0..255."""
    pixels = frame.astype(np.float32)
    # Three products and two sums, not a matrix product: that may fuse or reorder them, machine by machine.
    return pixels if pixels.ndim == 2 else _RED * pixels[..., 0] + _GREEN * pixels[..., 1] + _BLUE * pixels[..., 2]


def preprocess(frame: np.ndarray, size: int) -> np.ndarray:
    """Return the luma of one frame uint8 [h, w, 3] or [h, w], made a square uint8 [size, size]."""
    # Every published number rests on these pixels: a decoder's own gray conversion differs by up to four levels.
    pixels = torch.from_numpy(luma(frame))[None, None]
    resized = torch.nn.functional.interpolate(pixels, size=size, mode="bilinear", antialias=True, align_corners=False)
    return resized[0, 0].round_().clamp_(0, 255).to(torch.uint8).numpy()
