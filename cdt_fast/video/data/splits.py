"""Which frames of which clips train, validate and test: whole numbers only, no pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cdt_fast.errors import InputError
from cdt_fast.video.data.clips import Split


class ClipLength(NamedTuple):
    """What a split needs to know of a clip: its name, its number of frames, and the split its tree gives it."""

    name: str
    frames: int
    split: Split | None = None


class Part(NamedTuple):
    """Frames `start` up to (not including) `stop` of the clip with this index."""

    clip: int
    start: int
    stop: int


@dataclass
class Splits:
    """The parts of each split, how they were made, and what was left out."""

    train: list[Part] = field(default_factory=list)
    validation: list[Part] = field(default_factory=list)
    test: list[Part] = field(default_factory=list)
    method: Literal["clip", "time"] = "clip"
    notes: list[str] = field(default_factory=list)


def split_clips(clips: Sequence[ClipLength], window: int, by_time: bool = False) -> Splits:
    """Divide clips into training, validation and test parts for windows of `window` frames.

    Clips marked "test" are the test set, and the last tenth of the others (at least one) validates. Without marks the
    last tenth of the clips tests and the tenth before validates. When that leaves a split empty (fewer than three
    clips without marks, fewer than two training clips with them), each clip is divided by time, in whole windows: the
    last tenth tests (where no clip is marked), the tenth before it validates, at least one window each. One window is
    left out before each, since neighboring frames are near copies. Shorter clips are left out with a note.

    Args:
        clips: all of them.
        window: frames of a window.
        by_time: divide each clip by time, however many there are.

    Raises:
        InputError: there are no training clips, or too few frames.
    """
    marked = any(clip.split == "test" for clip in clips)
    if all(clip.split == "test" for clip in clips):
        raise InputError("the data set has no training clips, only test clips")
    long_enough = [index for index, clip in enumerate(clips) if clip.frames >= window]
    test = [index for index in long_enough if clips[index].split == "test"]
    train = [index for index in long_enough if clips[index].split != "test"]
    for kind, found in (("training", train), *([("test", test)] if marked else [])):
        if not found:
            longest = max((c for c in clips if (c.split == "test") == (kind == "test")), key=lambda c: c.frames)
            raise InputError(
                f"{longest.name}: the longest {kind} clip has {longest.frames} frames, less than one window of "
                f"{window} frames; choose a shorter window"
            )

    def whole(indices: Sequence[int]) -> list[Part]:
        return [Part(index, 0, clips[index].frames) for index in indices]

    splits = Splits(test=whole(test))
    splits.notes = [
        f"{clip.name}: left out, its {clip.frames} frames are less than a window of {window}"
        for clip in clips
        if clip.frames < window
    ]
    held_out = [splits.validation] if marked else [splits.validation, splits.test]
    if by_time or len(train) <= len(held_out):
        splits.method = "time"
        for index in train:
            _split_by_time(clips[index], index, window, splits.train, held_out)
    else:
        tenth = max(1, len(train) // 10)
        for parts in reversed(held_out):
            train, parts[:] = train[:-tenth], whole(train[-tenth:])
        splits.train = whole(train)
    return splits


def _split_by_time(clip: ClipLength, index: int, window: int, train: list[Part], held_out: list[list[Part]]) -> None:
    windows, needed = clip.frames // window, 1 + 2 * len(held_out)
    if windows < needed:
        raise InputError(
            f"{clip.name}: has {clip.frames} frames, and dividing it by time into {needed} parts (training, and a gap "
            f"before each held-out one) needs {needed} windows of {window}, {needed * window} frames; choose a window "
            f"of at most {clip.frames // needed}"
        )
    tenth = max(1, windows // 10)
    start = windows - len(held_out) * (tenth + 1)
    train.append(Part(index, 0, start * window))
    for parts in held_out:
        parts.append(Part(index, (start + 1) * window, (start + 1 + tenth) * window))
        start += 1 + tenth
