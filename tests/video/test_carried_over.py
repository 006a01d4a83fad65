"""What of a source `denoise` carries over besides its pixels, and what it says where it does not."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from cdt_fast.errors import InputError
from cdt_fast.models import DUST
from cdt_fast.video.data import open_source
from cdt_fast.video.denoising import denoise_video, denoised_frames
from cdt_fast.video.noise import estimated_noise
from cdt_fast.video.settings import VideoSettings
from tests.tiny import scrolling_clip

TICK = Fraction(1, 90_000)


class _Same(DUST):
    """Gives every token back as it came."""

    def forward(self, noisy: torch.Tensor, depth: int | None = None, *, deviation: Any = None) -> torch.Tensor:
        return noisy


def settings_of(**data: Any) -> VideoSettings:
    config = VideoSettings()
    config.update("data", {"patch": 8, "window": 8, "patch_frames": 4, "overlap": 1, **data})
    return config


def recorded(path: Path, times: list[Fraction], sound: str | None = None, frames: np.ndarray | None = None) -> Path:
    """A video with frames at these seconds, and a tone of a second where `sound` names its codec."""
    frames = scrolling_clip(len(times), 24, 40) if frames is None else frames
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=10, options={"bf": "0", "crf": "4"})
        video.width, video.height, video.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        video.codec_context.time_base = TICK
        tone = None if sound is None else container.add_stream(sound, rate=48_000)
        for number, time in enumerate(times):
            picture = av.VideoFrame.from_ndarray(np.repeat(frames[number][..., None], 3, 2), format="rgb24")
            picture.time_base, picture.pts = TICK, round(time / TICK)
            container.mux(video.encode(picture))
        container.mux(video.encode(None))
        if tone is not None:
            wave = (np.sin(np.arange(48_000) / 20) * 8000).astype(np.int16)
            given = av.AudioFrame.from_ndarray(wave[None], format="s16", layout="mono")
            given.sample_rate, given.pts = 48_000, 0
            for part in av.AudioResampler(tone.format, tone.layout, 48_000).resample(given):
                container.mux(tone.encode(part))
            container.mux(tone.encode(None))
    return path


def times_and_sound(path: Path) -> tuple[list[float], list[bytes]]:
    with av.open(str(path)) as container:
        times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0)]
    with av.open(str(path)) as container:
        if not container.streams.audio:
            return times, []
        return times, [bytes(packet) for packet in container.demux(audio=0) if packet.size]


def denoised(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    return denoise_video(_Same(256, 16, 1), settings_of(), source, target, progress=False, **options)


EVEN = [Fraction(number, 10) for number in range(10)]
UNEVEN = [Fraction(number, 10) + Fraction(number * number, 50) for number in range(10)]


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov"])
@pytest.mark.parametrize("times", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_frame_times_and_sound_come_through(tmp_path: Path, suffix: str, times: list[Fraction]) -> None:
    source = recorded(tmp_path / "in.mp4", times, "aac")
    told = denoised(source, tmp_path / f"out{suffix}")
    assert told["notes"] == []
    found, sound = times_and_sound(tmp_path / f"out{suffix}")
    # Where the sound begins before the first frame, .mkv counts from there.
    assert [time - found[0] for time in found] == pytest.approx([float(time) for time in times], abs=0.002)
    assert sound
    assert sound == times_and_sound(source)[1]


def test_what_a_container_cannot_hold_is_said(tmp_path: Path) -> None:
    told = denoised(recorded(tmp_path / "in.mp4", UNEVEN, "aac"), tmp_path / "out.avi")
    assert any("uneven frame times do not come through in .avi" in note for note in told["notes"])
    told = denoised(recorded(tmp_path / "pcm.mkv", EVEN, "pcm_s16be"), tmp_path / "out.mp4")
    assert any("sound in pcm_s16be does not come through" in note for note in told["notes"])
    assert len(times_and_sound(tmp_path / "out.mp4")[0]) == 10


def test_a_clip_that_is_to_be_turned_is_written_upright(tmp_path: Path) -> None:
    """The matrix of a phone held upright: a quarter of a turn clockwise for display."""
    frames = np.zeros((10, 24, 40), dtype=np.uint8)
    frames[:, :12, :20] = 200  # above and to the left; upright it is above and to the right
    path = recorded(tmp_path / "in.mp4", EVEN, frames=frames)
    data = bytearray(path.read_bytes())
    place = data.index(struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30), data.index(b"tkhd"))
    data[place : place + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 24 << 16, 0, 1 << 30)
    path.write_bytes(bytes(data))
    told = denoised(path, tmp_path / "out.mp4")
    assert (told["width"], told["height"]) == (24, 40)
    with av.open(str(tmp_path / "out.mp4")) as container:
        shown = next(container.decode(video=0))
    assert shown.rotation == 0
    picture = shown.to_ndarray(format="gray")
    assert picture[:20, 12:].mean() > 150 > 60 > picture[20:].mean()
    assert picture[:20, :12].mean() < 60
    assert next(open_source(path).frames()).shape == (40, 24, 3)


@pytest.mark.parametrize(("count", "height", "width"), [(9, 33, 47), (3, 5, 6), (2, 8, 3), (17, 1, 1)])
def test_odd_sizes_and_clips_smaller_than_a_patch_come_back_as_they_were(
    tmp_path: Path, count: int, height: int, width: int
) -> None:
    clip = scrolling_clip(count, height, width)
    np.save(tmp_path / "in.npy", clip)
    told = denoised(tmp_path / "in.npy", tmp_path / "out.mkv")
    assert (told["frames"], told["height"], told["width"]) == (count, height, width)
    with av.open(str(tmp_path / "out.mkv")) as container:
        found = np.stack([frame.to_ndarray(format="gray") for frame in container.decode(video=0)])
    assert np.abs(found[:, :height, :width].astype(float) - clip).mean() < 4


def test_the_noise_is_found_from_the_frames() -> None:
    clean = torch.from_numpy(scrolling_clip(8, 64, 64)).float() / 255
    for sigma in (5, 20, 50):
        noisy = clean + sigma / 255 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(sigma))
        assert estimated_noise(noisy) * 255 == pytest.approx(sigma, rel=0.1)
    assert estimated_noise(torch.zeros(2, 9, 9)) == 0
    assert estimated_noise(torch.rand(2, 1, 9)) == 0


def test_a_level_that_is_none_or_beyond_the_training_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.full((8, 16, 16), 90, dtype=np.uint8))
    model = DUST(256, 256, 1, patch_frames=4, noise_adaptive=True)
    options: dict[str, Any] = {"progress": False, "overwrite": True}
    told = denoise_video(model, settings_of(), tmp_path / "in.npy", tmp_path / "out.mp4", **options)
    assert told["sigma"] == 0
    assert "hardly any noise was found" in told["notes"][0]
    told = denoise_video(model, settings_of(overlap=2), tmp_path / "in.npy", tmp_path / "out.mp4", depth=0, **options)
    assert told["notes"] == ["no layer was run and nothing removed: depth 0 is the input"]
    told = denoise_video(model, settings_of(), tmp_path / "in.npy", tmp_path / "out.mp4", sigma=80, **options)
    assert told["notes"] == ["the noise, sigma 80, is beyond what the model was trained on, 1 to 50"]
    for sigma in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="--sigma must be the noise's standard deviation"):
            denoise_video(model, settings_of(), tmp_path / "in.npy", tmp_path / "out.mp4", sigma=sigma, **options)
    with pytest.raises(InputError, match="not noise-adaptive"):
        denoise_video(DUST(256, 16, 1), settings_of(), tmp_path / "in.npy", tmp_path / "out.mp4", sigma=5, **options)
    for grids in (0, 9):
        with pytest.raises(InputError, match="--grids must be from 1 to 8"):
            denoise_video(model, settings_of(), tmp_path / "in.npy", tmp_path / "out.mp4", grids=grids, **options)


def test_shifted_grids_are_a_mean_over_moved_frames() -> None:
    torch.manual_seed(0)
    model, config = DUST(256, 256, 1, patch_frames=4, noise_adaptive=True), settings_of()
    frames, deviation = torch.rand(1, 8, 16, 24), torch.tensor([0.2])
    found = denoised_frames(model, config, frames, deviation, grids=2)
    total = torch.zeros_like(frames)
    for top in (0, 4):
        for left in (0, 4):
            moved = torch.nn.functional.pad(frames, (left, -(left + 24) % 8, top, -(top + 16) % 8), mode="reflect")
            total += denoised_frames(model, config, moved, deviation)[..., top : top + 16, left : left + 24]
    torch.testing.assert_close(found, total / 4, rtol=0, atol=1e-6)
    assert not torch.allclose(found, denoised_frames(model, config, frames, deviation), atol=1e-3)
