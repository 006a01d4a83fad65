"""Find the clips of a data set, whichever of the usual folder trees it comes in, and open them.

Known trees: CUHK Avenue as distributed (`training_videos/`, `testing_videos/`) and as frames
(`training/frames/NN/`), UCSD pedestrians (`Train/TrainNNN/`, `Test/TestNNN/`), ShanghaiTech (`training/videos/`,
`testing/frames/`); and any folder of videos, of frame folders or of arrays. Folders wrapped around these are opened.
"""

import os
from pathlib import Path
from typing import Literal, NamedTuple

from cdt_fast.checks import InputError
from cdt_fast.listing import ARRAY_SUFFIXES, IMAGE_SUFFIXES, VIDEO_SUFFIXES, entries, images
from cdt_fast.video.data.pictures import Pictures
from cdt_fast.video.data.source import FrameArray, FrameSource
from cdt_fast.video.data.video_file import VideoFile

Split = Literal["train", "test"]

_SPLIT_FOLDERS: dict[str, Split] = {"train": "train", "training": "train", "training_videos": "train"}
_SPLIT_FOLDERS |= {"test": "test", "testing": "test", "testing_videos": "test"}
# ShanghaiTech keeps its masks beside these two, and people extract `frames` beside the original `videos`.
_CLIP_FOLDERS = ("videos", "frames")
_MAX_WRAPPERS = 4


class Clip(NamedTuple):
    """A clip of a data set; its name is the path below what was asked for, as "training_videos/01.avi"."""

    name: str
    path: Path
    split: Split | None = None


def open_source(path: str | os.PathLike[str]) -> FrameSource:
    """Open a clip, a video file, a folder of pictures or a .npy array; much of it is checked as `frames()` reads.
    InputError: the path is missing or is not a clip. MissingExtra: the `video` extra is needed, and not installed."""
    place = Path(path)
    if place.is_dir():
        return Pictures(place)
    if not place.is_file():
        raise InputError(f"{place}: {'is neither a file nor a' if place.exists() else 'no such file or'} folder")
    if place.suffix.lower() in ARRAY_SUFFIXES:
        return FrameArray(place)
    return Pictures(place) if place.suffix.lower() in IMAGE_SUFFIXES else VideoFile(place)


def find_clips(path: str | os.PathLike[str]) -> list[Clip]:
    """Find the clips at `path`, in natural order, training clips first; nothing is decoded.

    A file, or a folder of pictures, is one clip. Hidden files, backups, annotations (`*_gt`, `ground_truth*`,
    `testing_vol`, `.mat`) and every other kind of file are passed over. InputError: the path is missing, holds no
    clips, or holds several data sets of which one must be chosen.
    """
    root = Path(path)
    if not root.exists():
        raise InputError(f"{root}: no such file or folder")
    clips = _clips_below(root, 0) if root.is_dir() else [(root, None)]
    if not clips:
        kinds = f"videos, .npy arrays, folders of frames ({', '.join(sorted(IMAGE_SUFFIXES))})"
        raise InputError(f"{root}: no clips found; expected {kinds}, or a tree of Avenue, UCSD or ShanghaiTech")
    names = (root.resolve().name if clip == root else clip.relative_to(root).as_posix() for clip, _ in clips)
    return [Clip(name, *clip) for name, clip in zip(names, clips, strict=True)]


def _clips_below(folder: Path, depth: int) -> list[tuple[Path, Split | None]]:
    """Find the clips of `folder`. Links to folders are not opened in search of a tree: they may lead back."""
    subfolders = [path for path in entries(folder) if path.is_dir()]
    marked: list[tuple[Path, Split | None]] = [
        (source, split)
        for part in subfolders
        if (split := _SPLIT_FOLDERS.get(part.name.casefold()))
        for source in _sources(_clip_folder(part))
    ]
    if marked:
        return sorted(marked, key=lambda clip: clip[1] != "train")
    sources = _sources(folder)
    if images(folder):
        if sources:
            both = f"holds both pictures and clips ({sources[0].name})"
            raise InputError(f"{folder}: {both}; give the frames of one clip a folder of their own")
        return [(folder, None)]
    if sources or depth == _MAX_WRAPPERS:
        return [(source, None) for source in sources]
    wrappers = [part for part in subfolders if not part.is_symlink()]
    data_sets = [(part, found) for part in wrappers if (found := _clips_below(part, depth + 1))]
    if len(data_sets) > 1:
        choices = ", ".join(sorted(str(part) for part, _ in data_sets))
        raise InputError(f"{folder}: holds {len(data_sets)} data sets; give one of them: {choices}")
    return data_sets[0][1] if data_sets else []


def _clip_folder(part: Path) -> Path:
    inner = {path.name.casefold(): path for path in entries(part) if path.is_dir()}
    return next((inner[name] for name in _CLIP_FOLDERS if name in inner), part)


def _sources(folder: Path) -> list[Path]:
    suffixes = VIDEO_SUFFIXES | ARRAY_SUFFIXES
    return [path for path in entries(folder) if (images(path) if path.is_dir() else path.suffix.lower() in suffixes)]
