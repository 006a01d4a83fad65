"""A folder of numbered pictures, read with Pillow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError, require
from cdt_fast.listing import images
from cdt_fast.video.data.source import FrameSource, require_frames

_GRAY_MODES = frozenset({"1", "L"})
_COLOR_MODES = frozenset({"P", "PA", "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"})


class FrameFolder(FrameSource):
    """Pictures of one folder in natural order of their names; hidden files, backups and thumbnails are skipped.

    Raises:
        InputError: the folder holds no pictures, or only one.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._images = images(path)
        if not self._images:
            raise InputError(f"{path}: the folder holds no frames; expected tif, tiff, jpg, jpeg, png or bmp files")
        require_frames(path, len(self._images))

    @property
    def files(self) -> list[Path]:
        return self._images

    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        pillow = require("PIL.Image", "video", "reading a folder of frames")
        for path in self._images:
            yield f"frame {path.name}", _read_image(pillow, path)


def _read_image(pillow: Any, path: Path) -> np.ndarray:
    try:
        with pillow.open(path) as image:
            if image.mode in _GRAY_MODES:
                return np.asarray(image.convert("L"))
            if image.mode in _COLOR_MODES:
                return np.asarray(image.convert("RGB"))
            mode = image.mode
    # Pillow reports broken files by SyntaxError, ValueError, EOFError and struct.error as well as by OSError.
    except Exception as error:
        raise InputError(f"{path}: the picture cannot be read ({error})") from error
    raise InputError(f"{path}: the picture has pixel mode {mode}; expected 8-bit gray or color")
