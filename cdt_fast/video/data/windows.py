"""Windows of frames for training, validation and test."""

import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import file_digest, sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from cdt_fast.checks import InputError, printable
from cdt_fast.progress import progress_bar
from cdt_fast.video.data.clips import Clip, Split, find_clips, open_source
from cdt_fast.video.data.crops import PLANES, augmented, cut_crops, luma, plane_of, preprocess, unscaled
from cdt_fast.video.data.scenes import demo_clip

_MAX_LEVEL = 255
_NOTES_SHOWN = 10
_MANY, _LONG = 4, 10  # clips, and windows of a clip, for each one that is held out
_ROOM = 8  # pixels by which crops are larger than what is trained on
_DEMO_SIDE = 320  # of the generated clip where crops are taken of it
_SHOWN = 720, 1280  # rows and columns, at most, of frames that are measured or shown whole


class DecodedClip(NamedTuple):
    """A clip as the networks see it: uint8 [frames, size, size], or crops [windows, crops, 3, T, side, side]."""

    name: str
    frames: np.ndarray
    split: Split | None = None
    notes: tuple[str, ...] = ()
    path: Path | None = None  # None: the generated clip
    digest: str = ""  # of its files
    read: int | None = None  # frames of its files, of which crops leave a rest; None: all

    @property
    def frames_per_row(self) -> int:
        """Return how many frames a row of `frames` is of."""
        return self.frames.shape[3] if self.frames.ndim > 3 else 1

    @property
    def length(self) -> int:
        """Return how many frames there are."""
        return self.frames_per_row * len(self.frames)

    @property
    def whole_length(self) -> int:
        """Return how many frames its files have."""
        return self.length if self.read is None else self.read


def load_clip(clip: Clip, size: int, progress: bool = True, crops_of: int | None = None) -> DecodedClip:
    """Decode a clip, cut into crops of `crops_of` frames or resized, into a mapped file: it may exceed memory."""
    source, shape, read = open_source(clip.path), (size, size), 0

    def frames() -> Iterator[np.ndarray]:
        nonlocal read
        for read, frame in enumerate(source.frames(), 1):  # noqa: B007 - counted also where crops leave a rest
            yield frame

    bar = progress_bar(frames(), desc=printable(clip.name), unit="frame", shown=progress)
    with tempfile.TemporaryFile() as file:
        for picture in cut_crops(bar, crops_of, size) if crops_of else (preprocess(frame, size) for frame in bar):
            file.write(picture.tobytes())
            shape = picture.shape
        file.flush()
        pixels = np.memmap(file, np.uint8, "r") if file.tell() else np.empty(0, np.uint8)
    digest = _digest(map(_digest_of, source.files))
    return DecodedClip(clip.name, pixels.reshape(-1, *shape), clip.split, tuple(source.notes), clip.path, digest, read)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _digest(parts: Iterable[str]) -> str:
    return sha256(" ".join(parts).encode()).hexdigest()[:16]


