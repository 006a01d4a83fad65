"""Decoded clips on the disk: one uint8 array a clip, made once and read through the page cache.

A file is a NumPy array, followed by the clip's notes as JSON and by `_TRAILER`: the number of frames, the length of the
notes, and a checksum of all of it and of what the clip is.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from cdt_fast.errors import InputError, printable
from cdt_fast.files import remove_leftovers, replaced_atomically
from cdt_fast.progress import progress_bar
from cdt_fast.video.data.crops import Crops
from cdt_fast.video.data.frames import open_source
from cdt_fast.video.data.source import FrameSource
from cdt_fast.video.data.trees import Clip, DecodedClip

PREPROCESS_VERSION = 3  # raise it with any change that can move a pixel: caches made before are then rebuilt
_RED, _GREEN, _BLUE = np.float32(0.299), np.float32(0.587), np.float32(0.114)
_TRAILER = struct.Struct(">QII")  # frames, bytes of the notes, CRC-32


def default_cache_dir() -> Path:
    """`$CDT_FAST_CACHE`, else `$XDG_CACHE_HOME/cdt_fast`, else `~/.cache/cdt_fast`."""
    chosen = os.environ.get("CDT_FAST_CACHE")
    if chosen:
        return Path(chosen)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "cdt_fast"


def load_clip(
    clip: Clip,
    size: int = 160,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    crops: Crops | None = None,
) -> DecodedClip:
    """The pre-processed frames of a clip, decoded on the first call and cached.

    A cached file belongs to the place, sizes and times of the clip's files, to `size` and to the version of the
    pre-processing, and its checksum covers them: one that was cut short, altered or put there for another clip is made
    again. Only its owner can read it. Temporary files that a killed process left in the cache are removed.

    Args:
        clip: from `find_clips`.
        size: height and width of the result in pixels.
        cache_dir: folder of the cache; see `default_cache_dir`.
        progress: show a bar on stderr while decoding.
        crops: cut the frames in place of resizing them; the result is `crops.rows`, of this size.

    Raises:
        InputError: the clip cannot be read, or the cache cannot be written.
    """
    source = open_source(clip.path)
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir)
    key = _key(source, size, [] if crops is None else crops.identity)
    path = folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', source.path.stem)[:40]}-{key[:32]}.npy"
    cached = _read(path, size, key)
    if cached is None:
        bar = progress_bar(source.frames(), desc=printable(clip.name), unit="frame", shown=progress)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_leftovers(folder)
            with bar, replaced_atomically(path, mode=0o600) as temporary, temporary.open("wb") as file:
                rows = (preprocess(frame, size) for frame in bar) if crops is None else crops.rows(bar, size)
                count = _write(file, rows, size, key, source)
        except OSError as error:
            raise InputError(
                f"{folder}: the cache cannot be written ({error.strerror}); free some room, or choose another folder "
                "with CDT_FAST_CACHE"
            ) from error
        frames = np.memmap(path, np.uint8, "r", offset=len(_header(count, size)), shape=(count, size, size))
        cached = frames, tuple(source.notes)
    return DecodedClip(clip.name, cached[0], source.frame_rate, clip.split, cached[1])


def preprocess(frame: np.ndarray, size: int) -> np.ndarray:
    """Luma of one frame, resized to a square: the one way from decoded whole frames to what a model sees.

    Every published number rests on these pixels, so the path is pinned: a decoder's own gray conversion differs from it
    by up to four levels.

    Args:
        frame: uint8 [h, w, 3] RGB, or [h, w] gray, in 0..255.
        size: height and width of the result in pixels; the aspect ratio is not kept.

    Returns:
        uint8 [size, size], 0..255.
    """
    pixels = frame.astype(np.float32)
    if pixels.ndim == 3:
        # Three products and two sums, not a matrix product: that may fuse or reorder them, machine by machine.
        pixels = _RED * pixels[..., 0] + _GREEN * pixels[..., 1] + _BLUE * pixels[..., 2]
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(pixels)[None, None], size=(size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return resized[0, 0].round_().clamp_(0, 255).to(torch.uint8).numpy()


def _key(source: FrameSource, size: int, cut: list[object]) -> str:
    identity: list[object] = [PREPROCESS_VERSION, size, str(source.path.resolve()), *cut]
    for file in source.files:
        try:
            status = file.stat()
        except OSError as error:
            raise InputError(f"{file}: the file cannot be read ({error.strerror})") from error
        identity.append([file.name, status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _write(file: BinaryIO, frames: Iterable[np.ndarray], size: int, key: str, source: FrameSource) -> int:
    """Write all `frames`; returns how many. The notes of `source` are whole only after the last of them."""
    checksum = zlib.crc32(key.encode())
    count = 0
    file.write(_header(0, size))
    for frame in frames:
        data = frame.tobytes()
        file.write(data)
        checksum = zlib.crc32(data, checksum)
        count += 1
    # numpy.load maps the array and never looks at what follows it.
    notes = json.dumps(source.notes).encode()
    file.write(notes)
    file.write(_TRAILER.pack(count, len(notes), _sealed(checksum, notes, count)))
    file.seek(0)
    file.write(_header(count, size))
    return count


def _header(count: int, size: int) -> bytes:
    # The format leaves room for the first axis to grow, which is what lets the count be filled in at the end.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (count, size, size)})
    return header.getvalue()


def _sealed(checksum: int, notes: bytes, count: int) -> int:
    return zlib.crc32(notes + struct.pack(">Q", count), checksum)


def _read(path: Path, size: int, key: str) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """The cached frames and notes, or None where there are none or they are not what was written."""
    try:
        data = np.memmap(path, np.uint8, "r")
        end = len(data) - _TRAILER.size
        count, note_bytes, sealed = _TRAILER.unpack(data[max(0, end) :].tobytes())
    except (OSError, ValueError, struct.error):
        return None
    # The header is not parsed: it is known. A count that is not that of the file leads to another one.
    header, pixels = _header(count, size), count * size * size
    start, stop = len(header), len(header) + pixels
    if stop + note_bytes != end or data[:start].tobytes() != header:
        return None
    notes = data[stop:end].tobytes()
    if _sealed(zlib.crc32(data[start:stop].data, zlib.crc32(key.encode())), notes, count) != sealed:
        return None
    return data[start:stop].reshape(count, size, size), tuple(json.loads(notes))
