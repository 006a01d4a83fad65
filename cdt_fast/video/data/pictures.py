"""Pictures as the frames of one clip: the files of a folder."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
_MAX_COUNTER = 99_999  # of a file's number; greater ones are dates or times, whose steps are not even


class Pictures(FrameSource):
    """Pictures in natural order of their names; upright, as EXIF says. Hidden files, backups and thumbnails are
    skipped. A clip with one color picture is a color clip."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._seen: dict[str, list[str]] = {}  # notes and the files that they are about
        self.files = images(path) if path.is_dir() else [path]
        if not self.files:
            suffixes = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
            raise InputError(f"{path}: the folder holds no frames; expected {suffixes} files")
        self.expected = len(self.files)

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
    """Find signs in the names of files, given in natural order, that they are not one complete sequence."""
    forms: dict[str, Path] = {}
    for file in files:
        forms.setdefault(re.sub("[0-9]+", "0", file.stem.casefold()), file)
    if len(forms) > 1:
        two = " and ".join(file.name for file in list(forms.values())[:2])
        return [f"the file names are not one sequence; it may hold two, or pictures and their masks: {two}"]
    columns = zip(*([int(run) for run in re.findall("[0-9]+", file.stem)] for file in files), strict=True)
    counters = [column for column in columns if len(set(column)) > 1]
    if len(counters) != 1 or max(counters[0]) > _MAX_COUNTER:  # of dates and times
        return []
    steps = [later - earlier for earlier, later in pairwise(counters[0])]
    usual, times = max(Counter(steps).items(), key=lambda item: (item[1], -item[0]))
    missing = {at: round(step / usual) - 1 for at, step in enumerate(steps) if 2 * step > 3 * usual > 0}
    if not missing or 2 * times <= len(steps):
        return []
    number, at = sum(missing.values()), min(missing)
    return [
        f"{number} frame{' is' if number == 1 else 's are'} missing between the {len(files)} that it holds, by the "
        f"numbers in their names: {files[at + 1].name} follows {files[at].name}"
    ]
