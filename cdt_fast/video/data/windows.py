"""Windows of frames for training, validation and test."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import torch

from cdt_fast.errors import InputError, printable
from cdt_fast.video.data.cache import load_clip
from cdt_fast.video.data.crops import Crops, CropWindows
from cdt_fast.video.data.demo import DEMO_FRAME_RATE, demo_clip
from cdt_fast.video.data.splits import ClipLength, Part, WindowName, split_clips
from cdt_fast.video.data.trees import DecodedClip, find_clips

_LEVELS = 256
_FRAMES_A_BLOCK = 64
_NOTES_SHOWN = 10
_ROOM = 8  # pixels by which crops are larger than what is trained on
_DEMO_SIDE = 320  # of the generated clip where crops are taken of it


class Windows:
    """Windows of `window` consecutive frames, each within one part of one clip.

    Args:
        clips: those that parts are of.
        parts: the parts that windows are taken from.
        window: T, frames a window.
        stride: frames from the start of a window to the start of the next.
    """

    def __init__(self, clips: Sequence[DecodedClip], parts: Sequence[Part], window: int, stride: int) -> None:
        self.window, self.size = window, clips[0].frames.shape[-1]
        self._clips = clips
        self._starts = [
            (part.clip, first) for part in parts for first in range(part.start, part.stop - window + 1, stride)
        ]

    def __len__(self) -> int:
        return len(self._starts)

    def name(self, index: int) -> WindowName:
        """The identity of a window: 0 ≤ index < len, or from the end with a negative index."""
        clip, first = self._starts[index]
        return WindowName(self._clips[clip].name, first)

    def batch(self, indices: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """A copy of the windows with these indices.

        Returns:
            uint8 [b, T, size, size], 0..255.

        Raises:
            IndexError: there is no such window.
        """
        chosen = [self._starts[int(index)] for index in indices]
        result = np.empty((len(chosen), self.window, self.size, self.size), dtype=np.uint8)
        for row, (clip, first) in zip(result, chosen, strict=True):
            row[:] = self._clips[clip].frames[first : first + self.window]
        return torch.from_numpy(result)

    def augmented(self, indices: Sequence[int], seeds: Sequence[int]) -> torch.Tensor:
        """As `batch`: whole frames are trained on as they are."""
        return self.batch(indices)


@dataclass(frozen=True)
class VideoData:
    """A data set ready for training.

    Attributes:
        train, validation, test: windows; no frame is in two of them.
        sigma: the unit of noise levels, in [0, 1].
        frame_rate: frames a second, None where the clips do not state one and the same.
        clips: names of all clips, in order.
        size: height and width of a frame in pixels.
        method: "clip" when the splits are of whole clips, "time" when each clip is divided.
        notes: what was left out, and what may be damaged, a line each.
        unit: what `sigma` is, in words.
    """

    train: Windows | CropWindows
    validation: Windows | CropWindows
    test: Windows | CropWindows
    sigma: float
    frame_rate: Fraction | None
    clips: tuple[str, ...]
    size: int
    method: str
    notes: tuple[str, ...]
    unit: str

    def describe(self) -> str:
        """What was loaded, for a person, in a few lines."""
        rate = "unknown" if self.frame_rate is None else f"{float(self.frame_rate):.4g} a second"
        number = f"{len(self.clips)} clip{'' if len(self.clips) == 1 else 's'}"
        lines = [
            f"{number}, split by {self.method}; frames {self.size}x{self.size}, rate {rate}",
            f"windows of {self.train.window} frames: {len(self.train)} training, {len(self.validation)} validation, "
            f"{len(self.test)} test",
            f"noise in units of {self.sigma:.6f} ({self.unit}, frames in [0, 1])",
        ]
        more = [f"and {len(self.notes) - _NOTES_SHOWN} more notes"] if len(self.notes) > _NOTES_SHOWN else []
        return printable("\n".join([*lines, *self.notes[:_NOTES_SHOWN], *more]))


def load_video(
    source: str | os.PathLike[str],
    *,
    window: int = 20,
    size: int = 160,
    stride: int | None = None,
    crops: bool = False,
    unit: Literal["level", "deviation"] = "deviation",
    by_time: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> VideoData:
    """Decode, pre-process and split video into windows.

    Args:
        source: anything `find_clips` takes, or the word "demo" for the generated clip (a folder of that name is
            "./demo").
        window: T, frames a window.
        size: height and width of a frame in pixels.
        stride: frames between the starts of training windows; by default `window`, so that they do not overlap.
            Validation and test windows never overlap, nor do those of crops.
        crops: windows are crops at full resolution (`CropWindows`), not whole frames made square.
        by_time: divide each clip by time, however many there are.
        unit: what `sigma` is: a gray level of 0..255, or the standard deviation of the training frames.
        cache_dir: where decoded clips are kept; see `cache.default_cache_dir`.
        progress: show a bar on stderr while decoding.

    Raises:
        InputError: a setting is not usable, a clip cannot be read, there are too few frames for the windows, or the
            training frames are one flat gray.
    """
    stride = window if stride is None else stride
    for name, value in (("window", window), ("size", size), ("stride", stride)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value}; expected a whole number, at least 1")
    if crops and stride != window:
        raise InputError(f"stride is {stride}, and windows of crops do not overlap: it can only be {window}")
    cut = Crops(window) if crops else None
    side = size if cut is None else size + _ROOM
    if source == "demo":
        drawn = demo_clip(size=size if cut is None else max(_DEMO_SIDE, side))
        frames = drawn if cut is None else np.stack(list(cut.rows(drawn, side)))
        clips = [DecodedClip("demo", frames, DEMO_FRAME_RATE)]
    else:
        clips = [load_clip(clip, side, cache_dir, progress, cut) for clip in find_clips(source)]
    rows_a_frame = 1 if cut is None else cut.rows_a_window // window
    lengths = [ClipLength(clip.name, len(clip.frames) // rows_a_frame, clip.split) for clip in clips]
    splits = split_clips(lengths, window, by_time)
    rates = {clip.frame_rate for clip in clips}

    def windows(parts: Sequence[Part], training: bool) -> Windows | CropWindows:
        if cut is not None:
            return CropWindows(clips, parts, cut, size, training)
        return Windows(clips, parts, window, stride if training else window)

    deviation = _standard_deviation(clips, splits.train, rows_a_frame)
    return VideoData(
        train=windows(splits.train, training=True),
        validation=windows(splits.validation, training=False),
        test=windows(splits.test, training=False),
        sigma=deviation if unit == "deviation" else 1 / (_LEVELS - 1),
        frame_rate=rates.pop() if len(rates) == 1 else None,
        clips=tuple(clip.name for clip in clips),
        size=size,
        method=splits.method,
        notes=(*splits.notes, *(note for clip in clips for note in clip.notes)),
        unit="a gray level" if unit == "level" else "standard deviation of the training frames",
    )


def _standard_deviation(clips: Sequence[DecodedClip], parts: Sequence[Part], rows_a_frame: int) -> float:
    # A count of each gray level makes the sums whole numbers: exact, and the same whatever the order of frames.
    counts = np.zeros(_LEVELS, dtype=np.int64)
    for part in parts:
        first, stop = part.start * rows_a_frame, part.stop * rows_a_frame
        for start in range(first, stop, _FRAMES_A_BLOCK):
            block = clips[part.clip].frames[start : min(start + _FRAMES_A_BLOCK, stop)]
            counts += np.bincount(block.reshape(-1), minlength=_LEVELS)
    number = int(counts.sum())
    total = sum(level * int(count) for level, count in enumerate(counts))
    squares = sum(level * level * int(count) for level, count in enumerate(counts))
    variance = Fraction(number * squares - total * total, number * number)
    if variance == 0:
        raise InputError(
            f"{clips[parts[0].clip].name}: all training frames are one flat gray, level {total // number}; there is "
            "nothing to learn to denoise"
        )
    return math.sqrt(variance) / (_LEVELS - 1)
