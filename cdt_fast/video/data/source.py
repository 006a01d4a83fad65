"""What every kind of clip offers: its frames in order, checked while they pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError

MINIMUM_FRAMES = 2
DEFAULT_FRAME_RATE = Fraction(25)  # where a source states none, as folders of frames and arrays


class FrameSource(ABC):
    """A clip on the disk.

    Attributes:
        name: file or folder name, with its suffix.
        path: where it lies.
        files: those that the frames come from.
        frame_rate: frames a second as the file states it, None where it states none (frame folders, arrays).
        notes: what is wrong with frames that were read all the same, a line each; whole once `frames` has ended.
        times: when each frame read so far is shown, in seconds of the file's clock; empty where it states no times.
        tags: properties of FFmpeg's codec context that say how to show the frames; known with the first frame.
        lost: what the file says of how to show its frames that neither they nor `tags` hold; the keys, in order.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.resolve().name
        self.path = path
        self.files = [path]
        self.frame_rate: Fraction | None = None
        self.notes: list[str] = []
        self.times: list[Fraction] = []
        self.tags: dict[str, Any] = {}
        self.lost: dict[str, None] = {}

    @abstractmethod
    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each frame in order, with what to call it in a message ("frame 3" or "frame 003.png")."""

    def frames(self) -> Iterator[np.ndarray]:
        """The frames in order: uint8 [h, w, 3] RGB or, from gray sources, [h, w].

        Raises:
            InputError: a frame cannot be read, has another size than the first, or there are fewer than two frames.
        """
        count = 0
        first_size: tuple[int, int] | None = None
        for label, frame in self._read():
            size = (frame.shape[1], frame.shape[0])
            first_size = first_size or size
            if size != first_size:
                raise InputError(
                    f"{self.path}: {label} is {size[0]}x{size[1]} pixels and the first frame is "
                    f"{first_size[0]}x{first_size[1]}; all frames of a clip must have one size"
                )
            count += 1
            yield frame
        require_frames(self.path, count)


def require_frames(path: Path, count: int) -> None:
    """Refuse a clip of fewer than two frames.

    Raises:
        InputError: there are fewer than `MINIMUM_FRAMES`.
    """
    if count < MINIMUM_FRAMES:
        frames = "no frames" if count == 0 else "only one frame"
        raise InputError(f"{path}: {frames} found; a clip needs at least {MINIMUM_FRAMES} frames")
