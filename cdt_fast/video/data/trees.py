"""Find the clips of a data set, whichever of the usual folder trees it comes in.

Known trees: CUHK Avenue as distributed (`training_videos/`, `testing_videos/`) and as frames
(`training/frames/NN/`), UCSD pedestrians (`Train/TrainNNN/`, `Test/TestNNN/`), ShanghaiTech (`training/videos/`,
`testing/frames/`); and any folder of videos, of frame folders or of arrays. Folders wrapped around these are opened.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np

from cdt_fast.errors import InputError
from cdt_fast.listing import ARRAY_SUFFIXES, IMAGE_SUFFIXES, VIDEO_SUFFIXES, entries, images, other_images

Split = Literal["train", "test"]

_SPLIT_FOLDERS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "training_videos": "train",
    "test": "test",
    "testing": "test",
    "testing_videos": "test",
}
# ShanghaiTech keeps its masks beside these two, and people extract `frames` beside the original `videos`.
_CLIP_FOLDERS = ("videos", "frames")
_DEEPEST_WRAPPER = 4


@dataclass(frozen=True)
class Clip:
    """One clip of a data set.

    Attributes:
        name: path below the folder that was asked for, unique within it, for example "training_videos/01.avi".
        path: a video, an array file or a folder of frames.
        split: "train" or "test" where the tree says so, otherwise None.
    """

    name: str
    path: Path
    split: Split | None = None


@dataclass(frozen=True)
class DecodedClip:
    """A clip as the networks see it.

    Attributes:
        name: that of its `Clip`.
        frames: uint8 [frames, size, size]; of a clip on the disk a memory map, read-only.
        frame_rate: frames a second as the clip states it, or None.
        split: that of its `Clip`.
        notes: what is wrong with frames that were decoded all the same, a line each.
    """

    name: str
    frames: np.ndarray
    frame_rate: Fraction | None = None
    split: Split | None = None
    notes: tuple[str, ...] = ()


def find_clips(path: str | os.PathLike[str]) -> list[Clip]:
    """The clips at `path`, in natural order, training clips first.

    A file, or a folder of pictures, is one clip. Hidden files, backups (`*~`), annotations (`*_gt`, `ground_truth*`,
    `testing_vol`, `.mat`) and every other kind of file are passed over. Nothing is decoded.

    Raises:
        InputError: the path is missing, holds no clips, or holds several data sets of which one must be chosen.
    """
    root = Path(path)
    if not root.exists():
        raise InputError(f"{root}: no such file or folder")
    if not root.is_dir():
        return [Clip(_name(root, root), root)]
    clips = _clips_below(root, root, 0, {root.resolve()})
    if not clips:
        others = "".join(f"; {other.name} is not supported" for other in other_images(root)[:1])
        raise InputError(
            f"{root}: no clips found; expected videos, .npy or .npz arrays, folders of frames "
            f"({', '.join(sorted(IMAGE_SUFFIXES))}), or a tree of Avenue, UCSD or ShanghaiTech{others}"
        )
    return clips


def _clips_below(folder: Path, root: Path, depth: int, seen: set[Path]) -> list[Clip]:
    """The clips of `folder`; `seen` are the folders that were opened so far, which a link may lead to again."""
    marked = _marked_clips(folder, root)
    if marked:
        return marked
    sources = _sources(folder)
    if images(folder):
        if sources:
            raise InputError(
                f"{folder}: holds both pictures and clips ({sources[0].name}); give the frames of one clip a folder "
                "of their own"
            )
        return [Clip(_name(folder, root), folder)]
    if sources or depth == _DEEPEST_WRAPPER:
        return [Clip(_name(source, root), source) for source in sources]
    return _only_data_set(folder, root, depth, seen)


def _marked_clips(folder: Path, root: Path) -> list[Clip]:
    clips: list[Clip] = []
    for part in _subfolders(folder):
        split = _SPLIT_FOLDERS.get(part.name.casefold())
        if split is not None:
            clips += [Clip(_name(source, root), source, split) for source in _sources(_clip_folder(part))]
    return sorted(clips, key=lambda clip: clip.split != "train")


def _clip_folder(part: Path) -> Path:
    inner = {folder.name.casefold(): folder for folder in _subfolders(part)}
    return next((inner[name] for name in _CLIP_FOLDERS if name in inner), part)


def _sources(folder: Path) -> list[Path]:
    """Videos, arrays and folders of frames directly in `folder`."""
    return [
        path
        for path in entries(folder)
        if (bool(images(path)) if path.is_dir() else path.suffix.lower() in VIDEO_SUFFIXES | ARRAY_SUFFIXES)
    ]


def _only_data_set(folder: Path, root: Path, depth: int, seen: set[Path]) -> list[Clip]:
    parts: list[Path] = []
    for part in sorted(_subfolders(folder), key=Path.is_symlink):  # a folder goes before a link to it
        if part.resolve() not in seen:
            seen.add(part.resolve())
            parts.append(part)
    data_sets = [clips for part in parts if (clips := _clips_below(part, root, depth + 1, seen))]
    if len(data_sets) > 1:
        choices = ", ".join(sorted(str(folder / clips[0].path.relative_to(folder).parts[0]) for clips in data_sets))
        raise InputError(f"{folder}: holds {len(data_sets)} data sets; give one of them: {choices}")
    return data_sets[0] if data_sets else []


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in entries(folder) if path.is_dir()]


def _name(path: Path, root: Path) -> str:
    return root.resolve().name if path == root else path.relative_to(root).as_posix()
