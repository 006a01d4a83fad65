"""Folders listed in natural order, without the litter that archives and file managers leave."""

import mimetypes
import os
import re
from pathlib import Path

from cdt_fast.checks import InputError

IMAGE_SUFFIXES = frozenset({".tif", ".tiff", ".jpg", ".jpeg", ".png", ".bmp", ".webp"})
ARRAY_SUFFIXES = frozenset({".npy"})
VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg"})
VIDEO_SUFFIXES |= {".ts", ".m2ts", ".wmv", ".asf", ".flv", ".3gp", ".gif", ".apng"}
_LITTER = ("thumbs.db", "desktop.ini", "__macosx")
_ANNOTATION_FOLDERS = ("ground_truth", "testing_vol", "training_vol")


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which "frame2" comes before "frame10"."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    key = tuple((0, int(part), "") if part[0] in "0123456789" else (1, 0, part.casefold()) for part in parts)
    # "01" and "1" have equal parts: the name itself settles their order, so that it never depends on the disk.
    return (*key, (2, 0, name))


def entries(folder: Path) -> list[Path]:
    """Return all but hidden files, backups, thumbnails and annotations, in order; InputError: it cannot be listed."""
    try:
        paths = [folder / name for name in os.listdir(folder)]
    except OSError as error:
        raise InputError(f"{folder}: the folder cannot be listed ({error.strerror})") from error
    return sorted((path for path in paths if not _is_junk(path)), key=lambda path: natural_key(path.name))


def _is_junk(path: Path) -> bool:
    name = path.name.casefold()
    annotations = name.endswith("_gt") or name.startswith(_ANNOTATION_FOLDERS)
    return name.startswith(".") or name.endswith(("~", ".mat")) or name in _LITTER or (annotations and path.is_dir())


def images(folder: Path) -> list[Path]:
    """Return the image files directly in `folder`, in natural order."""
    return [path for path in entries(folder) if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]


def other_images(folder: Path) -> list[Path]:
    """Return the files directly in `folder` that are pictures by their suffix, of a kind that `images` passes over."""
    others = [path for path in entries(folder) if path.suffix.lower() not in IMAGE_SUFFIXES]
    return [path for path in others if str(mimetypes.guess_type(path.name, strict=False)[0]).startswith("image/")]
