"""Videos for the tests, written with PyAV."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from cdt_fast.checks import InputError
from cdt_fast.models import DUST
from cdt_fast.video.denoising import denoise_video
from cdt_fast.video.settings import VideoSettings
from tests.tiny import scrolling_clip


def encode(
    path: Path,
    frames: Iterable[np.ndarray | av.VideoFrame],
    codec: str = "mpeg4",
    pixels: str = "yuv420p",
    *,
    rate: Any = 25,
    form: str | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    times: Iterable[Fraction] | None = None,
    setup: Callable[[Any], Any] = lambda stream: None,
    sound: Callable[[Any], Callable[[], None]] | None = None,
) -> Path:
    """Encode frames `[h, w]`, `[h, w, 3]` or `[h, w, 4]`, shown at `times` in seconds; `setup` changes the stream, and
    `sound` adds others to the container and returns what writes them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    frames, tick = list(frames), Fraction(1, 90_000)
    shape = frames[0].shape if isinstance(frames[0], np.ndarray) else (frames[0].height, frames[0].width)
    with av.open(str(path), "w", format=form, options=container_options or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width, stream.pix_fmt = shape[0], shape[1], pixels
        if times is not None:
            stream.codec_context.time_base = tick
        setup(stream)
        finish = None if sound is None else sound(container)
        for frame, time in zip(frames, times or [None] * len(frames), strict=True):
            if isinstance(frame, np.ndarray):
                kind = "gray" if frame.ndim == 2 else "rgba" if frame.shape[2] == 4 else "rgb24"
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format=kind)
            if time is not None:
                frame.time_base, frame.pts = tick, round(time / tick)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if finish is not None:
            finish()
    return path


def colored(count: int, height: int, width: int) -> np.ndarray:
    gray = scrolling_clip(count, height, width)
    return np.stack([gray, gray[:, ::-1], 255 - gray], axis=-1)


def moving(count: int) -> np.ndarray:
    """uint8 [count, 32, 48, 3]: a texture that scrolls."""
    picture = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    return np.stack([np.roll(picture, index, axis=1) for index in range(count)])


def write_folder(folder: Path, count: int = 12, suffix: str = "png") -> Path:
    """Save the pictures of `moving`, from 1 on."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(moving(count), 1):
        Image.fromarray(frame).save(folder / f"{number}.{suffix}")
    return folder


def refused(path: Path, *facts: str, by: Callable[[], object]) -> None:
    """Call something, and expect one line of InputError that names the path and every fact."""
    with pytest.raises(InputError) as caught:
        by()
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    # The folder of a test is called after the test, and would often hold the fact.
    told = message.replace(str(path), "", 1)
    for fact in facts:
        assert fact in told


def plain(level: int, height: int = 32, width: int = 48) -> np.ndarray:
    """A frame of one gray."""
    return np.full((height, width, 3), level, np.uint8)


def tone(container: Any, codec: str, wave: np.ndarray, rate: int = 48_000, pts: int = 0) -> Callable[[], None]:
    """Add a stream of sound to a container; returns what writes it."""
    stream = container.add_stream(codec, rate=rate)

    def write() -> None:
        form = "fltp" if wave.dtype == np.float32 else "s16"
        given = av.AudioFrame.from_ndarray(wave[None], format=form, layout="mono")
        given.sample_rate, given.pts = rate, pts
        for part in av.AudioResampler(stream.format, stream.layout, rate).resample(given):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))

    return write


class Same(DUST):
    """Gives every token back as it came."""

    def forward(self, noisy: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        return noisy


def settings_of(**data: Any) -> VideoSettings:
    return VideoSettings.chosen({"data": {"frames": "resized", "patch": 8, "window": 8, "patch_frames": 1, **data}})


def denoised(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    """What `denoise` says of a video that it gives back as it was."""
    return denoise_video(Same(64, 16, 1), settings_of(), source, target, overwrite=True, **options)
