"""A look at every frame of a data set before training on it: what is there, and what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError, printable
from cdt_fast.listing import count_junk
from cdt_fast.progress import progress_bar
from cdt_fast.video.data.frames import open_source
from cdt_fast.video.data.trees import Clip, find_clips

STATIC_DIFFERENCE = 0.5
"""Mean absolute difference to the frame before, in gray levels of 0..255, below which a frame counts as static.

Half a level is what rounding alone can make of an unchanged picture; repeated frames of a compressed video lie below.
"""


def check(source: str | os.PathLike[str], *, progress: bool = True) -> dict[str, Any]:
    """Decode every clip once and report what is there. A clip that cannot be read does not stop the others.

    Args:
        source: anything `find_clips` takes.
        progress: show a bar on stderr while decoding.

    Returns:
        A dictionary for JSON: `source`; `splits` (clips in each of "train", "test" and "unmarked"); `frames` (sum over
        the readable clips); `static_share` (of all frames that follow another, those whose mean absolute difference
        from it is below `STATIC_DIFFERENCE`; None without frames); `junk_skipped` (files and folders passed over);
        `problems` (clips that cannot be read); `clips`, each with `name`, `split`, `frames`, `width`, `height`,
        `frame_rate` (frames a second, or None), `static_share`, `notes` (what is wrong with a clip that can be read)
        and `problem` (its first one, or None).

    Raises:
        InputError: there are no clips at `source` to look at.
    """
    root = Path(source)
    sources = find_clips(root)
    clips = [_check_clip(clip, progress) for clip in sources]
    readable = [clip for clip in clips if clip["problem"] is None]
    pairs = sum(clip["frames"] - 1 for clip in readable)
    static = sum(clip["static_share"] * (clip["frames"] - 1) for clip in readable)
    splits = [clip.split or "unmarked" for clip in sources]
    return {
        "source": str(root),
        "splits": {name: splits.count(name) for name in ("train", "test", "unmarked")},
        "frames": sum(clip["frames"] for clip in readable),
        "static_share": static / pairs if pairs else None,
        "junk_skipped": count_junk(root) if root.is_dir() else 0,
        "problems": len(clips) - len(readable),
        "clips": clips,
    }


def describe_check(report: dict[str, Any]) -> str:
    """The report of `check` for a person: a summary, then a line for each clip."""
    counts = ", ".join(f"{number} {name}" for name, number in report["splits"].items() if number)
    static = "" if report["static_share"] is None else f", {report['static_share']:.0%} static"
    lines = [
        f"{report['source']}: {counts} clip(s), {report['frames']} frames{static}; "
        f"{report['junk_skipped']} junk entries skipped; {report['problems']} problem(s)"
    ]
    for clip in report["clips"]:
        if clip["problem"] is not None:
            lines.append(f"  PROBLEM {clip['problem']}")
            continue
        rate = "" if clip["frame_rate"] is None else f", {clip['frame_rate']:.4g} frames a second"
        lines.append(
            f"  {clip['name']}: {clip['frames']} frames, {clip['width']}x{clip['height']}{rate}, "
            f"{clip['static_share']:.0%} static"
        )
        lines += [f"  NOTE {note}" for note in clip["notes"]]
    return printable("\n".join(lines))


def _check_clip(clip: Clip, progress: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": clip.name,
        "split": clip.split,
        "frames": 0,
        "width": None,
        "height": None,
        "frame_rate": None,
        "static_share": None,
        "notes": [],
        "problem": None,
    }
    count = static = 0
    previous: np.ndarray | None = None
    try:
        source = open_source(clip.path)
        result["frame_rate"] = None if source.frame_rate is None else float(source.frame_rate)
        for frame in progress_bar(source.frames(), desc=printable(clip.name), unit="frame", shown=progress):
            result["height"], result["width"] = frame.shape[:2]
            count += 1
            # A video may change from gray to color; those are never the same picture.
            if previous is not None and previous.shape == frame.shape:
                static += _difference(previous, frame) < STATIC_DIFFERENCE
            previous = frame
        result["static_share"] = static / (count - 1)
        result["notes"] = source.notes
    except InputError as error:
        result["problem"] = str(error)
    result["frames"] = count
    return result


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    larger, smaller = np.maximum(first, second), np.minimum(first, second)
    return float((larger - smaller).mean())
