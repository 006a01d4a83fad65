from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

import pytest

from cdt_fast.errors import InputError
from cdt_fast.listing import natural_key
from cdt_fast.video.data.clips import find_clips


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


@pytest.mark.parametrize("name", ["clip.mp4", "clip.npy", "clip.unknown"])
def test_a_file_is_one_clip(tmp_path, name):
    make(tmp_path, name)
    [clip] = find_clips(tmp_path / name)
    assert (clip.name, clip.path, clip.split) == (name, tmp_path / name, None)


def test_a_folder_of_pictures_is_one_clip(tmp_path):
    make(tmp_path, "walk/1.png", "walk/2.png")
    [clip] = find_clips(tmp_path / "walk")
    assert (clip.name, clip.path, clip.split) == ("walk", tmp_path / "walk", None)


def test_the_working_directory_has_a_name(tmp_path, monkeypatch):
    make(tmp_path, "1.png", "2.png")
    monkeypatch.chdir(tmp_path)
    assert found(Path()) == [(tmp_path.name, None)]


def test_a_folder_of_clips_of_every_kind(tmp_path):
    make(tmp_path, "b10.mp4", "b2.avi", "a.npy", "c/1.jpg", "c/2.jpg", "notes.md", "._b2.avi", "b2.avi~", "empty/x.txt")
    assert found(tmp_path) == [("a.npy", None), ("b2.avi", None), ("b10.mp4", None), ("c", None)]


@pytest.mark.parametrize("prefix", ["", "Avenue Dataset/", "avenue/Avenue Dataset/"])
def test_avenue_as_distributed(tmp_path, prefix):
    make(
        tmp_path,
        *(f"{prefix}training_videos/{number:02}.avi" for number in (1, 2)),
        *(f"{prefix}testing_videos/{number:02}.avi" for number in (1, 21)),
        f"{prefix}training_vol/vol01.mat",
        f"{prefix}testing_vol/vol01.avi",
        f"{prefix}ground_truth_demo/gt.avi",
        f"{prefix}training_videos/.DS_Store",
        f"{prefix}training_videos/._01.avi",
    )
    assert found(tmp_path) == [
        (f"{prefix}training_videos/01.avi", "train"),
        (f"{prefix}training_videos/02.avi", "train"),
        (f"{prefix}testing_videos/01.avi", "test"),
        (f"{prefix}testing_videos/21.avi", "test"),
    ]


def test_avenue_as_frames(tmp_path):
    make(
        tmp_path,
        *(f"avenue/{s}/frames/0{c}/000{i}.jpg" for s in ("training", "testing") for c in (1, 2) for i in (0, 1)),
    )
    expected = [("training", "train"), ("testing", "test")]
    for root, prefix in ((tmp_path, "avenue/"), (tmp_path / "avenue", "")):
        assert found(root) == [(f"{prefix}{s}/frames/0{c}", split) for s, split in expected for c in (1, 2)]


def make_ucsd(root: Path, ped: str) -> None:
    make(
        root,
        *(f"{ped}/Train/Train00{c}/00{i}.tif" for c in (1, 2) for i in (1, 2)),
        *(f"{ped}/Test/Test00{c}/00{i}.tif" for c in (1, 2) for i in (1, 2)),
        f"{ped}/Test/Test001_gt/001.bmp",
        f"{ped}/Test/._Test001",
        f"{ped}/Train/Train001/._001.tif",
        f"{ped}/Train/Train001/001.tif~",
        f"{ped}/.DS_Store",
    )


def test_ucsd(tmp_path):
    make_ucsd(tmp_path / "UCSD_Anomaly_Dataset.v1p2", "UCSDped2")
    splits = ["train", "train", "test", "test"]
    names = ["Train/Train001", "Train/Train002", "Test/Test001", "Test/Test002"]
    inner = tmp_path / "UCSD_Anomaly_Dataset.v1p2" / "UCSDped2"
    assert found(inner) == list(zip(names, splits, strict=True))
    wrapped = [f"UCSD_Anomaly_Dataset.v1p2/UCSDped2/{name}" for name in names]
    assert found(tmp_path) == list(zip(wrapped, splits, strict=True))


def test_both_parts_of_ucsd_must_be_chosen_from(tmp_path, refused):
    for ped in ("UCSDped1", "UCSDped2"):
        make_ucsd(tmp_path / "UCSD", ped)
    facts = (str(tmp_path / "UCSD" / "UCSDped1"), str(tmp_path / "UCSD" / "UCSDped2"), "give one of them")
    refused(tmp_path / "UCSD", *facts, by=lambda: find_clips(tmp_path))


def test_shanghaitech(tmp_path):
    make(
        tmp_path,
        "shanghaitech/training/videos/01_001.avi",
        "shanghaitech/training/videos/01_010.avi",
        "shanghaitech/training/frames/01_001/1.jpg",
        "shanghaitech/testing/frames/01_0014/000.jpg",
        "shanghaitech/testing/frames/01_0014/001.jpg",
        "shanghaitech/testing/test_frame_mask/01_0014.npy",
        "shanghaitech/testing/test_pixel_mask/01_0014.npy",
    )
    assert found(tmp_path / "shanghaitech") == [
        ("training/videos/01_001.avi", "train"),
        ("training/videos/01_010.avi", "train"),
        ("testing/frames/01_0014", "test"),
    ]


def test_an_annotation_folder_can_still_be_asked_for(tmp_path):
    make(tmp_path, "Test001_gt/1.bmp", "Test001_gt/2.bmp")
    assert found(tmp_path / "Test001_gt") == [("Test001_gt", None)]


def test_pictures_beside_clips_are_refused(tmp_path, refused):
    make(tmp_path, "cover.jpg", "walk.mp4")
    refused(tmp_path, "both pictures and clips", "walk.mp4", by=lambda: find_clips(tmp_path))


def test_a_missing_path_is_refused(tmp_path, refused):
    refused(tmp_path / "gone", "no such file", by=lambda: find_clips(tmp_path / "gone"))


def test_a_folder_without_clips_is_refused(tmp_path, refused):
    make(tmp_path, "a/b/notes.txt", "masks/01_label.mat", "a/._1.png")
    refused(tmp_path, "no clips found", "expected videos", by=lambda: find_clips(tmp_path))


def test_links_that_lead_back_are_followed_once(tmp_path, monkeypatch):
    """A folder with twenty links to itself has 20⁴ paths of four steps."""
    listed = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    root = tmp_path / "data"
    for part in ("a", "b"):
        (root / part).mkdir(parents=True)
        for number in range(20):
            (root / f"loop{number}").unlink(missing_ok=True)
            (root / f"loop{number}").symlink_to(root)
            (root / part / f"loop{number}").symlink_to(root / ("b" if part == "a" else "a"))
    with pytest.raises(InputError, match="no clips found"):
        find_clips(root)
    make(root, "b/walk/1.png", "b/walk/2.png")
    assert found(root) == [("b/walk", None)]
    assert len(listed) < 1000


def test_the_depth_of_a_tree_does_not_matter(tmp_path):
    make(tmp_path, "a/" * 60 + "b~")
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack()) + 50)
        with pytest.raises(InputError, match="no clips found"):
            find_clips(tmp_path)
    finally:
        sys.setrecursionlimit(limit)
