"""Which frames of which clips train, validate and test: whole numbers only, no pictures.

By clip where there are enough clips. With one or two, by time: neighboring frames are near copies, so a window is
left out on either side of the validation part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NoReturn

from cdt_fast.errors import InputError
from cdt_fast.video.data.trees import Split


@dataclass(frozen=True)
class ClipLength:
    """What a split needs to know of a clip: its name, its number of frames, and the split its tree gives it."""

    name: str
    frames: int
    split: Split | None = None


class WindowName(NamedTuple):
    """Which window this is, the same in every run: its clip, and its first frame counted from the clip's start."""

    clip: str
    first_frame: int


@dataclass(frozen=True)
class Part:
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
    last tenth tests (where no clip is marked), the tenth before it validates, at least one window each, one window
    is left out before each. Clips shorter than a window are left out with a note.

    Args:
        clips: all of them.
        window: frames of a window.
        by_time: divide each clip by time, however many there are.

    Raises:
        InputError: no training clips, or too few frames; then the message names the largest window that would work.
    """
    if all(clip.split == "test" for clip in clips):
        raise InputError("the data set has no training clips, only test clips")
    try:
        return _split(clips, window, by_time)
    except InputError as error:
        largest = _largest_window(clips, window, by_time)
        advice = f"the largest window that works is {largest}" if largest else "no window is short enough"
        raise InputError(f"{error}; {advice}") from None


def _largest_window(clips: Sequence[ClipLength], window: int, by_time: bool) -> int:
    # Not monotonic: a shorter window can let in a clip that is long enough for a window and too short to divide.
    longest = max((clip.frames for clip in clips), default=0)
    for candidate in range(min(window - 1, longest), 0, -1):
        try:
            _split(clips, candidate, by_time)
        except InputError:
            continue
        return candidate
    return 0


def _split(clips: Sequence[ClipLength], window: int, by_time: bool) -> Splits:
    splits = Splits()
    long_enough: list[int] = []
    for index, clip in enumerate(clips):
        if clip.frames >= window:
            long_enough.append(index)
        else:
            splits.notes.append(f"{clip.name}: left out, its {clip.frames} frames are less than a window of {window}")
    marked = {clip.split for clip in clips} >= {"train", "test"}
    test = [index for index in long_enough if clips[index].split == "test"]
    train = [index for index in long_enough if clips[index].split != "test"]
    if not train:
        _refuse_short([clip for clip in clips if clip.split != "test"], window, "training")
    if marked and not test:
        _refuse_short([clip for clip in clips if clip.split == "test"], window, "test")
    tenth = max(1, len(train) // 10)
    splits.test += _whole(clips, test)
    if marked and len(train) >= 2 and not by_time:
        splits.train += _whole(clips, train[:-tenth])
        splits.validation += _whole(clips, train[-tenth:])
    elif not marked and len(train) >= 3 and not by_time:
        splits.train += _whole(clips, train[: -2 * tenth])
        splits.validation += _whole(clips, train[-2 * tenth : -tenth])
        splits.test += _whole(clips, train[-tenth:])
    else:
        splits.method = "time"
        for index in train:
            _split_by_time(splits, index, clips[index], window, with_test=not marked)
    return splits


def _whole(clips: Sequence[ClipLength], indices: Sequence[int]) -> list[Part]:
    return [Part(index, 0, clips[index].frames) for index in indices]


def _split_by_time(splits: Splits, index: int, clip: ClipLength, window: int, with_test: bool) -> None:
    windows = clip.frames // window
    tenth = max(1, windows // 10)
    held_out = [splits.validation, splits.test] if with_test else [splits.validation]
    needed = 1 + 2 * len(held_out)
    if windows < needed:
        gaps = "training, gap, validation, gap and test" if with_test else "training, gap and validation"
        raise InputError(
            f"{clip.name}: has {clip.frames} frames, and dividing it by time into {gaps} needs "
            f"{needed} windows of {window}, {needed * window} frames"
        )
    trained = windows - len(held_out) * (tenth + 1)
    splits.train.append(Part(index, 0, trained * window))
    start = trained
    for parts in held_out:
        start += 1
        parts.append(Part(index, start * window, (start + tenth) * window))
        start += tenth


def _refuse_short(clips: Sequence[ClipLength], window: int, kind: str) -> NoReturn:
    longest = max(clips, key=lambda clip: clip.frames)
    raise InputError(
        f"{longest.name}: the longest of {len(clips)} {kind} clip(s) has {longest.frames} frames, less than one window "
        f"of {window} frames"
    )
