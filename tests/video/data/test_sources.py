# pyright: reportOptionalOperand=false, reportAttributeAccessIssue=false
# PyAV's types allow None wherever FFmpeg does.
from __future__ import annotations

import contextlib
import io
import os
import struct
import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from cdt_fast.checks import InputError
from cdt_fast.video.data.clips import open_source
from cdt_fast.video.data.source import Excerpt
from tests.video.clips import encode, moving, plain, refused, tone, write_folder


def read(path: Path) -> list[np.ndarray]:
    return list(open_source(path).frames())


def write_video(path: Path, count: int = 12, codec: str = "mpeg4", **options: str) -> Path:
    pixels = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    return encode(path, moving(count), codec, pixels, container_options=options)


def test_video_frames_come_in_order_at_full_size(tmp_path):
    path = encode(tmp_path / "clip.mkv", moving(9), "ffv1", rate=10)
    source = open_source(path)
    assert (source.path, source.frame_rate) == (path, Fraction(10))
    frames = list(source.frames())
    assert np.array_equal(frames, list(source.frames()))  # again
    assert len(frames) == 9
    assert all(frame.shape == (32, 48, 3) and frame.dtype == np.uint8 for frame in frames)
    # Chroma is kept at half resolution, so that color noise comes back blurred; green carries most of the luma.
    errors = [[np.abs(got[..., 1] - want[..., 1].astype(int)).mean() for want in moving(9)] for got in frames]
    assert [int(np.argmin(row)) for row in errors] == list(range(9))


def test_a_lying_frame_count_in_the_header_is_not_believed(tmp_path):
    path = write_video(tmp_path / "clip.avi")
    data = bytearray(path.read_bytes())
    main, stream = data.index(b"avih"), data.index(b"strh")
    data[main + 24 : main + 28] = data[stream + 40 : stream + 44] = (24).to_bytes(4, "little")
    path.write_bytes(data)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 24
    assert len(read(path)) == 12
    assert signs(path) == ["it holds 12 of the 24 frames that it states"]


@pytest.mark.parametrize(
    ("given", "levels", "shown"), [(0, [0, 100, 255], [0, 100, 255]), (1, [16, 127, 235], [0, 129, 255])]
)
def test_gray_video_gives_gray_frames_of_all_contrast(tmp_path, given, levels, shown):
    def ranged(stream):
        stream.codec_context.color_range = given

    frames = [av.VideoFrame.from_ndarray(np.full((16, 16), level, np.uint8), "gray") for level in levels]
    for frame in frames:
        frame.color_range = given
    path = encode(tmp_path / "gray.mkv", frames, "ffv1", "gray", setup=ranged)
    assert np.array_equal(read(path), [np.full((16, 16), level) for level in shown])


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("index_last.mp4", "libx264", {}),
        ("index_first.mp4", "libx264", {"movflags": "faststart"}),
        ("fragments.mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
        ("clip.mov", "mpeg4", {}),
        ("clip.avi", "mpeg4", {}),
        ("stills.avi", "mjpeg", {}),
        ("clip.mkv", "mpeg4", {}),
    ],
)
def test_a_video_cut_short_is_refused_or_noted(tmp_path, share, name, codec, options):
    path = write_video(tmp_path / name, count=60, codec=codec, **options)
    assert len(read(path)) == 60
    assert signs(path) == []
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with contextlib.suppress(InputError):
        assert signs(path)


def test_damage_in_the_middle_is_refused(tmp_path, capfd):
    path = write_video(tmp_path / "clip.mp4", count=40, codec="libx264", movflags="faststart")
    data = bytearray(path.read_bytes())
    middle = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 2
    data[middle : middle + 4000] = bytes(4000)
    path.write_bytes(data)
    refused(path, "damaged", "decoding fails after", by=lambda: read(path))
    assert capfd.readouterr() == ("", "")  # FFmpeg's own words are not shown


def test_frames_of_lost_packets_are_noted(tmp_path):
    path = write_video(tmp_path / "clip.ts", count=60, codec="mpeg2video")
    data = path.read_bytes()
    middle = len(data) // 2 // 188 * 188  # a packet of this form has 188 bytes
    path.write_bytes(data[:middle] + data[middle + 3 * 188 :])
    assert any("decoder marks" in sign for sign in signs(path))


