"""A clip stored as a NumPy array."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError
from cdt_fast.files import shown
from cdt_fast.video.data.source import FrameSource, require_frames

_MOST_PACKED_BYTES = 2 << 30  # of a .npz file, whose array is unpacked into the memory
_EXPECTED = "expected uint8, or floats within [0, 1], of shape [frames, h, w] or [frames, h, w, 3]"


class FrameArray(FrameSource):
    """A .npy file, or a .npz file with one array (or one called "frames").

    Raises:
        InputError: the file cannot be read or its dtype or shape is not that of a clip.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        array = self._load()
        if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
            raise InputError(f"{path}: the array has dtype {array.dtype}; {_EXPECTED}")
        color = array.ndim == 4 and array.shape[3] == 3
        if not (array.ndim == 3 or color) or 0 in array.shape[1:]:
            raise InputError(f"{path}: the array has shape {list(array.shape)}; {_EXPECTED}")
        require_frames(path, array.shape[0])

    @property
    def files(self) -> list[Path]:
        return [self.path]

    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        for index, frame in enumerate(self._load()):
            label = f"frame {index}"
            yield label, frame if frame.dtype == np.uint8 else self._scaled(label, frame)

    def _scaled(self, label: str, frame: np.ndarray) -> np.ndarray:
        if not np.isfinite(frame).all():
            raise InputError(f"{self.path}: {label} holds NaN or infinity; {_EXPECTED}")
        if frame.min() < 0 or frame.max() > 1:
            values = f"[{frame.min():g}, {frame.max():g}]"
            raise InputError(f"{self.path}: {label} has values in {values}; {_EXPECTED}")
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
            raise InputError(f"{self.path}: cannot be read as a NumPy array ({reason}); {_EXPECTED}") from error
        if not isinstance(array, np.ndarray):
            raise InputError(f"{self.path}: holds something else than an array; {_EXPECTED}")
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
