"""What picture files and their names say beyond a first page of 8-bit pixels, by way of what the user sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from cdt_fast.listing import natural_key
from cdt_fast.video.data.clips import find_clips, open_source
from cdt_fast.video.data.pictures import naming_signs
from cdt_fast.video.data.windows import load_video
from tests.video.clips import denoised, encode, refused, write_folder


def color(number: int, height: int = 16, width: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))


def gray(number: int, height: int = 16, width: int = 24) -> Image.Image:
    return color(number, height, width).convert("L")


def save_pages(path: Path, pages: Sequence[Image.Image], **options: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    pages[0].save(path, save_all=True, append_images=pages[1:], **options)
    return path


def read(path: Path) -> tuple[list[np.ndarray], list[str]]:
    source = open_source(path)
    return list(source.frames()), [note.removeprefix(f"{path}: ") for note in source.notes]


@pytest.mark.parametrize(
    ("suffix", "description", "count"),
    [
        ("png", None, 5),
        ("webp", None, 5),
        ("tif", None, 5),
        ("tif", "ImageJ=1.53t\nimages=900\nslices=900\n", 900),  # of more than 4 GiB, with no entry for each
    ],
)
def test_a_file_of_several_pictures_is_refused(tmp_path, suffix, description, count):
    write_folder(tmp_path, count=3)
    pages = [color(number) for number in range(5 if count == 5 else 1)]
    options = {"tiffinfo": {270: description}} if description else {}
    path = save_pages(tmp_path / f"4.{suffix}", pages, **options)
    for place in (tmp_path, path):
        refused(path, f"holds {count} pictures", "save them as a video", by=lambda place=place: read(place))


def test_previews_in_a_file_are_no_frames_and_noted(tmp_path):
    for number in range(3):
        save_pages(tmp_path / f"{number}.jpg", [color(number), color(9, 4, 6)], format="MPO")
    frames, notes = read(tmp_path)
    assert len(frames) == 3
    assert notes == ["extra pictures in a file, such as previews, are skipped (0.jpg; 3 of 3 pictures)"]


def test_animations_in_a_folder_are_clips(tmp_path):
    for name in ("a.gif", "b.gif"):
        save_pages(tmp_path / name, [color(number) for number in range(5)], duration=40)
    assert [len(read(clip.path)[0]) for clip in find_clips(tmp_path)] == [5, 5]


def test_pictures_of_other_kinds_are_noted(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.gif").write_bytes(b"")
        (tmp_path / f"{number}.txt").write_bytes(b"")
    assert read(write_folder(tmp_path, count=3))[1] == ["other picture formats are skipped (0.gif; 3 files)"]


@pytest.mark.parametrize("pixels", ["ya16be", "rgb48be", "rgba64be"])
def test_sixteen_bits_a_color_are_read_as_eight_and_noted(tmp_path, pixels):
    picture = np.full((4, 6, 4), 65535, np.uint16)
    picture[:2, :, :3] = 0x8000
    for number in range(2):
        frame = av.VideoFrame.from_ndarray(picture, "rgba64le").reformat(format=pixels)
        encode(tmp_path / f"{number}.png", [frame], "png", pixels, form="image2", container_options={"update": "1"})
    frames, notes = read(tmp_path)
    assert np.unique(frames[0]).tolist() == [128, 255]
    assert notes == ["16-bit colors are reduced to 8 bits, with 65535 as the brightest (0.png; 2 of 2 pictures)"]


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_more_bits_of_gray_are_refused_with_what_to_do(tmp_path, mode):
    deep = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
    for number in range(2):
        Image.fromarray(np.full((4, 6), 900, deep)).save(tmp_path / f"{number}.tif")
    refused(tmp_path / "0.tif", f"mode {mode}", "8-bit", "to 0..255", ".npy", by=lambda: read(tmp_path))


def test_signed_values_are_refused(tmp_path):
    for number in range(2):
        gray(number).save(tmp_path / f"{number}.tif", tiffinfo={339: 2})
    refused(tmp_path / "0.tif", "signed values", "8-bit", by=lambda: read(tmp_path))


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
def test_a_picture_that_cannot_be_read_is_no_damaged_video(tmp_path, suffix):
    write_folder(tmp_path, count=4, suffix=suffix)
    broken = tmp_path / f"2.{suffix}"
    broken.write_bytes(broken.read_bytes()[:200])
    refused(broken, "the picture cannot be read", by=lambda: read(tmp_path))
    broken.write_bytes(b"II*\0" + bytes(60))
    refused(broken, "the picture cannot be read", by=lambda: read(broken))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_pictures_are_turned_and_mirrored_as_exif_says(tmp_path, suffix, orientation):
    stored = np.zeros((16, 24, 3), np.uint8)
    stored[:8, :12], stored[:8, 12:], stored[8:, :12] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    exif = Image.Exif()
    exif[274] = orientation
    for number in range(2):
        Image.fromarray(stored).save(tmp_path / f"{number}.{suffix}", exif=exif, quality=95)
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(stored),
    }[orientation]
    for frame in read(tmp_path)[0]:
        assert frame.shape == upright.shape
        assert np.abs(frame.astype(int) - upright).mean() < 12


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_transparent_pixels_are_black_and_noted(tmp_path, mode):
    for number in range(3):
        picture = Image.new("RGBA", (6, 4), (200, 200, 200))
        options: dict[str, Any] = {}
        if number == 1:
            picture.paste((90, 90, 90, 0), (0, 0, 3, 4))
            options = {"transparency": 90} if mode == "L" else {}
        # A palette of colors has no alpha, but an index that stands for nothing.
        converted = picture.quantize(4) if mode == "P" else picture.convert(mode)
        converted.save(tmp_path / f"{number}.png", **options)
    frames, notes = read(tmp_path)
    assert [np.unique(frame).tolist() for frame in frames] == [[200], [0, 200], [200]]
    assert frames[0].ndim == (2 if mode in ("LA", "L") else 3)
    assert notes == ["transparent pixels are shown on black (1.png; 1 of 3 pictures)"]


def test_another_color_space_is_noted(tmp_path):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    other = srgb.replace("sRGB".encode("utf-16-be"), "P3 D".encode("utf-16-be"))
    assert other != srgb
    for name, profile in (("srgb", srgb), ("other", other)):
        (tmp_path / name).mkdir()
        for number in range(2):
            color(number).save(tmp_path / name / f"{number}.png", icc_profile=profile)
    assert read(tmp_path / "srgb")[1] == []
    [note] = read(tmp_path / "other")[1]
    assert note.startswith("colors are read as sRGB, though the file states another color space (0.png")


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_gray_whose_zero_is_white_is_read_right(tmp_path, compression):
    for number in range(2):
        gray(number).save(tmp_path / f"{number}.tif", tiffinfo={262: 0}, compression=compression)
    assert np.array_equal(read(tmp_path)[0], [np.asarray(gray(number)) for number in range(2)])


@pytest.mark.parametrize("odd", [0, 5, 11])
@pytest.mark.parametrize("colored", [True, False])
def test_a_clip_with_one_color_picture_is_a_color_clip(tmp_path, odd, colored):
    folder = tmp_path / "clip"
    folder.mkdir()
    for number in range(12):
        (color if (number == odd) == colored else gray)(number).save(folder / f"{number:03}.png")
    frames, notes = read(folder)
    assert {frame.shape for frame in frames} == {(16, 24, 3)}
    gray_one = (odd + 1) % 12 if colored else odd
    assert np.array_equal(frames[gray_one], np.asarray(gray(gray_one).convert("RGB")))
    assert notes == []
    assert denoised(folder, tmp_path / "out.mp4")["notes"] == []


def signs(*names: str) -> list[str]:
    return naming_signs([Path(name) for name in sorted(names, key=natural_key)])


# The form of a name, and milliseconds from one to the next.
DATES = [
    ("%Y%m%d_%H%M%S", 1000),
    ("cam3 %Y-%m-%d %H.%M.%S", 7000),
    ("%Y%m%dT%H%M%SZ", 1000),
    ("%H-%M-%S.%f", 40),
    ("%Y%m%d%H%M%S%f", 40),
    ("%Y-%m-%d %Hh", 3_600_000),
    *((form, 86_400_000) for form in ("%Y-%m-%d", "cam3_%Y%m%d")),
    *((form, 1000) for form in ("%H%M%S", "f%H.%M.%S", "2024 %H-%M-%S")),
]


def dated(form: str, step: int) -> list[str]:
    start = datetime(2024, 1, 30, 11, 58, 50)
    return [f"{start + timedelta(milliseconds=step * number):{form}}.png" for number in range(300)]


@pytest.mark.parametrize(
    ("names", "fact"),
    [
        ([f"f{n}.png" for n in (0, 1, 2, 3, 7, 8, 9, 10, 11)], "3 frames are missing between the 9 that it holds"),
        ([f"{n:04}.jpg" for n in range(0, 100, 5) if n != 45], "1 frame is missing between the 19"),
        ([f"f{n}.png" for n in (1, 2, 3, 1000, 1001)], "f1000.png follows f3.png"),
        ([f"{n}.png" for n in (1, 2, 3, 6, 7, 8, 11, 12, 13)], "4 frames are missing"),
        ([f"frame_{n:04}{m}.png" for n in range(5) for m in ("", "_mask")], "frame_0000.png and frame_0000_mask.png"),
        ([f"{m}{n}.png" for n in range(5) for m in ("a", "b")], "a0.png and b0.png"),
        (["cover.png", *(f"{n}.png" for n in range(9))], "0.png and cover.png"),
    ],
)
def test_names_that_are_not_one_whole_sequence_are_noted(names, fact):
    [sign] = signs(*names)
    assert fact in sign


@pytest.mark.parametrize(
    "names",
    [
        [f"f{n}.png" for n in range(1, 12)],
        [f"{n:05}.png" for n in range(98, 110)],
        [f"{n:04}.png" for n in range(0, 100, 5)],
        [f"cam2_2024_{n:04}.png" for n in range(98, 110)],
        [f"{n}_of_40.png" for n in range(1, 41)],
        [f"Frame{n}.{('JPG', 'jpg', 'png')[n % 3]}" for n in range(12)],
        [f"f{n:03}_t{n / 30:.3f}_{n * 7919 % 97}.png" for n in range(40)],
        [f"{n / 30:.3f}.png" for n in range(60)],
        [f"{1_700_000_000_000 + round(n * 1000 / 30)}.png" for n in range(90)],
        ["a.png"],
        ["1.png", "9.png"],
        *(dated(*how) for how in DATES),
    ],
)
def test_names_of_one_whole_sequence_are_not_noted(names):
    assert signs(*names) == []


def test_a_gap_is_said_by_training_and_denoising(tmp_path):
    folder = write_folder(tmp_path / "clip", count=80)
    (folder / "40.png").unlink()
    (folder / "41.png").unlink()
    note = f"{folder}: 2 frames are missing between the 78 that it holds, by the numbers in their names: "
    assert note in load_video(folder, window=8, size=16, progress=False).description
    assert any(said.startswith(note) for said in denoised(folder, tmp_path / "out.mp4")["notes"])


def test_names_in_the_notes_of_denoising_do_not_steer_the_terminal(call, trained, tmp_path):
    folder = write_folder(tmp_path / "clip")
    (folder / "\x1b[2J.gif").touch()
    told = call("denoise", "--run", trained.constrained, folder, tmp_path / "out.mp4").err
    assert "skipped (\\x1b[2J.gif; 1 files)" in told
    assert "\x1b" not in told
