"""Pictures as the frames of one clip: the files of a folder."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.checks import InputError, require
from cdt_fast.listing import IMAGE_SUFFIXES, images, other_images
from cdt_fast.video.data.source import FrameSource

_GRAY_MODES = frozenset({"1", "L", "LA"})
_COLOR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"})
_DESCRIPTION, _SAMPLE_FORMAT, _SIGNED = 270, 339, 2  # tags of TIFF, and a value of the second
_SRGB_GAMMA = 1 / 2.2
_MOST_DIGITS = 11  # of a file's number; of more it is a date and a time, whose steps are not even


class Pictures(FrameSource):
    """Pictures in natural order of their names; upright, as EXIF says.

    Hidden files, backups and thumbnails are skipped. A clip with one color picture is a color clip.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._seen: dict[str, list[str]] = {}  # notes and the files that they are about
        self.files = images(path) if path.is_dir() else [path]
        if not self.files:
            suffixes = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
            raise InputError(f"{path}: the folder holds no frames; expected {suffixes} files")

    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        colored = any(self._has_color(file) for file in self.files)
        self._seen.clear()
        for file in self.files:
            with self._opened(file) as image:
                yield f"frame {file.name}", self._pixels(image, file, colored)
        count = len(self.files)
        notes = [f"{what} ({names[0]}; {len(names)} of {count} pictures)" for what, names in self._seen.items()]
        if self.path.is_dir() and (others := other_images(self.path)):
            notes.append(f"other picture formats are skipped ({others[0].name}; {len(others)} files)")
        self.notes = [f"{self.path}: {note}" for note in [*notes, *naming_signs(self.files)]]

    def _has_color(self, file: Path) -> bool:
        with suppress(InputError), self._opened(file) as image:  # reading the frames raises it again, in its turn
            return image.mode not in _GRAY_MODES
        return False

    @contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        """Open a file that holds one picture, or one with previews or a map of depth, as phones write (MPO)."""
        try:
            with require("PIL.Image", "video", "reading pictures").open(file) as image:
                count = getattr(image, "n_frames", 1)
                if image.format == "TIFF":  # ImageJ writes the pages of more than 4 GiB without an entry for each
                    stated = re.match(r"ImageJ=.*?\bimages=([0-9]+)", str(image.tag_v2.get(_DESCRIPTION, "")), re.S)
                    count = max(count, int(stated[1]) if stated else 1)
                if count > 1 and image.format != "MPO":
                    raise InputError(f"{file}: holds {count} pictures; save them as a video, or as a file each")
                if count > 1:
                    self._note("extra pictures in a file, such as previews, are skipped", file)
                yield image
        except InputError:
            raise
        # Pillow reports broken files by SyntaxError, ValueError, EOFError and struct.error as well as by OSError.
        except Exception as error:
            raise InputError(f"{file}: the picture cannot be read ({error})") from error

    def _pixels(self, image: Any, file: Path, colored: bool) -> np.ndarray:
        signed = image.format == "TIFF" and _SIGNED in image.tag_v2.get(_SAMPLE_FORMAT, ())
        if signed or image.mode not in _GRAY_MODES | _COLOR_MODES:
            raise InputError(
                f"{file}: has pixel mode {image.mode}{' of signed values' if signed else ''}, expected 8-bit gray or "
                "color: map the values to 0..255 and save it again, or save all frames as one .npy of floats in [0, 1]"
            )
        if image.tile and ";16" in str(image.tile[0][3]):
            self._note("16-bit colors are reduced to 8 bits, with 65535 as the brightest", file)
        profile, gamma = image.info.get("icc_profile"), image.info.get("gamma", _SRGB_GAMMA)
        # The name of a profile is in UTF-16 or ASCII.
        if (profile and b"sRGB" not in profile.replace(b"\0", b"")) or abs(gamma - _SRGB_GAMMA) > 0.01:
            self._note("colors are read as sRGB, though the file states another color space", file)
        pillow = require("PIL.Image", "video", "reading pictures")
        picture = require("PIL.ImageOps", "video", "reading pictures").exif_transpose(image)
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            if picture.getchannel("A").getextrema()[0] < 255:
                self._note("transparent pixels are shown on black", file)
                picture = pillow.alpha_composite(pillow.new("RGBA", picture.size, "black"), picture)
        return np.asarray(picture.convert("RGB" if colored else "L"))

    def _note(self, what: str, file: Path) -> None:
        self._seen.setdefault(what, []).append(file.name)


def naming_signs(files: list[Path]) -> list[str]:
    """Find signs in the names of files, given in natural order, that they are not one complete sequence.

    The number of a file is made of its first runs of digits, as many as it takes to tell all files apart.
    """
    by_pattern: dict[str, list[Path]] = {}
    for file in files:
        by_pattern.setdefault(re.sub("[0-9]+", "0", file.stem.casefold()), []).append(file)
    mixed = [group[0] for group in by_pattern.values()]  # of two sequences, where there are two
    files = max(by_pattern.values(), key=len)
    runs = [re.findall("[0-9]+", file.stem) for file in files]
    widths = [max(2, *map(len, column)) for column in zip(*runs, strict=True)]
    rows = [tuple(run.zfill(width) for run, width in zip(row, widths, strict=True)) for row in runs]
    used = next((end for end in range(1, len(widths) + 1) if len({row[:end] for row in rows}) == len(files)), None)
    missing: dict[int, int] = {}
    if used is not None:
        missing = _missing(["".join(row[:used]) for row in rows])
        if restarts := [files[at : at + 2] for at in missing if rows[at][: used - 1] != rows[at + 1][: used - 1]]:
            missing, mixed = {}, mixed if len(mixed) > 1 else restarts[0]
    elif len(files) > 1 == len(mixed):
        mixed = next(files[at : at + 2] for at in range(len(files) - 1) if rows[at] == rows[at + 1])
    signs = []
    if missing:
        number, at = sum(missing.values()), min(missing)
        signs.append(
            f"{number} frame{' is' if number == 1 else 's are'} missing between the {len(files)} that it holds, by the "
            f"numbers in their names: {files[at + 1].name} follows {files[at].name}"
        )
    if len(mixed) > 1:
        two = f"two sequences, or pictures and their masks: {mixed[0].name}, {mixed[1].name}"
        signs.append(f"the file names are not one sequence; it may hold {two}")
    return signs


def _missing(numbers: list[str]) -> dict[int, int]:
    """Count the numbers that are missing after each index, if most numbers are the same step apart."""
    steps = [later - earlier for earlier, later in pairwise(_values(numbers))]
    usual, times = max(Counter(steps).items(), key=lambda item: (item[1], -item[0]), default=(0, 0))
    if 2 * times <= len(steps) or len(numbers[0]) > _MOST_DIGITS:
        return {}
    return {at: round(step / usual) - 1 for at, step in enumerate(steps) if round(step / usual) > 1}


def _values(numbers: list[str]) -> list[int]:
    """Return the numbers; those of a date or a time of day in seconds, as they jump where months and minutes end."""
    for form in ("%Y%m%d%H", "%Y%m%d", "%H%M%S"):
        size = len(f"{datetime.max:{form}}")
        with suppress(ValueError):
            if len(numbers[0]) >= size and len({number[:-size] for number in numbers}) == 1:
                times = [datetime.strptime(number[-size:], form) for number in numbers]
                return [int((time - datetime.min).total_seconds()) for time in times]
    return [int(number) for number in numbers]
