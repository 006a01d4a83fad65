"""The base of every kind of clip, which gives its frames in order and checks them; and clips that are arrays."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.checks import InputError

DEFAULT_FRAME_RATE = Fraction(25)  # where a source states none, as folders of frames and arrays
_EXPECTED_ARRAY = "expected uint8, or floats within [0, 1], of shape [frames, h, w] or [frames, h, w, 3]"


class FrameSource(ABC):
    """A clip on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path]
        self.where = ""  # in what part of the clip, for a message
        self.frame_rate: Fraction | None = None  # a second; None where the file states none (frame folders, arrays)
        self.expected: int | None = None  # number of frames, as the file states it; None: it does not
        # What is wrong with frames that were read all the same, a line each; whole once `frames` has ended.
        self.notes: list[str] = []
        self.lasting = Fraction(0)  # seconds for which the frame read last is shown; 0: the file does not state it
        self.times: list[Fraction] = []  # of each frame read so far, in seconds; empty where the file states none
        # Properties of FFmpeg's codec context that say how to show the frames; known with the first frame.
        self.tags: dict[str, Any] = {}
        # What the file says of how to show its frames that neither they nor `tags` hold; the keys, in order.
        self.lost: dict[str, None] = {}

    @abstractmethod
    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each frame in order, with what to call it in a message ("frame 3" or "frame 003.png")."""

    def frames(self) -> Iterator[np.ndarray]:
        """Yield the frames in order: uint8 [h, w, 3] RGB or, from gray sources, [h, w]. InputError: a frame cannot be
        read, has another size than the first, or there are fewer than two frames."""
        count, first = 0, (0, 0)
        for count, (label, frame) in enumerate(self._read(), 1):
            height, width = frame.shape[:2]
            first = (height, width) if count == 1 else first
            if (height, width) != first:
                other = f"and the first frame is {first[1]}x{first[0]}; all frames of a clip must have one size"
                raise InputError(f"{self.path}: {label} is {width}x{height} pixels {other}")
            yield frame
        if count < 2:
            found = "only one frame" if count else "no frames"
            raise InputError(f"{self.path}: {found} found{self.where}; a clip needs at least 2 frames")


class Excerpt(FrameSource):
    """Frames `start` up to (not including) `stop` of a clip, for a look: without sound and tags."""

    def __init__(self, clip: FrameSource, start: int, stop: int) -> None:
        super().__init__(clip.path)
        self._clip, self._start, self._stop, self.frame_rate = clip, start, stop, clip.frame_rate
        self.where = f" in {start}:{stop}"
        self.expected = stop - start if clip.expected is None else max(0, min(stop, clip.expected) - start)

    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        self.times = []
        frames = self._clip.frames()
        for number, frame in enumerate(islice(frames, self._start, self._stop), self._start):
            self.times += self._clip.times[-1:]
            self.lasting = self._clip.lasting
            self.tags, self.lost = self._clip.tags, self._clip.lost
            yield f"frame {number}", frame
        del frames  # which ends its reading, and completes the notes
        self.notes = self._clip.notes


class FrameArray(FrameSource):
    """A .npy file, or an array in memory."""

    def __init__(self, path: Path, array: np.ndarray | None = None) -> None:
        super().__init__(path)
        self._array = array
        self.expected = None if array is None else len(array)

    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        try:
            array = np.lib.format.open_memmap(self.path, mode="r") if self._array is None else self._array
        except Exception as error:  # NumPy reports broken files by ValueError, SyntaxError, TypeError and others
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{self.path}: cannot be read as a NumPy array ({reason}); {_EXPECTED_ARRAY}") from error
        if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
            raise InputError(f"{self.path}: the array has dtype {array.dtype}; {_EXPECTED_ARRAY}")
        if not (array.ndim == 3 or (array.ndim == 4 and array.shape[3] in (1, 3))) or 0 in array.shape[1:]:
            raise InputError(f"{self.path}: the array has shape {list(array.shape)}; {_EXPECTED_ARRAY}")
        for index, frame in enumerate(array):
            frame = frame[..., 0] if frame.shape[2:] == (1,) else frame
            if frame.dtype != np.uint8:
                least, most = frame.min(), frame.max()
                if not (least >= 0 and most <= 1):  # NaN is neither
                    found = f"frame {index} has values in [{least:g}, {most:g}]"
                    raise InputError(f"{self.path}: {found}; {_EXPECTED_ARRAY}")
                frame = np.rint(frame.astype(np.float64) * 255).astype(np.uint8)
            yield f"frame {index}", frame
