"""Decoded clips on the disk, made once: an array a clip, which is mapped, and a JSON file of the notes on it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cdt_fast.checks import InputError, printable
from cdt_fast.files import file_state, read_json, remove_leftovers, replaced_atomically, write_json
from cdt_fast.progress import progress_bar
from cdt_fast.video.data.clips import Clip, Split, open_source
from cdt_fast.video.data.crops import CROPS_VERSION, cut_crops

PREPROCESS_VERSION = 4  # raise it with any change that can move a pixel: caches made before are then rebuilt
_RED, _GREEN, _BLUE = np.float32(0.299), np.float32(0.587), np.float32(0.114)


class DecodedClip(NamedTuple):
    """A clip as the networks see it: uint8 [frames, size, size], or crops [windows, crops, 3, T, side, side], of a clip
    on the disk a read-only memory map; and notes of what is wrong with frames that were decoded all the same.
    """

    name: str
    frames: np.ndarray
    split: Split | None = None
    notes: tuple[str, ...] = ()


def default_cache_dir() -> Path:
    """Return `$CDT_FAST_CACHE`, else `$XDG_CACHE_HOME/cdt_fast`, else `~/.cache/cdt_fast`."""
    if chosen := os.environ.get("CDT_FAST_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cdt_fast"


def load_clip(
    clip: Clip,
    size: int = 160,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    crops_of: int | None = None,
) -> DecodedClip:
    """Return the pre-processed frames of a clip, decoded on the first call and cached.

    A cached file belongs to the place, sizes and times of the clip's files, and to all that changes pixels. Only its
    owner can read it. Temporary files that a killed process left are removed.

    Args:
        clip: from `find_clips`.
        size: height and width of the result in pixels.
        cache_dir: folder of the cache, None: `default_cache_dir()`.
        progress: show a bar on stderr while decoding.
        crops_of: cut the frames into crops of so many frames (`cut_crops`) in place of resizing them.

    Raises:
        InputError: the clip cannot be read, or the cache cannot be written.
    """
    source = open_source(clip.path)
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir)
    identity = [PREPROCESS_VERSION, CROPS_VERSION, size, crops_of, str(source.path.resolve())]
    identity += [[file.name, file_state(file)] for file in source.files]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    path = folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', source.path.stem)[:40]}-{key[:32]}.u8"
    contents = path.with_suffix(".json")
    try:
        held = read_json(contents)
        frames = np.memmap(path, np.uint8, "r", shape=tuple(held["shape"]))
        return DecodedClip(clip.name, frames, clip.split, tuple(held["notes"]))
    except (InputError, OSError, ValueError, TypeError, KeyError):
        pass  # there is none, or not all of it
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_leftovers(folder)
        bar = progress_bar(source.frames(), desc=printable(clip.name), unit="frame", shown=progress)
        shape, count = (size, size), 0
        with bar, replaced_atomically(path, mode=0o600) as temporary, temporary.open("wb") as file:
            for picture in cut_crops(bar, crops_of, size) if crops_of else (preprocess(frame, size) for frame in bar):
                file.write(picture.tobytes())
                shape, count = picture.shape, count + 1
        write_json(contents, {"shape": [count, *shape], "notes": source.notes})
    except OSError as error:
        raise InputError(
            f"{folder}: the cache cannot be written ({error.strerror}); free some room, or choose another folder "
            "with CDT_FAST_CACHE"
        ) from error
    # A clip that is shorter than a window of crops has no byte, and an empty file cannot be mapped.
    frames = np.memmap(path, np.uint8, "r", shape=(count, *shape)) if count else np.empty((0, *shape), np.uint8)
    return DecodedClip(clip.name, frames, clip.split, tuple(source.notes))


def luma(frame: np.ndarray) -> np.ndarray:
    """Return the luma of a frame, float32 [h, w] in 0..255."""
    pixels = frame.astype(np.float32)
    # Three products and two sums, not a matrix product: that may fuse or reorder them, machine by machine.
    return pixels if pixels.ndim == 2 else _RED * pixels[..., 0] + _GREEN * pixels[..., 1] + _BLUE * pixels[..., 2]


def preprocess(frame: np.ndarray, size: int) -> np.ndarray:
    """Return the luma of one frame, resized to a square: the one way from whole frames to what a model sees.

    Every published number rests on these pixels, so the path is pinned: a decoder's own gray conversion differs from it
    by up to four levels. The aspect ratio is not kept; uint8 [h, w, 3] or [h, w] becomes uint8 [size, size].
    """
    pixels = torch.from_numpy(luma(frame))[None, None]
    resized = torch.nn.functional.interpolate(
        pixels, size=(size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return resized[0, 0].round_().clamp_(0, 255).to(torch.uint8).numpy()