@pytest.mark.parametrize(("form", "codec"), [("m4v", "mpeg4"), ("mpegts", "mpeg2video")])
def test_a_recording_that_begins_between_key_frames_is_read(tmp_path, form, codec):
    path = encode(tmp_path / "clip.video", moving(60), codec, form=form)
    data = path.read_bytes()
    path.write_bytes(data[len(data) // 10 :])
    assert 10 < len(read(path)) < 60


def wave_file(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(8000))


LISTS = [
    "ffconcat version 1.0\nfile neighbor.mp4\n",
    "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nneighbor.ts\n#EXT-X-ENDLIST\n",
    "#EXTM3U\nhttp://127.0.0.1/a.ts\n",
    "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
]


@pytest.mark.parametrize(
    ("write", "fact"),
    [
        (lambda path: None, "no such file"),
        (os.mkfifo, "neither a file nor a folder"),
        (Path.touch, "expected a video"),
        (lambda path: path.write_bytes(b"not a video\n" * 50), "expected a video"),
        (lambda path: path.write_bytes(bytes(range(256)) * 40), "expected a video"),
        (wave_file, "no video stream"),
        # A list of other files reads none of them.
        *((lambda path, text=text: path.write_text(text), "cannot be read as a video") for text in LISTS),
    ],
)
@pytest.mark.parametrize("name", ["clip.mp4", "notes.txt", "list.m3u8", "list.ffconcat", "colon:name"])
def test_what_is_no_video_is_refused(tmp_path, write, fact, name):
    write_video(tmp_path / "neighbor.mp4", codec="libx264")
    write_video(tmp_path / "neighbor.ts", codec="mpeg2video")
    write(tmp_path / name)
    refused(tmp_path / name, fact, by=lambda: read(tmp_path / name))


def test_a_video_of_one_frame_or_none_is_refused(tmp_path):
    path = write_video(tmp_path / "clip.avi", count=1)
    refused(path, "only one frame", "at least 2", by=lambda: read(path))
    data = bytearray(write_video(path, count=3).read_bytes())
    start = data.index(b"movi") + 4
    data[start : data.index(b"idx1")] = bytes(data.index(b"idx1") - start)
    path.write_bytes(data)
    refused(path, "no frames", "at least 2", by=lambda: read(path))


def test_a_video_of_mixed_sizes_is_refused(tmp_path):
    path = tmp_path / "clip.mjpeg"
    pictures: list[bytes] = []
    for size in [(32, 24), (32, 24), (40, 24), (32, 24)]:
        Image.new("RGB", size, "gray").save(tmp_path / "one.jpg")
        pictures.append((tmp_path / "one.jpg").read_bytes())
    path.write_bytes(b"".join(pictures))
    refused(path, "frame 2 is 40x24", "first frame is 32x24", by=lambda: read(path))


@pytest.mark.parametrize("suffix", ["tif", "tiff", "jpg", "JPEG", "png", "bmp"])
def test_a_folder_is_read_in_natural_order(tmp_path, suffix):
    folder = write_folder(tmp_path / "clip", count=11, suffix=suffix)
    for junk in ("._1.png", ".DS_Store", "1.png~", "Thumbs.db", ".hidden.png", "notes.txt"):
        (folder / junk).write_bytes(b"junk")
    source = open_source(folder)
    assert source.frame_rate is None
    frames = list(source.frames())
    tolerance = 60 if suffix.lower().startswith("jp") else 0
    assert np.abs(np.stack(frames).astype(int) - moving(11)).mean() <= tolerance


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "CMYK"])
def test_pictures_of_any_mode_are_gray_or_rgb(tmp_path, mode):
    for index in range(2):
        Image.new("RGB", (6, 4), (255, 0, 0)).convert(mode).save(tmp_path / f"{index}.tif")
    expected = np.full((4, 6, 3), (255, 0, 0)) if mode not in ("L", "1") else None
    for frame in read(tmp_path):
        assert frame.shape == (4, 6) if expected is None else np.array_equal(frame, expected)


def test_a_folder_of_none_one_or_mixed_pictures_is_refused(tmp_path):
    (tmp_path / "readme.txt").write_text("nothing")
    (tmp_path / "._1.png").write_bytes(b"junk")
    refused(tmp_path, "no frames", "png", by=lambda: open_source(tmp_path))
    write_folder(tmp_path, count=1)
    for path in (tmp_path, tmp_path / "1.png"):
        refused(path, "only one frame", by=lambda path=path: read(path))
    write_folder(tmp_path, count=4)
    Image.new("RGB", (20, 32)).save(tmp_path / "3.png")
    refused(tmp_path, "frame 3.png is 20x32", "first frame is 48x32", by=lambda: read(tmp_path))


