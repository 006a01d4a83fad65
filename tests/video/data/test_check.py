from __future__ import annotations

import json
import zipfile

import numpy as np
from PIL import Image

from cdt_fast.video.data.check import check, describe_check


def test_a_data_set_with_everything(tmp_path, write_video, write_folder):
    write_video(tmp_path / "training_videos" / "1.avi", count=12, rate=10)
    write_video(tmp_path / "training_videos" / "2.avi", count=6)
    (tmp_path / "training_videos" / "3.avi").write_bytes(b"broken")
    (tmp_path / "training_videos" / "._1.avi").write_bytes(b"junk")
    write_folder(tmp_path / "testing_videos" / "1", count=3)
    write_folder(tmp_path / "testing_videos" / "1_gt", count=3)
    (tmp_path / "testing_videos" / "2.npy").write_bytes(b"")
    report = json.loads(json.dumps(check(tmp_path, progress=False), allow_nan=False))
    assert report["splits"] == {"train": 3, "test": 2, "unmarked": 0}
    assert (report["frames"], report["problems"], report["junk_skipped"]) == (21, 2, 2)
    first, _, broken, folder, empty = report["clips"]
    assert first["name"] == "training_videos/1.avi"
    assert (first["frames"], first["width"], first["height"], first["frame_rate"]) == (12, 48, 32, 10.0)
    assert first["problem"] is None
    assert str(tmp_path / "training_videos" / "3.avi") in broken["problem"]
    assert (folder["split"], folder["frames"], folder["frame_rate"]) == ("test", 3, None)
    assert "2.npy" in empty["problem"]
    text = describe_check(report)
    assert "3 train, 2 test clip(s), 21 frames" in text
    assert "2 junk entries skipped; 2 problem(s)" in text
    assert "training_videos/1.avi: 12 frames, 48x32, 10 frames a second, 0% static" in text
    assert text.count("PROBLEM") == 2


def test_the_share_of_static_frames(tmp_path):
    picture = np.random.default_rng(0).integers(0, 200, (40, 40), dtype=np.uint8)
    almost = picture.copy()
    almost[:8, :8] += 12  # A mean difference of 0.48 gray levels.
    moved = picture.copy()
    moved[:8, :8] += 13  # 0.52.
    np.save(tmp_path / "clip.npy", np.stack([picture, picture, almost, picture, moved, moved]))
    report = check(tmp_path / "clip.npy", progress=False)
    assert report["static_share"] == report["clips"][0]["static_share"] == 0.8


def test_problems_in_the_middle_of_a_clip_keep_its_count(tmp_path, write_folder):
    write_folder(tmp_path, count=6)
    (tmp_path / "5.png").write_bytes(b"broken")
    report = check(tmp_path, progress=False)
    [clip] = report["clips"]
    assert clip["frames"] == 4
    assert "5.png" in clip["problem"]
    assert (report["frames"], report["static_share"]) == (0, None)
    assert "PROBLEM" in describe_check(report)


def test_gray_and_color_pictures_may_be_mixed(tmp_path, write_folder):
    write_folder(tmp_path, count=3)
    Image.new("L", (48, 32)).save(tmp_path / "2.png")
    report = check(tmp_path, progress=False)
    assert (report["problems"], report["static_share"]) == (0, 0.0)


def test_signs_of_damage_are_notes_and_no_clip_stops_the_others(tmp_path, write_video, write_lying_video):
    path = write_lying_video(tmp_path / "a.avi")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("frames.txt", "no array")
    whole = write_video(tmp_path / "c.avi", count=5)
    report = check(tmp_path, progress=False)
    notes = {clip["name"]: (clip["problem"], clip["notes"]) for clip in report["clips"]}
    assert notes["c.avi"] == (None, [])
    assert report["problems"] == 1
    assert "b.npz" in notes["b.npz"][0]
    assert notes["a.avi"][0] is None
    assert f"NOTE {path}: may be damaged or cut short: it holds" in describe_check(report)
    assert f"NOTE {whole}" not in describe_check(report)


def test_control_characters_in_names_are_spelled_out(tmp_path):
    folder = tmp_path / "\x1b]0;mine\x07"
    folder.mkdir()
    for name in ("\x1b[2J.npy", "b.npy"):
        np.save(folder / name, np.zeros((3, 8, 8), np.uint8))
    (folder / "\x1b[31m.avi").write_bytes(b"broken")
    text = describe_check(check(folder, progress=False))
    assert "\x1b" not in text
    assert r"\x1b[31m.avi: cannot be read" in text
