"""Decoded clips on the disk: one uint8 array a clip, made once and read through the page cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cdt_fast.errors import InputError
from cdt_fast.files import replaced_atomically
from cdt_fast.progress import progress_bar
from cdt_fast.video.data.frames import open_source
from cdt_fast.video.data.preprocess import PREPROCESS_VERSION, preprocess
from cdt_fast.video.data.source import FrameSource
from cdt_fast.video.data.trees import Clip

_CHECKSUM_BYTES = 4
_BLOCK_BYTES = 1 << 22


def default_cache_dir() -> Path:
    """`$CDT_FAST_CACHE`, else `$XDG_CACHE_HOME/cdt_fast`, else `~/.cache/cdt_fast`."""
    chosen = os.environ.get("CDT_FAST_CACHE")
    if chosen:
        return Path(chosen)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "cdt_fast"


def load_clip(
    clip: Clip, size: int = 160, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True
) -> np.ndarray:
    """The pre-processed frames of a clip, decoded on the first call and cached.

    A cached file belongs to the place, sizes and times of the clip's files, to `size` and to the version of the
    pre-processing. It ends with a checksum: one that was cut short or altered is made again.

    Args:
        clip: from `find_clips`.
        size: height and width of the result in pixels.
        cache_dir: folder of the cache; see `default_cache_dir`.
        progress: show a bar on stderr while decoding.

    Returns:
        uint8 memory map [frames, size, size], read-only.

    Raises:
        InputError: the clip cannot be read, or the cache cannot be written.
    """
    source = open_source(clip.path)
    path = (default_cache_dir() if cache_dir is None else Path(cache_dir)) / _file_name(source, size)
    cached = _read(path, size)
    if cached is not None:
        return cached
    bar = progress_bar(source.frames(), desc=clip.name, unit="frame", shown=progress)
    try:
        with bar, replaced_atomically(path) as temporary, temporary.open("wb") as file:
            _write(file, (preprocess(frame, size) for frame in bar), size)
    except OSError as error:
        raise InputError(
            f"{path.parent}: the cache cannot be written ({error.strerror}); free some room, or choose another folder "
            "with CDT_FAST_CACHE"
        ) from error
    return _mapped(path)


def _file_name(source: FrameSource, size: int) -> str:
    identity: list[object] = [PREPROCESS_VERSION, size, str(source.path.resolve())]
    for file in source.files:
        try:
            status = file.stat()
        except OSError as error:
            raise InputError(f"{file}: the file cannot be read ({error.strerror})") from error
        identity.append([file.name, status.st_size, status.st_mtime_ns])
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', source.path.stem)[:40]}-{key[:32]}.npy"


def _write(file: BinaryIO, frames: Iterator[np.ndarray], size: int) -> None:
    count = checksum = 0
    _write_header(file, count, size)
    start = file.tell()
    for frame in frames:
        data = frame.tobytes()
        file.write(data)
        checksum = zlib.crc32(data, checksum)
        count += 1
    # numpy.load maps the array and never looks at what follows it.
    file.write(checksum.to_bytes(_CHECKSUM_BYTES, "big"))
    file.seek(0)
    _write_header(file, count, size)
    if file.tell() != start:
        raise RuntimeError("the header of a .npy file changed its length with the frame count")


def _write_header(file: BinaryIO, count: int, size: int) -> None:
    # The format leaves room for the first axis to grow, which is what lets the count be filled in at the end.
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, size, size)}
    np.lib.format.write_array_header_1_0(file, header)


def _read(path: Path, size: int) -> np.ndarray | None:
    """The cached array, or None where there is none or it is not what was written."""
    try:
        array = _mapped(path)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[1:] != (size, size):
            return None
        with path.open("rb") as file:
            file.seek(-array.nbytes - _CHECKSUM_BYTES, os.SEEK_END)
            checksum = 0
            remaining = array.nbytes
            while remaining:
                block = file.read(min(_BLOCK_BYTES, remaining))
                checksum = zlib.crc32(block, checksum)
                remaining -= len(block)
            return array if file.read() == checksum.to_bytes(_CHECKSUM_BYTES, "big") else None
    except (OSError, ValueError, EOFError):
        return None


def _mapped(path: Path) -> np.memmap:
    return np.lib.format.open_memmap(path, mode="r")