@pytest.mark.parametrize("shape", [(5, 8, 10), (5, 8, 10, 1), (5, 8, 10, 3)])
def test_arrays_are_read(tmp_path, shape):
    frames = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.save(tmp_path / "a.npy", frames)
    assert np.array_equal(read(tmp_path / "a.npy"), frames[..., 0] if shape[3:] == (1,) else frames)
    for dtype in (np.float16, np.float32, np.float64):  # scaled and rounded
        np.save(tmp_path / "d.npy", np.array([[[0, 1]], [[0.5, 0.25]]], dtype))
        assert [frame.tolist() for frame in read(tmp_path / "d.npy")] == [[[0, 255]], [[128, 64]]]


@pytest.mark.parametrize(
    ("array", "fact"),
    [
        (np.full((4, 3, 3), np.nan), "frame 0 has values in [nan, nan]"),
        (np.array([[[0]], [[np.inf]]]), "frame 1 has values in [inf, inf]"),
        (np.array([[[1, 1.5]]] * 2), "frame 0 has values in [1, 1.5]"),
        (np.array([[[-0.5, 0]]] * 2), "values in [-0.5, 0]; expected uint8, or floats within [0, 1]"),
        (np.zeros((4, 3, 3), np.int64), "dtype int64"),
        (np.zeros((4, 3, 3), np.uint16), "dtype uint16"),
        (np.zeros((4, 3, 3), complex), "dtype complex128"),
        (np.zeros((3, 3), np.uint8), "shape [3, 3]"),
        (np.zeros((4, 3, 3, 4), np.uint8), "shape [4, 3, 3, 4]"),
        (np.zeros((4, 0, 3), np.uint8), "shape [4, 0, 3]"),
        (np.zeros((0, 3, 3), np.uint8), "no frames"),
        (np.zeros((1, 3, 3), np.uint8), "only one frame"),
        (np.array([{"a": 1}] * 4, dtype=object), "cannot be read as a NumPy array"),
    ],
)
def test_bad_arrays_are_refused(tmp_path, array, fact):
    path = tmp_path / "clip.npy"
    np.save(path, array)
    refused(path, fact, by=lambda: read(path))


def signs(path: Path) -> list[str]:
    source = open_source(path)
    frames = list(source.frames())
    assert frames
    assert all(note.startswith(f"{path}: may be damaged or cut short: ") for note in source.notes)
    return [note.partition("cut short: ")[2] for note in source.notes]


def test_an_avi_that_begins_with_empty_frames_is_whole(tmp_path):
    """As programs write a video that begins after its sound."""
    path = tmp_path / "clip.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25, width=16, height=16, options={"bf": "2"})
        for frame in [*(av.VideoFrame(16, 16) for _ in range(12)), None]:
            for packet in stream.encode(frame):
                packet.pts, packet.dts = packet.pts + 10, packet.dts + 10
                container.mux(packet)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames > 20
    assert len(read(path)) == 12
    assert signs(path) == []


def test_a_damaged_first_key_frame_is_noted(tmp_path):
    frames = [plain(10 * number) for number in range(20)]
    path = encode(tmp_path / "clip.mp4", frames, "libx264", options={"g": "5", "bf": "0"})
    with av.open(str(path)) as container:
        first = next(packet for packet in container.demux(video=0))
    data = bytearray(path.read_bytes())
    data[first.pos : first.pos + first.size] = bytes(first.size)
    path.write_bytes(data)
    assert "it holds 19 of the 20 frames that it states" in signs(path)


def test_frames_missing_between_others_are_noted(tmp_path):
    times = [Fraction(number, 30) for number in (*range(20), *range(25, 50))]
    path = encode(tmp_path / "gap.mkv", map(plain, range(45)), "libx264", times=times, options={"bf": "0"})
    assert signs(path) == ["5 frames are missing between the 45 that it holds, by their times"]
    times = [Fraction(number, 30) for number in (*range(5), *range(6, 11))]
    path = encode(tmp_path / "short.mkv", map(plain, range(10)), "libx264", times=times, options={"bf": "0"})
    assert signs(path) == ["1 frame is missing between the 10 that it holds, by their times"]


def test_a_whole_video_whose_sound_lasts_longer_has_no_notes(tmp_path):
    silence = np.zeros(24_000, np.int16)
    path = encode(tmp_path / "clip.mkv", map(plain, range(5)), sound=lambda c: tone(c, "pcm_s16le", silence, 8000))
    assert signs(path) == []


