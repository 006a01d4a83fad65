"""What of a source `denoise` carries over besides its pixels, and what it says where it does not."""

# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportReturnType=false, reportArgumentType=false
# PyAV's types allow None wherever FFmpeg does.
from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from cdt_fast.checks import InputError
from cdt_fast.models import DUST, DenoisingDUST
from cdt_fast.video.data import open_source
from cdt_fast.video.data.video_file import EXACT
from cdt_fast.video.denoising import denoise_video
from tests.tiny import scrolling_clip
from tests.video.clips import colored, denoised, encode, plain, settings_of, tone


def recorded(path: Path, times: list[Fraction], sound: str | None = None, **settings: Any) -> Path:
    """A video with frames at these seconds, and a tone of a second where `sound` names its codec."""
    frames = settings.pop("frames", scrolling_clip(len(times), 24, 40))
    options = {"bf": "0", "crf": "4", **settings.pop("options", {})}

    def setup(stream: Any) -> None:
        for name, value in settings.items():
            setattr(stream, name, value)

    wave = (np.sin(np.arange(48_000) / 20) * 8000).astype(np.int16)
    heard = None if sound is None else lambda container: tone(container, sound, wave)
    colored = [np.repeat(frame[..., None], 3, 2) for frame in frames]
    return encode(path, colored, "libx264", rate=10, options=options, times=times, setup=setup, sound=heard)


def times_and_sound(path: Path) -> tuple[list[float], list[bytes]]:
    with av.open(str(path)) as container:
        times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0)]
    with av.open(str(path)) as container:
        if not container.streams.audio:
            return times, []
        return times, [bytes(packet) for packet in container.demux(audio=0) if packet.size]