def middle(frame: np.ndarray, most: tuple[int, int] = _SHOWN) -> np.ndarray:
    """Return the middle of a frame, of at most so many rows and columns."""
    top, left = (max(0, (length - kept) // 2) for length, kept in zip(frame.shape, most, strict=False))
    return frame[top : top + most[0], left : left + most[1]]


class Part(NamedTuple):
    """Frames `start` up to (not including) `stop` of the clip with this index."""

    clip: int
    start: int
    stop: int


class Splits(NamedTuple):
    """The parts of each split, what was divided, and what was left out."""

    train: list[Part]
    validation: list[Part]
    test: list[Part]
    method: Literal["clip", "time"]
    notes: list[str]


def split_clips(clips: Sequence[DecodedClip], window: int) -> Splits:
    """Divide clips into training, validation and test parts for windows of `window` frames.

    Clips marked "test" are the test set, and the last tenth of the others (at least one) validates. Without marks the
    last tenth of the clips tests and the tenth before validates. Up to eight clips, four with marks, are too few for
    that: each is divided by time, where it is long enough, in whole windows, with one left out before each held-out
    part, as neighboring frames are near copies. Shorter clips are left out with a note. InputError: too few frames.
    """
    marked = any(clip.split == "test" for clip in clips)
    groups: list[list[Part]] = [[], []]  # whole clips: for training, and for the test alone
    for index, clip in enumerate(clips):
        if clip.length >= window:
            groups[clip.split == "test"].append(Part(index, 0, clip.length))
    train, test = groups
    if not train or (marked and not test):
        lengths = [(clip.whole_length, clip.name) for clip in clips if (clip.split == "test") == bool(train)]
        length, name = max(lengths, default=(0, "the data set"))
        kind = "test" if train else "training"
        short = f"has {length} frames, less than one window of {window} frames; choose a shorter window"
        raise InputError(f"{name}: the longest {kind} clip {short}")
    number = 1 if marked else 2  # of parts that are held out: validation, and test where no clip is marked
    long = all(clips[part.clip].length >= _LONG * number * window for part in train)
    by_clip = len(train) > (_MANY if long else 1) * number
    if by_clip:
        tenth = max(1, len(train) // 10)
        held_out = [train[-tenth * left : len(train) - tenth * (left - 1)] for left in range(number, 0, -1)]
        train = train[: -tenth * number]
    else:
        divided = [_divided(clips[part.clip], part.clip, window, number) for part in train]
        train, *held_out = map(list, zip(*divided, strict=True))
    short = f"frames are less than a window of {window}"
    notes = [f"{clip.name}: left out, its {clip.whole_length} {short}" for clip in clips if clip.length < window]
    return Splits(train, held_out[0], test if marked else held_out[1], "clip" if by_clip else "time", notes)


def _divided(clip: DecodedClip, index: int, window: int, held_out: int) -> list[Part]:
    windows, needed, frames = clip.length // window, 1 + 2 * held_out, clip.whole_length
    if windows < needed:
        wanted = f"needs {needed} windows of {window}, {needed * window} frames"
        least = f"choose a window of at most {frames // needed}"
        raise InputError(f"{clip.name}: has {frames} frames, and dividing it by time {wanted}; {least}")
    tenth = max(1, windows // 10)
    end = windows - held_out * (tenth + 1)
    starts = [end + 1 + number * (tenth + 1) for number in range(held_out)]
    return [Part(index, 0, end * window), *(Part(index, at * window, (at + tenth) * window) for at in starts)]


class Windows:
    """Windows of `window` consecutive frames of `parts`: whole frames, or planes of crops. Crops are larger than `size`
    by what `augmented` moves them. In training the samples are all planes of every crop, else the luma of those at full
    resolution."""

    def __init__(
        self, clips: Sequence[DecodedClip], parts: Sequence[Part], window: int, size: int, training: bool = False
    ) -> None:
        self.window, self.size, self._clips = window, size, clips
        shape = clips[parts[0].clip].frames.shape
        self._cropped, crops = len(shape) > 3, shape[1] if len(shape) > 3 else 1
        self._planes = PLANES if training and self._cropped else 1
        self._samples = [
            (part.clip, first, crop, plane)
            for part in parts
            for first in range(part.start, part.stop - window + 1, window)
            for crop in range(crops if training else unscaled(crops))
            for plane in range(self._planes)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, index: int) -> tuple[str, int]:
        """Return a window's clip, with the number of a crop, and its first frame."""
        clip, first, crop, _ = self._samples[index]
        name = self._clips[clip].name
        return f"{name}, crop {crop}" if self._cropped else name, first

    def batch(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Return windows `[b, T, size, size]` in 0..255: uint8, or float32 of crops (colors around 0)."""
        return torch.stack([self._frames(int(index))[:, : self.size, : self.size] for index in indices])

    def augmented(self, indices: Sequence[int], seeds: Sequence[int]) -> Tensor:
        """Return training samples as `batch` does; those of crops vary with their seed (`crops.augmented`)."""
        if not self._cropped:
            return self.batch(indices)

        def other(index: int, draw: np.random.Generator) -> Tensor:  # the same plane of any crop
            return self._frames(self._planes * int(draw.integers(0, len(self) // self._planes)) + index % self._planes)

        pairs = zip(indices, seeds, strict=True)
        return torch.stack([augmented(self._frames(at), partial(other, at), self.size, seed) for at, seed in pairs])

    def whole(self, index: int) -> Tensor:
        """Return the luma of the whole frames of a window, `[1, T, h, w]` in 0..255, of large ones their middle."""
        clip, first, *_ = self._samples[index]
        if not self._cropped:
            return self.batch([index])
        path = self._clips[clip].path
        frames: Any = demo_clip(size=max(_DEMO_SIDE, self.size + _ROOM)) if path is None else open_source(path).frames()
        window = np.stack([middle(luma(frame)) for frame in islice(frames, first, first + self.window)])
        return torch.from_numpy(window)[None]

    def _frames(self, index: int) -> Tensor:
        clip, first, crop, plane = self._samples[index]
        frames = self._clips[clip].frames
        if self._cropped:
            return plane_of(frames[first // self.window, crop], plane)
        return torch.from_numpy(np.array(frames[first : first + self.window]))


@dataclass(frozen=True)
class VideoData:
    """Windows, no frame of which is in two splits; the unit of noise levels, in [0, 1]; what was loaded, in words."""

    train: Windows
    validation: Windows
    test: Windows
    sigma: float
    description: str
    sizes: dict[str, int]  # frames of the clips that are for training, and for the test alone
    digest: str = ""  # of the files of all clips

    @property
    def identity(self) -> dict[str, Any]:
        """Return by what a run knows its data again."""
        windows = [len(part) for part in (self.train, self.validation, self.test)]
        return {"windows": windows, "sigma": self.sigma, "digest": self.digest}

    def limited(self, limit: int | None) -> Self:
        """Return the same with at most so many test windows, spread over all of them."""
        test, count = copy(self.test), len(self.test)
        kept = min(limit or count, count)
        test._samples = [self.test._samples[number * count // kept] for number in range(kept)]
        return replace(self, test=test)


def load_video(
    source: str | os.PathLike[str], *, window: int = 20, size: int = 160, crops: bool = False, progress: bool = True
) -> VideoData:
    """Decode video, cut it into crops at full resolution or make whole frames square, and split it into windows. The
    source is anything that `find_clips` takes, or the word "demo" for the generated clip. InputError: a clip cannot be
    read, has too few frames, or the training frames are one flat gray."""
    side = size + _ROOM if crops else size
    if source == "demo":
        frames = demo_clip(size=max(_DEMO_SIDE, side) if crops else size)
        clips = [DecodedClip("demo", np.stack(list(cut_crops(frames, window, side))) if crops else frames)]
    else:
        clips = [load_clip(clip, side, progress, window if crops else None) for clip in find_clips(source)]
    splits = split_clips(clips, window)
    train = Windows(clips, splits.train, window, size, True)
    validation, test = (Windows(clips, parts, window, size) for parts in (splits.validation, splits.test))
    deviation = _standard_deviation(clips, splits.train)
    sigma = 1 / _MAX_LEVEL if crops else deviation
    unit = "a gray level" if crops else "standard deviation of the training frames"
    notes = [*splits.notes, *(note for clip in clips for note in clip.notes)]
    if len(notes) > _NOTES_SHOWN:
        notes[_NOTES_SHOWN:] = [f"and {len(notes) - _NOTES_SHOWN} more notes"]
    lines = [
        f"{len(clips)} clip{'' if len(clips) == 1 else 's'}, split by {splits.method}; frames {size}x{size}",
        f"windows of {window} frames: {len(train)} training, {len(validation)} validation, {len(test)} test",
        f"noise in units of {sigma:.6f} ({unit}, frames in [0, 1])",
        *notes,
    ]
    frames = Counter({"training frames": 0, "test frames": 0})
    for clip in clips:
        frames["test frames" if clip.split == "test" else "training frames"] += clip.length
    digest = _digest(clip.digest for clip in clips)
    return VideoData(train, validation, test, sigma, printable("\n".join(lines)), dict(frames), digest)


def _standard_deviation(clips: Sequence[DecodedClip], parts: Sequence[Part]) -> float:
    # A count of each gray level makes the sums whole numbers: exact, and the same whatever the order of frames.
    counts = np.zeros(_MAX_LEVEL + 1, dtype=np.int64)
    for part in parts:
        clip = clips[part.clip]
        for row in clip.frames[part.start // clip.frames_per_row : part.stop // clip.frames_per_row]:
            counts += np.bincount(row.reshape(-1), minlength=len(counts))
    number, total, squares = (int(np.arange(len(counts)) ** power @ counts) for power in range(3))
    if np.count_nonzero(counts) == 1:
        flat = f"one flat gray, level {total // number}; there is nothing to learn to denoise"
        raise InputError(f"{clips[parts[0].clip].name}: all training frames are {flat}")
    return math.sqrt((number * squares - total * total) / (number * number)) / _MAX_LEVEL