@pytest.mark.parametrize("count", [0, 2])
def test_interlaced_video_is_noted(tmp_path, count):
    def interlace(stream):
        stream.codec_context.flags |= 1 << 18 | 1 << 29

    path = encode(tmp_path / "clip.ts", map(plain, range(6)), "mpeg2video", setup=interlace)
    if count:
        progressive = encode(tmp_path / "more.ts", map(plain, range(count)), "mpeg2video")
        path.write_bytes(path.read_bytes() + progressive.read_bytes())
    source = open_source(path)
    assert len(list(source.frames())) == 6 + count
    note = f"{path}: is interlaced in 6 of {6 + count} frames: deinterlace it first, as with ffmpeg -vf bwdif"
    assert source.notes[-1] == note
    excerpt = Excerpt(source, 1, 99)
    assert len(list(excerpt.frames())) == 5 + count
    assert excerpt.notes[-1] == note
    assert count or len(source.notes) == 1
    excerpt = Excerpt(source, 1, 3)
    assert len(list(excerpt.frames())) == 2
    assert excerpt.notes == [f"{path}: is interlaced in 3 of 3 frames: deinterlace it first, as with ffmpeg -vf bwdif"]


def cover_box() -> bytes:
    """A cover picture as taggers write it, before the tracks."""

    def box(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I4s", 8 + len(body), kind) + body

    picture = io.BytesIO()
    Image.new("RGB", (200, 200)).save(picture, "JPEG")
    cover = box(b"covr", box(b"data", struct.pack(">II", 13, 0) + picture.getvalue()))
    handler = box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    return box(b"udta", box(b"meta", bytes(4) + handler + box(b"ilst", cover)))


def with_cover(path: Path) -> Path:
    data, cover = path.read_bytes(), cover_box()
    start = data.index(b"moov") - 4
    size, header = (struct.unpack_from(">I", data, place)[0] for place in (start, start + 8))
    tracks = start + 8 + header
    larger = struct.pack(">I", size + len(cover))
    path.write_bytes(data[:start] + larger + data[start + 4 : tracks] + cover + data[tracks:])
    return path


def test_a_cover_picture_is_not_the_video(tmp_path):
    path = with_cover(write_video(tmp_path / "clip.mp4", count=5))
    with av.open(str(path)) as container:
        assert [stream.codec_context.name for stream in container.streams.video] == ["mjpeg", "mpeg4"]
    assert [frame.shape for frame in read(path)] == [(32, 48, 3)] * 5
    assert signs(path) == []
    path = tmp_path / "song.m4a"
    with av.open(str(path), "w", format="mp4") as container:
        tone(container, "aac", np.zeros(1024, np.float32))()
    refused(with_cover(path), "has no video stream", by=lambda: open_source(path))


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mov", "clip.mkv"])
@pytest.mark.parametrize(
    ("first", "count", "default"),
    [("mjpeg", 1, True), ("mjpeg", 6, True), ("mjpeg", 6, False), ("mpeg4", 6, False)],
    ids=["poster", "preview", "preview that is no default", "another video that is no default"],
)
def test_of_several_videos_the_main_one_is_read(tmp_path, name, first, count, default):
    path = tmp_path / name
    with av.open(str(path), "w") as container:
        pixels = "yuvj420p" if first == "mjpeg" else "yuv420p"
        other = container.add_stream(first, rate=25, width=16, height=16, pix_fmt=pixels)
        other.disposition = int(default)
        main = container.add_stream("mpeg4", rate=25, width=32, height=32)
        main.disposition = 1
        for number in range(6):
            if number < count:
                container.mux(other.encode(av.VideoFrame(16, 16, pixels)))
            container.mux(main.encode(av.VideoFrame(32, 32)))
        container.mux(other.encode())
        container.mux(main.encode())
    assert [frame.shape for frame in read(path)] == [(32, 32, 3)] * 6


@pytest.mark.parametrize("pixels", ["yuv420p", "yuv422p", "yuv420p10le"])
def test_colors_of_h264_belong_to_the_same_pixels_as_of_others(tmp_path: Path, pixels: str) -> None:
    drawn = np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), np.uint8)
    lossless = {"ffv1": {}, "libx264": {"qp": "0"}}
    other, h264 = (
        np.stack(list(open_source(encode(tmp_path / f"{codec}.mkv", drawn, codec, pixels, options=given)).frames()))
        for codec, given in lossless.items()
    )
    np.testing.assert_array_equal(h264, other)