EVEN = [Fraction(number, 10) for number in range(10)]
UNEVEN = [Fraction(number, 10) + Fraction(number * number, 50) for number in range(10)]


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov"])
@pytest.mark.parametrize("times", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_frame_times_pixel_shape_and_sound_come_through(tmp_path: Path, suffix: str, times: list[Fraction]) -> None:
    source = recorded(tmp_path / "in.mp4", times, "aac", sample_aspect_ratio=Fraction(64, 45))
    told = denoised(source, tmp_path / f"out{suffix}")
    assert told["notes"] == []
    found, sound = times_and_sound(tmp_path / f"out{suffix}")
    # Where the sound begins before the first frame, .mkv counts from there.
    assert [time - found[0] for time in found] == pytest.approx([float(time) for time in times], abs=0.002)
    assert sound
    assert sound == times_and_sound(source)[1]
    with av.open(str(tmp_path / f"out{suffix}")) as container:
        assert container.streams.video[0].sample_aspect_ratio == Fraction(64, 45)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_the_last_frame_is_shown_as_long(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / "in.gif"
    pictures = [Image.new("L", (48, 32), level) for level in (0, 90, 180)]
    pictures[0].save(source, save_all=True, append_images=pictures[1:], duration=[100, 150, 3000])
    denoised(source, tmp_path / f"out{suffix}")
    with av.open(str(tmp_path / f"out{suffix}")) as container:
        assert container.duration / 1e6 == pytest.approx(3.25, abs=0.02)


def test_an_avi_has_even_times_whatever_the_order_of_decoding(tmp_path: Path) -> None:
    source = open_source(
        encode(tmp_path / "in.avi", scrolling_clip(12, 24, 40), "libx264", rate=10, options={"bf": "2"})
    )
    assert len(list(source.frames())) == 12
    assert [time - source.times[0] for time in source.times] == [Fraction(number, 10) for number in range(12)]


def flash_and_beep(path: Path) -> tuple[int, float, float]:
    """Number of frames, and when a picture is bright and the sound loud for the first time, in seconds."""
    with av.open(str(path)) as container:
        shown = [(frame.time, frame.to_ndarray(format="gray").mean()) for frame in container.decode(video=0)]
    with av.open(str(path)) as container:
        heard = [(frame.time, np.abs(frame.to_ndarray()).max()) for frame in container.decode(audio=0)]
    flash, beep = (next(time for time, level in part if level > most) for part, most in ((shown, 120), (heard, 0.3)))
    return len(shown), flash, beep


@pytest.fixture(scope="module")
def flashing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key frame every tenth of 50 frames, 25 a second, and a flash and a beep at the second 1."""
    path = tmp_path_factory.mktemp("flashing") / "whole.mp4"
    wave = np.zeros(96_000, dtype=np.float32)
    wave[48_000:49_920] = 0.9 * np.sin(np.arange(1920) * 0.3)
    frames = [plain(220 if number in (25, 26, 27) else 30, 32, 32) for number in range(50)]
    options = {"g": "10", "bf": "2", "x264-params": "open-gop=1"}
    return encode(path, frames, "libx264", options=options, sound=lambda container: tone(container, "aac", wave))


def copied(source: Path, target: Path, first: Fraction, cut: Fraction) -> Path:
    """The packets from `first` seconds on, `cut` seconds earlier: what programs do that trim without encoding."""
    with av.open(str(source)) as opened, av.open(str(target), "w") as container:
        streams = {stream.index: container.add_stream_from_template(stream, opaque=True) for stream in opened.streams}
        for packet in opened.demux():
            if packet.dts is None or packet.pts * packet.time_base < first:
                continue
            shift = round(cut / packet.time_base)
            packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            packet.stream = streams[packet.stream.index]
            container.mux(packet)
    return target


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize(
    ("first", "cut"),
    [("-1", "0.6"), ("-1", "0.73"), ("0.45", "0"), ("0.38", "0.6")],
    ids=["hidden", "hidden between frames", "begins between key frames", "both"],
)
def test_sound_stays_with_the_first_frame_that_is_shown(
    tmp_path: Path, flashing: Path, suffix: str, first: str, cut: str
) -> None:
    source = copied(flashing, tmp_path / "in.mp4", Fraction(first), Fraction(cut))
    count, flash, beep = flash_and_beep(source)
    assert 20 < count < 40
    told = denoised(source, tmp_path / f"out{suffix}")
    cut_off = suffix == ".mp4" and (first, cut) == ("0.45", "0")  # it begins .35 s before what can be decoded
    assert told["notes"] == ["does not come through: sound before the first frame"] * cut_off
    found, flash_written, beep_written = flash_and_beep(tmp_path / f"out{suffix}")
    assert (found, beep_written - flash_written) == (count, pytest.approx(beep - flash, abs=0.003))


def test_frames_that_an_edit_list_hides_at_the_end_are_not_missed(tmp_path: Path, flashing: Path) -> None:
    data = bytearray(flashing.read_bytes())
    place = data.index(b"elst") + 12
    (ticks,), (second,) = (struct.unpack_from(">I", data, at) for at in (place, data.index(b"mvhd") + 16))
    assert ticks == 2 * second
    struct.pack_into(">I", data, place, ticks * 7 // 10)
    (tmp_path / "in.mp4").write_bytes(data)
    source = open_source(tmp_path / "in.mp4")
    assert len(list(source.frames())) == 35
    assert source.notes == []


def test_joined_recordings_follow_one_another(tmp_path: Path, flashing: Path) -> None:
    """The clock of the second part starts anew."""
    part = copied(flashing, tmp_path / "part.ts", Fraction(-1), Fraction(0)).read_bytes()
    (tmp_path / "in.ts").write_bytes(part + part)
    told = denoised(tmp_path / "in.ts", tmp_path / "out.mp4")
    times, _ = times_and_sound(tmp_path / "out.mp4")
    assert np.diff(times) == pytest.approx(np.full(99, 0.04), abs=0.002)
    assert any("sound from where its clock jumps back" in note for note in told["notes"])


def test_what_a_container_cannot_hold_is_said(tmp_path: Path) -> None:
    told = denoised(recorded(tmp_path / "pcm.mkv", EVEN, "pcm_s16be"), tmp_path / "out.mp4")
    assert any("sound in pcm_s16be does not come through" in note for note in told["notes"])
    assert len(times_and_sound(tmp_path / "out.mp4")[0]) == 10


ORIENTATIONS = [(1, 0, 0, 1), (-1, 0, 0, 1), (-1, 0, 0, -1), (1, 0, 0, -1), (0, 1, 1, 0), (0, 1, -1, 0), (0, -1, -1, 0)]


@pytest.mark.parametrize("matrix", [*ORIENTATIONS, (0, -1, 1, 0)], ids=str)
def test_a_clip_that_is_to_be_turned_or_mirrored_is_written_upright(tmp_path: Path, matrix: tuple[int, ...]) -> None:
    """By the matrix of its track: a pixel further right goes (a, b), one further down goes (c, d)."""
    frames = np.zeros((10, 24, 40), dtype=np.uint8)
    frames[:, :12, :20] = 200  # above and to the left
    path = recorded(tmp_path / "in.mp4", EVEN, frames=frames, sample_aspect_ratio=Fraction(4, 3))
    a, b, c, d = matrix
    data = bytearray(path.read_bytes())
    place = data.index(struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30), data.index(b"tkhd"))
    data[place : place + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    path.write_bytes(bytes(data))
    told = denoised(path, tmp_path / "out.mp4")
    assert told["notes"] == []
    assert (told["width"], told["height"]) == ((24, 40) if b else (40, 24))
    with av.open(str(tmp_path / "out.mp4")) as container:
        shape = container.streams.video[0].sample_aspect_ratio
        shown = next(container.decode(video=0))
    assert (shown.rotation, shape) == (0, Fraction(3, 4) if b else Fraction(4, 3))
    picture = shown.to_ndarray(format="gray")
    picture = picture[:: -1 if b + d < 0 else 1, :: -1 if a + c < 0 else 1]
    height, width = picture.shape
    assert picture[: height // 2, : width // 2].mean() > 150
    assert max(picture[height // 2 :].mean(), picture[:, width // 2 :].mean()) < 60
    assert next(open_source(path).frames()).shape == (*shown.to_ndarray(format="gray").shape, 3)


SKIN = (224, 172, 140)


def one_color(path: Path, width: int, codec: str, pixels: str, matrix: int, full: bool, **tags: int) -> Path:
    """Frames of `SKIN`, turned into YUV by this matrix and range, under these tags."""

    def setup(stream: Any) -> None:
        for name, value in tags.items():
            setattr(stream.codec_context, name, value)

    def frame() -> av.VideoFrame:
        picture = av.VideoFrame.from_ndarray(np.full((16, width, 3), SKIN, dtype=np.uint8), format="rgb24")
        picture.colorspace = matrix
        return picture.reformat(format=pixels, dst_color_range=1 + full)

    return encode(path, [frame() for _ in range(4)], codec, pixels, setup=setup)


def shown_color(path: Path) -> tuple[list[int], tuple[int, ...]]:
    """The color of a pixel as players show it, and the tags: matrix, range, primaries and transfer."""
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
    tags = (frame.colorspace, frame.color_range, frame.color_primaries, frame.color_trc)
    if frame.colorspace == 2:
        frame.colorspace = 1 if frame.width >= 1280 else 5
    return frame.to_ndarray(format="rgb24", interpolation=EXACT)[7, 7].tolist(), tags


HD, SD = 1280, 32


@pytest.mark.parametrize(
    ("width", "pixels", "matrix", "full", "tags"),
    [
        (HD, "yuv420p", 1, False, {}),
        (SD, "yuv420p", 5, False, {}),
        (HD, "yuv420p", 5, False, {"colorspace": 5}),
        (HD, "yuv420p", 5, False, {"colorspace": 6, "color_range": 1, "color_primaries": 6, "color_trc": 6}),
        (SD, "yuv420p", 1, False, {"colorspace": 1, "color_primaries": 1, "color_trc": 1}),
        (SD, "yuv420p", 9, False, {"colorspace": 9, "color_primaries": 9, "color_trc": 14}),
        (SD, "yuv420p", 7, False, {"colorspace": 7}),
        (HD, "yuv420p", 1, True, {"color_range": 2}),
        (SD, "yuvj420p", 5, True, {"color_range": 2}),
        (SD, "yuv422p10le", 9, False, {"colorspace": 9, "color_primaries": 9, "color_trc": 16}),
    ],
)
def test_colors_are_read_and_written_by_the_same_matrix(
    tmp_path: Path, width: int, pixels: str, matrix: int, full: bool, tags: dict[str, int]
) -> None:
    path = one_color(tmp_path / "in.mp4", width, "libx264", pixels, matrix, full, **tags)
    color, found = shown_color(path)
    assert color == pytest.approx(SKIN, abs=2)
    assert next(open_source(path).frames())[7, 7].tolist() == color
    told = denoised(path, tmp_path / "out.mkv")
    assert any("HDR (PQ)" in note for note in told["notes"]) == (tags.get("color_trc") == 16)
    assert shown_color(tmp_path / "out.mkv") == (pytest.approx(color, abs=2), found)


@pytest.mark.parametrize("width", [HD, SD])
@pytest.mark.parametrize(
    ("codec", "pixels"), [("libx264rgb", "rgb24"), ("ffv1", "bgra"), ("ffv1", "gbrp10le"), ("ffv1", "gray")]
)
def test_colors_that_are_no_yuv_are_written_as_what_they_are(
    tmp_path: Path, width: int, codec: str, pixels: str
) -> None:
    path = one_color(tmp_path / "in.mkv", width, codec, pixels, 5, False)
    color, _ = shown_color(path)
    denoised(path, tmp_path / "out.mp4")
    assert shown_color(tmp_path / "out.mp4") == (pytest.approx(color, abs=2), (1 if width == HD else 5, 1, 2, 2))


@pytest.mark.parametrize("pixels", ["yuv420p", "yuvj420p"])
def test_another_pass_changes_no_color(tmp_path: Path, pixels: str) -> None:
    frames = colored(8, 32, 48)
    path = encode(tmp_path / "0.mkv", frames, "libx264", pixels, options={"qp": "0"})
    before = np.mean(list(open_source(path).frames()), (0, 1, 2))
    for number in range(3):
        denoised(path, tmp_path / f"{number + 1}.mkv")
        path = tmp_path / f"{number + 1}.mkv"
    after = np.mean(list(open_source(path).frames()), (0, 1, 2))
    assert after.mean() == pytest.approx(frames.mean(), abs=1)
    assert after == pytest.approx(before, abs=1)


def test_a_matrix_that_is_not_converted_is_refused(tmp_path: Path) -> None:
    path = one_color(tmp_path / "in.mp4", SD, "libx264", "yuv420p", 5, False, colorspace=8)
    with pytest.raises(InputError, match=r"in\.mp4: its colors have matrix 8 of ITU-T H\.273"):
        list(open_source(path).frames())


def test_what_frames_say_beyond_their_pixels_is_said(tmp_path: Path) -> None:
    path = encode(tmp_path / "in.mov", [np.full((8, 8, 4), alpha, np.uint8) for alpha in (255, 255, 9)], "png", "rgba")
    assert denoised(path, tmp_path / "out.mp4")["notes"] == [
        "does not come through: half the resolution of its colors, transparency"
    ]
    path = recorded(tmp_path / "in.mp4", EVEN, options={"x264-params": "frame-packing=3"})
    assert denoised(path, tmp_path / "stereo.mp4")["notes"] == ["does not come through: stereo3d"]
    path = one_color(tmp_path / "deep.mp4", SD, "libx264", "yuv420p10le", 5, False)
    for given in ({}, {"part": (0, 2)}):
        notes = denoised(path, tmp_path / "8.mp4", **given)["notes"]
        assert notes == ["does not come through: 10 bits a color (8 are written)"]


def test_tags_come_through_and_other_streams_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.mkv"
    with av.open(str(recorded(tmp_path / "plain.mkv", EVEN, "aac"))) as opened, av.open(str(path), "w") as container:
        container.metadata.update(title="Tape 7", comment="attic")
        chapter = {"id": 1, "start": 0, "end": 500, "time_base": Fraction(1, 1000), "metadata": {"title": "one"}}
        container.set_chapters([chapter])
        streams = [container.add_stream_from_template(stream, opaque=True) for stream in opened.streams]
        streams[1].metadata["language"] = "fra"
        container.add_attachment("font.ttf", "font/ttf", b"font")
        for packet in opened.demux():
            if packet.dts is not None:
                packet.stream = streams[packet.stream.index]
                container.mux(packet)
    left = "does not come through: chapters, an attachment (font.ttf)"
    assert denoised(path, tmp_path / "out.mp4")["notes"] == [left]
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert (container.metadata["title"], container.metadata["comment"]) == ("Tape 7", "attic")
        assert container.streams.audio[0].language == "fra"


@pytest.mark.parametrize(
    ("suffix", "lost"), [(".mp4", []), (".mkv", []), (".mov", ["the tag language of audio (deu)"])]
)
def test_names_of_tracks_come_through(tmp_path: Path, suffix: str, lost: list[str]) -> None:
    def tracks(container: Any) -> Any:
        writes = [tone(container, "aac", np.zeros(48_000, np.int16)) for _ in range(2)]
        for stream, language in zip(container.streams.audio, ("eng", "deu"), strict=True):
            stream.metadata.update(title=f"in {language}", language=language)
        return lambda: [write() for write in writes]

    for source in (".mkv", ".mp4"):
        path = encode(tmp_path / f"in{source}", scrolling_clip(4, 24, 40), sound=tracks)
        said = [f"does not come through: {name}" for name in lost]
        assert denoised(path, tmp_path / f"out{suffix}")["notes"] == said
        with av.open(str(tmp_path / f"out{suffix}")) as container:
            names = [stream.metadata.get("title", stream.metadata.get("name")) for stream in container.streams.audio]
        assert names == ["in eng", "in deu"]


def test_a_tag_in_latin_1_comes_through(tmp_path: Path) -> None:
    def named(container: Any) -> Any:
        container.metadata["title"] = "Tape #"
        return lambda: None

    path = encode(tmp_path / "in.avi", [plain(1, 16, 16)] * 2, sound=named)
    path.write_bytes(path.read_bytes().replace(b"Tape #", b"Tape \xfc"))
    assert denoised(path, tmp_path / "out.mp4")["notes"] == []
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert container.metadata["title"] == "Tape ü"


@pytest.mark.parametrize(("first", "second"), [("gray", "yuv420p"), ("yuv420p", "gray")])
def test_a_clip_may_change_its_pixel_format(tmp_path: Path, first: str, second: str) -> None:
    options, data = {"x265-params": "log-level=none"}, b""
    for pixels in (first, second):
        frames = [np.full((32, 32, 3), SKIN, np.uint8)] * 3
        data += encode(tmp_path / "part.hevc", frames, "libx265", pixels, options=options).read_bytes()
    (tmp_path / "in.hevc").write_bytes(data)
    assert denoised(tmp_path / "in.hevc", tmp_path / "out.mp4")["frames"] == 6
    with av.open(str(tmp_path / "out.mp4")) as container:
        colors = [int(np.ptp(frame.to_ndarray(format="rgb24")[9, 9])) for frame in container.decode(video=0)]
    assert [color > 60 for color in colors] == [pixels != "gray" for pixels in (first, second) for _ in range(3)]


def test_a_level_that_is_none_or_beyond_the_training_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.full((8, 16, 16), 90, dtype=np.uint8))

    def told(**options: Any) -> list[str]:
        source, target = tmp_path / "in.npy", tmp_path / "out.mp4"
        settings = settings_of(frames="crops", patch_frames=4)
        return denoise_video(DenoisingDUST(layers=1), settings, source, target, overwrite=True, **options)["notes"]

    assert told() == ["hardly any noise was found (sigma 0) and removed; give --sigma to remove more"]
    assert told(depth=0) == ["no layer was run and nothing removed: depth 0 is the input"]
    beyond = "the noise, sigma 80, is beyond what the model was trained on, 2 to 50"
    assert told(sigma=80) == [beyond]
    for sigma in (0, -1.0, 1e100, float("inf"), float("nan")):
        with pytest.raises(InputError, match="sigma must be the noise's standard deviation"):
            told(sigma=sigma)
    with pytest.raises(InputError, match="takes the noise as it comes"):
        denoise_video(DUST(64, 16, 1), settings_of(), tmp_path / "in.npy", tmp_path / "out.mp4", sigma=5)
