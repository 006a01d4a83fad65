"""Open whatever holds the frames of one clip: arrays, which are read here, pictures and video files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError
from cdt_fast.files import shown
from cdt_fast.listing import ARRAY_SUFFIXES
from cdt_fast.video.data.pictures import Pictures, holds_pictures
from cdt_fast.video.data.source import FrameSource, require_frames
from cdt_fast.video.data.video_file import VideoFile

_MOST_PACKED_BYTES = 2 << 30  # of a .npz file, whose array is unpacked into the memory
_EXPECTED_ARRAY = "expected uint8, or floats within [0, 1], of shape [frames, h, w] or [frames, h, w, 3]"


class FrameArray(FrameSource):
    """A .npy file, or a .npz file with one array (or one called "frames").

    Raises:
        InputError: the file cannot be read or its dtype or shape is not that of a clip.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        array = self._load()
        if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
            raise InputError(f"{path}: the array has dtype {array.dtype}; {_EXPECTED_ARRAY}")
        channels = array.ndim == 4 and array.shape[3] in (1, 3)
        if not (array.ndim == 3 or channels) or 0 in array.shape[1:]:
            raise InputError(f"{path}: the array has shape {list(array.shape)}; {_EXPECTED_ARRAY}")
        require_frames(path, array.shape[0])

    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        for index, frame in enumerate(self._load()):
            label = f"frame {index}"
            frame = frame[..., 0] if frame.shape[2:] == (1,) else frame
            yield label, frame if frame.dtype == np.uint8 else self._scaled(label, frame)

    def _scaled(self, label: str, frame: np.ndarray) -> np.ndarray:
        if not np.isfinite(frame).all():
            raise InputError(f"{self.path}: {label} holds NaN or infinity; {_EXPECTED_ARRAY}")
        if frame.min() < 0 or frame.max() > 1:
            values = f"[{frame.min():g}, {frame.max():g}]"
            raise InputError(f"{self.path}: {label} has values in {values}; {_EXPECTED_ARRAY}")
        return np.rint(frame.astype(np.float64) * 255).astype(np.uint8)

    def _load(self) -> np.ndarray:
        try:
            loaded = np.load(self.path, mmap_mode="r", allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            with loaded:
                array = self._member(loaded)
        except InputError:
            raise
        # NumPy reports broken files by SyntaxError, TypeError, MemoryError and what unpacks the member reports, too.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{self.path}: cannot be read as a NumPy array ({reason}); {_EXPECTED_ARRAY}") from error
        if not isinstance(array, np.ndarray):
            raise InputError(f"{self.path}: holds something else than an array; {_EXPECTED_ARRAY}")
        return array

    def _member(self, archive: Any) -> Any:
        names = archive.files
        if "frames" not in names and len(names) != 1:
            raise InputError(f"{self.path}: expected one array, or one called 'frames'; the arrays are: {shown(names)}")
        name = "frames" if "frames" in names else names[0]
        size = max(entry.file_size for entry in archive.zip.infolist())
        if size > _MOST_PACKED_BYTES:
            raise InputError(
                f"{self.path}: unpacks to {size / (1 << 30):.1f} GiB, which would fill the memory; save the array as "
                ".npy, which is read a frame at a time"
            )
        return archive[name]


def open_source(path: str | os.PathLike[str]) -> FrameSource:
    """The clip at `path`: a video file, a folder of pictures, a TIFF of several pages, or a .npy or .npz array.

    Opening checks what a look at the header shows; the rest is checked while `frames()` reads. A video is always
    decoded from the start, in order.

    Raises:
        InputError: the path is missing or is not a clip; the message says what was found.
        MissingExtra: a video or picture is to be read and the `video` extra is not installed.
    """
    place = Path(path)
    if place.is_dir():
        return Pictures(place)
    if not place.exists():
        raise InputError(f"{place}: no such file or folder")
    if not place.is_file():
        raise InputError(f"{place}: is neither a file nor a folder")
    if place.suffix.lower() in ARRAY_SUFFIXES:
        return FrameArray(place)
    return Pictures(place) if holds_pictures(place) else VideoFile(place)
