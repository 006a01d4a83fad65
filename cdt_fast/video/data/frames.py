"""Open whatever holds the frames of one clip."""

from __future__ import annotations

import os
from pathlib import Path

from cdt_fast.errors import InputError
from cdt_fast.listing import ARRAY_SUFFIXES
from cdt_fast.video.data.frame_array import FrameArray
from cdt_fast.video.data.frame_folder import FrameFolder
from cdt_fast.video.data.source import FrameSource
from cdt_fast.video.data.video_file import VideoFile


def open_source(path: str | os.PathLike[str]) -> FrameSource:
    """The clip at `path`: a video file, a folder of pictures, or a .npy or .npz array.

    Opening checks what a look at the header shows; the rest is checked while `frames()` reads. A video is always
    decoded from the start, in order.

    Raises:
        InputError: the path is missing or is not a clip; the message says what was found.
        MissingExtra: a video or picture is to be read and the `video` extra is not installed.
    """
    place = Path(path)
    if place.is_dir():
        return FrameFolder(place)
    if not place.exists():
        raise InputError(f"{place}: no such file or folder")
    if not place.is_file():
        raise InputError(f"{place}: is neither a file nor a folder")
    if place.suffix.lower() in ARRAY_SUFFIXES:
        return FrameArray(place)
    return VideoFile(place)
