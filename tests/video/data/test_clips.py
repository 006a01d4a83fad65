from __future__ import annotations

from pathlib import Path

import pytest

from cdt_fast.listing import natural_key
from cdt_fast.video.data.clips import Clip, find_clips
from tests.video.clips import refused


def make(root: Path, *files: str) -> None:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def found(path: Path) -> list[tuple[str, str | None]]:
    return [(clip.name, clip.split) for clip in find_clips(path)]


def test_natural_order():
    names = ["frame10", "frame2", "Frame1", "2", "10", "a"]
    assert sorted(names, key=natural_key) == ["2", "10", "a", "Frame1", "frame2", "frame10"]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.npy", "clip.unknown", "walk"])
def test_a_file_or_a_folder_of_pictures_is_one_clip(tmp_path, monkeypatch, name):
    make(tmp_path, *(["walk/1.png", "walk/2.png"] if name == "walk" else [name]))
    assert find_clips(tmp_path / name) == [Clip(name, tmp_path / name, None)]
    if name == "walk":
        monkeypatch.chdir(tmp_path / name)
        assert found(Path()) == [("walk", None)]  # the working directory has a name


def test_a_folder_of_clips_of_every_kind(tmp_path):
    make(tmp_path, "b10.mp4", "b2.avi", "a.npy", "c/1.jpg", "c/2.jpg", "notes.md", "._b2.avi", "b2.avi~", "empty/x.txt")
    assert found(tmp_path) == [("a.npy", None), ("b2.avi", None), ("b10.mp4", None), ("c", None)]


AVENUE = ["training_videos/01.avi", "training_videos/02.avi", "testing_videos/01.avi", "testing_videos/21.avi"]
LITTER = ["training_vol/vol01.mat", "testing_vol/vol01.avi", "ground_truth_demo/gt.avi", "training_videos/.DS_Store"]
FRAMES = [f"{split}/frames/0{clip}" for split in ("training", "testing") for clip in (1, 2)]
UCSD = [f"{split}/{split}00{clip}" for split in ("Train", "Test") for clip in (1, 2)]
UCSD_LITTER = ["Test/Test001_gt/001.bmp", "Test/._Test001", "Train/Train001/._001.tif", "Train/Train001/001.tif~"]
SHANGHAI_LITTER = ["training/frames/01_001/1.jpg", "testing/test_frame_mask/01_0014.npy"]
SHANGHAI = ["training/videos/01_001.avi", "training/videos/01_010.avi", "testing/frames/01_0014"]
TREES = {  # the clips, and the files
    "Avenue": (AVENUE, [*AVENUE, *LITTER, "training_videos/._01.avi"]),
    "Avenue as frames": (FRAMES, [f"{folder}/000{frame}.jpg" for folder in FRAMES for frame in (0, 1)]),
    "UCSD": (UCSD, [*(f"{folder}/00{frame}.tif" for folder in UCSD for frame in (1, 2)), *UCSD_LITTER]),
    "ShanghaiTech": (SHANGHAI, [*SHANGHAI[:2], f"{SHANGHAI[2]}/000.jpg", f"{SHANGHAI[2]}/001.jpg", *SHANGHAI_LITTER]),
}


@pytest.mark.parametrize(("clips", "files"), TREES.values(), ids=TREES)
@pytest.mark.parametrize("prefix", ["", "Data Set/", "data/Data Set/"])
def test_known_trees_are_found_below_folders(tmp_path, prefix, clips, files):
    make(tmp_path, *(prefix + file for file in files))
    splits = ["train" if clip.lower().startswith("train") else "test" for clip in clips]
    assert found(tmp_path) == [(prefix + clip, split) for clip, split in zip(clips, splits, strict=True)]


def test_both_parts_of_ucsd_must_be_chosen_from(tmp_path):
    make(tmp_path, *(f"UCSD/UCSDped{part}/{file}" for part in (1, 2) for file in TREES["UCSD"][1]))
    facts = (str(tmp_path / "UCSD" / "UCSDped1"), str(tmp_path / "UCSD" / "UCSDped2"), "give one of them")
    refused(tmp_path / "UCSD", *facts, by=lambda: find_clips(tmp_path))


def test_an_annotation_folder_can_still_be_asked_for(tmp_path):
    make(tmp_path, "Test001_gt/1.bmp", "Test001_gt/2.bmp")
    assert found(tmp_path / "Test001_gt") == [("Test001_gt", None)]


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        (["cover.jpg", "walk.mp4"], ("both pictures and clips", "walk.mp4")),
        (["a/b/notes.txt", "masks/01_label.mat", "a/._1.png"], ("no clips found", "expected videos")),
        (["a/" * 60 + "b~"], ("no clips found",)),
        ([], ("no such file",)),
    ],
)
def test_what_holds_no_clips_is_refused(tmp_path, files, facts):
    make(tmp_path / "set", *files)
    refused(tmp_path / "set", *facts, by=lambda: find_clips(tmp_path / "set"))


def test_links_are_clips_and_lead_nowhere_else(tmp_path):
    make(tmp_path, "set/b/walk/1.png", "elsewhere/run/1.png", "elsewhere/run.mp4")
    (tmp_path / "set" / "b" / "run").symlink_to(tmp_path / "elsewhere" / "run")
    (tmp_path / "set" / "loop").symlink_to(tmp_path / "set")
    assert found(tmp_path / "set") == [("b/run", None), ("b/walk", None)]
