"""Crops at full resolution: what a denoiser of whole videos is trained on.

Of every `window` frames of a clip some squares are kept in red, green and blue: of a few places, which depend on the
window's number alone, the one with most detail. A third are as they are, the others of frames made two and three
times smaller, which have more detail and faster motion, taken along a straight path, as by a camera that pans: to a
network that has only seen what stands still, motion is noise. A sample is one plane of one crop: the luma, or one of
the three `opponent` planes that a color video is denoised in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdt_fast.video.data.splits import Part, WindowName
from cdt_fast.video.data.trees import DecodedClip

CROPS_VERSION = 2  # raise it with any change that can move a pixel

_LUMA = (0.299, 0.587, 0.114)
# An orthonormal change of basis: white noise of red, green and blue is white noise of the same deviation in these.
_OPPONENT = (
    (1 / math.sqrt(3), 1 / math.sqrt(3), 1 / math.sqrt(3)),
    (1 / math.sqrt(2), 0.0, -1 / math.sqrt(2)),
    (1 / math.sqrt(6), -2 / math.sqrt(6), 1 / math.sqrt(6)),
)
_COLORS = 3
_PLACES_SEED = 20_260_118
_SPEED = 4.0  # of pasted pieces, in pixels a frame
_PLACES = 3  # that a crop is the most detailed of
_PAN = 3.0  # of smaller crops along each axis, in their pixels a frame
GENERATED = 0.5  # probability with which generated frames take the place of a training crop
_LEAVES = (60, 160)  # shapes of a generated picture
_SMALLEST = 4.0  # the radius that half of what is cast is within a factor of 1.4 of, in pixels
_LEAVES_PAN = 2.5  # of the camera over them along each axis, in pixels a frame
_TURN, _ZOOM = 0.02, 0.01  # of the camera, radians and a share a frame


def to_opponent(planes: Tensor) -> Tensor:
    """Brightness and two differences of colors `[3, ...]` of red, green and blue `[3, ...]`: orthonormal."""
    return torch.einsum("ij,j...->i...", torch.tensor(_OPPONENT, dtype=torch.float64).to(planes), planes)


def from_opponent(planes: Tensor) -> Tensor:
    """The inverse of `to_opponent`."""
    return torch.einsum("ji,j...->i...", torch.tensor(_OPPONENT, dtype=torch.float64).to(planes), planes)


@dataclass(frozen=True)
class Crops:
    """How a clip is cut: `rows` turns its frames into pictures `[side, side]`, in the order of `CropWindows`.

    Attributes:
        window: T, frames of a crop; the last frames of a clip that do not fill a window are left out.
        a_window: crops of every window.
    """

    window: int
    a_window: int = 12

    @property
    def as_they_are(self) -> int:
        """How many crops of a window, the first ones, are at full resolution."""
        return (self.a_window + 2) // 3

    def _smaller(self, crop: int, shortest: int, side: int) -> int:
        """By how much the frames of a crop are made smaller, as far as they are large enough for it."""
        wanted = 1 if crop < self.as_they_are else 2 + crop % 2
        return max(1, min(wanted, shortest // side))

    @property
    def identity(self) -> list[object]:
        """What a cache has to know of it."""
        return ["crops", CROPS_VERSION, self.window, self.a_window]

    @property
    def rows_a_window(self) -> int:
        """Pictures that a window becomes."""
        return self.a_window * _COLORS * self.window

    def rows(self, frames: Iterable[np.ndarray], side: int) -> Iterator[np.ndarray]:
        """uint8 `[side, side]`: window by window, crop by crop, color by color, frame by frame."""
        gathered: list[np.ndarray] = []
        number = 0
        for frame in frames:
            gathered.append(frame if frame.ndim == 3 else np.repeat(frame[..., np.newaxis], _COLORS, axis=2))
            if len(gathered) == self.window:
                yield from self._cut(np.stack(gathered), side, np.random.default_rng([_PLACES_SEED, number]))
                gathered, number = [], number + 1

    def _cut(self, block: np.ndarray, side: int, places: np.random.Generator) -> Iterator[np.ndarray]:
        height, width = block.shape[1:3]
        if height < side or width < side:
            more = ((0, 0), (0, max(0, side - height)), (0, max(0, side - width)), (0, 0))
            block = np.pad(block, more, mode="symmetric")
            height, width = block.shape[1:3]
        for crop in range(self.a_window):
            factor = self._smaller(crop, min(height, width), side)
            cut = side * factor
            found = [
                tuple(int(places.integers(0, length - cut + 1)) for length in (height, width)) for _ in range(_PLACES)
            ]
            top, left = max(found, key=lambda place: _detail(block[0, place[0] :, place[1] :][:cut, :cut]))
            rows, columns = (np.full(len(block), start) for start in (top, left))
            if crop >= self.as_they_are:
                path = np.linspace(-0.5, 0.5, len(block)) * len(block) * factor
                rows, columns = (
                    np.clip(np.rint(start + path * places.uniform(-_PAN, _PAN)).astype(int), 0, length - cut)
                    for start, length in ((top, height), (left, width))
                )
            chosen = np.stack(
                [
                    frame[row : row + cut, column : column + cut]
                    for frame, row, column in zip(block, rows, columns, strict=True)
                ]
            )
            if factor > 1:
                pooled = chosen.reshape(len(chosen), side, factor, side, factor, _COLORS).astype(np.float32)
                chosen = np.rint(pooled.mean((2, 4))).astype(np.uint8)
            yield from chosen.transpose(3, 0, 1, 2).reshape(-1, side, side)


def _detail(picture: np.ndarray) -> int:
    """The sum of the differences between neighbors."""
    green = picture[..., 1].astype(np.int64)
    return int(np.abs(np.diff(green, axis=0)).sum() + np.abs(np.diff(green, axis=1)).sum())


class CropWindows:
    """Windows of `window` frames of crops: of the interface of `Windows`, with values instead of bytes.

    Args:
        clips: what `Crops.rows` gave for every clip, uint8 [rows, side, side], and its name.
        parts: the parts that windows are taken from, in frames.
        crops: how the clips were cut.
        size: side of a window; the crops are larger by what `augmented` moves them.
        training: samples are luma and the three opponent planes of every crop, else the luma of those at full
            resolution.
    """

    def __init__(
        self,
        clips: Sequence[DecodedClip],
        parts: Sequence[Part],
        crops: Crops,
        size: int,
        training: bool,
    ) -> None:
        self.window, self._clips, self._crops, self.size = crops.window, clips, crops, size
        self._training = training
        chosen, planes = (crops.a_window, 1 + _COLORS) if training else (crops.as_they_are, 1)
        self._samples = [
            (part.clip, first // crops.window, crop, plane)
            for part in parts
            for first in range(part.start, part.stop - crops.window + 1, crops.window)
            for crop in range(chosen)
            for plane in range(planes)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, index: int) -> WindowName:
        """The identity of a window: its clip with the crop's number, and its first frame."""
        clip, block, crop, _ = self._samples[index]
        return WindowName(f"{self._clips[clip].name}, crop {crop}", block * self.window)

    def batch(self, indices: Sequence[int] | Tensor) -> Tensor:
        """float32 [b, T, size, size] in 0..255; a difference of colors is around 0."""
        return torch.stack([self._planes(int(index))[:, : self.size, : self.size] for index in indices])

    def augmented(self, indices: Sequence[int], seeds: Sequence[int]) -> Tensor:
        """As `batch`, each moved, turned, mirrored or played backwards as its seed says, half of them with a piece of
        another sample that moves across: what a clip shows in few of its frames would otherwise be wiped out. Some
        are generated (`moving_leaves`).
        """
        size, chosen = self.size, []
        for index, seed in zip(indices, seeds, strict=True):
            draw = np.random.default_rng(seed)
            if draw.random() < GENERATED:
                frames, others = moving_leaves(self.window, size, draw), None
            else:
                frames, others = self._planes(index), 1 + _COLORS if self._training else 1
                top, left = (int(draw.integers(0, length - size + 1)) for length in frames.shape[1:])
                frames = frames[:, top : top + size, left : left + size].clone()
            if draw.integers(0, 2):
                if others is None:
                    piece = moving_leaves(self.window, size, draw)
                else:
                    piece = self._planes(others * int(draw.integers(0, len(self) // others)) + index % others)
                _paste(frames, piece, draw)
            backwards, upside_down, turned = (bool(draw.integers(0, 2)) for _ in range(3))
            flipped = [axis for axis, chosen_axis in ((0, backwards), (1, upside_down)) if chosen_axis]
            frames = frames.flip(flipped)
            chosen.append(frames.mT if turned else frames)
        return torch.stack(chosen)

    def _planes(self, index: int) -> Tensor:
        clip, block, crop, plane = self._samples[index]
        first = block * self._crops.rows_a_window + crop * _COLORS * self.window
        rows = self._clips[clip].frames[first : first + _COLORS * self.window]
        colors = torch.from_numpy(np.array(rows)).to(torch.float32)
        colors = colors.view(_COLORS, self.window, *colors.shape[1:])
        weights = torch.tensor(_LUMA if plane == 0 else _OPPONENT[plane - 1])
        return torch.einsum("c,cthw->thw", weights, colors)


def _paste(frames: Tensor, other: Tensor, draw: np.random.Generator) -> None:
    """A rectangle of `other` moves across `frames` at a steady speed of up to `_SPEED` pixels a frame, in place."""
    size = frames.shape[-1]
    height, width = (int(draw.integers(max(1, size // 8), max(2, 2 * size // 3))) for _ in range(2))
    speeds = draw.uniform(-_SPEED, _SPEED, 2)
    middle = draw.uniform(0, size, 2)
    for number in range(len(frames)):
        moved = middle + speeds * (number - len(frames) / 2)
        top, left = (round(place) for place in moved.tolist())
        first_row, last_row = max(0, top), min(size, top + height)
        first_column, last_column = max(0, left), min(size, left + width)
        if first_row < last_row and first_column < last_column:
            piece = other[number, first_row - top : last_row - top, first_column - left : last_column - left]
            frames[number, first_row:last_row, first_column:last_column] = piece


def moving_leaves(frames: int, size: int, draw: np.random.Generator) -> Tensor:
    """float32 `[frames, size, size]` in 0..255: a picture of dead leaves on which a camera pans, and may turn or zoom.

    These are shapes that hide each other, whose sizes follow a power law, as in photographs; denoisers trained on them
    do nearly as well on photographs as those trained on photographs (Achddou, Gousseau and Ladjal, "Synthetic images as
    a regularity prior for image restoration neural networks", 2021). The same state of `draw`, the same frames.
    """
    side = 2 * size
    picture = torch.from_numpy(_leaves(side, draw))[None, None]
    if draw.random() < 0.5:
        picture = torch.nn.functional.avg_pool2d(picture, 3, 1, 1)
    mean = picture.mean()
    picture = mean + draw.uniform(0.2, 1) * (picture - mean)
    times = np.arange(frames) - frames / 2
    pan = 2 * _LEAVES_PAN / side * draw.uniform(-1, 1, 2) * (draw.random() < 0.8)
    turned, zoomed = ((draw.random() < 0.3) * draw.uniform(-most, most) * times for most in (_TURN, _ZOOM))
    view = draw.uniform(0.5, 1) * (1 + zoomed)
    rows = [[view * np.cos(turned), -view * np.sin(turned), pan[0] * times]]
    rows.append([view * np.sin(turned), view * np.cos(turned), pan[1] * times])
    path = torch.from_numpy(np.array(rows, dtype=np.float32).transpose(2, 0, 1).copy())
    grid = torch.nn.functional.affine_grid(path, [frames, 1, size, size], align_corners=False)
    seen = picture.expand(frames, -1, -1, -1)
    return torch.nn.functional.grid_sample(seen, grid, padding_mode="reflection", align_corners=False)[:, 0]


def _leaves(side: int, draw: np.random.Generator) -> np.ndarray:
    """float32 `[side, side]` in 0..255: ellipses and rectangles, plain, shaded, striped or grainy."""
    row, column = np.mgrid[:side, :side].astype(np.float32)
    grain = _grain(side, draw)
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


def _grain(side: int, draw: np.random.Generator) -> np.ndarray:
    """float32 `[side, side]` of mean 0 and deviation 1, whose amplitude falls with a power of the frequency."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = np.inf
    white = np.fft.rfft2(draw.standard_normal((side, side)))
    grain = np.fft.irfft2(white * frequency ** -draw.uniform(0.3, 1.5), (side, side))
    return (grain / grain.std()).astype(np.float32)
