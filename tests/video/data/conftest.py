"""Small clips, written on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cdt_fast.checks import InputError
from tests.video.clips import encode


@pytest.fixture
def moving_frames() -> Callable[[int], np.ndarray]:
    """Make uint8 [count, 32, 48, 3]: a textured picture that scrolls."""
    picture = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    return lambda count: np.stack([np.roll(picture, index, axis=1) for index in range(count)])


@pytest.fixture
def write_video(moving_frames) -> Callable[..., Path]:
    def write(
        path: Path, count: int = 12, codec: str = "mpeg4", rate: int = 25, form: str | None = None, **options: str
    ):
        pixels = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        return encode(path, moving_frames(count), codec, pixels, rate=rate, form=form, container_options=options)

    return write


@pytest.fixture
def write_lying_video(write_video) -> Callable[[Path], Path]:
    """An .avi of 12 frames whose headers state 24."""

    def write(path: Path) -> Path:
        data = bytearray(write_video(path, count=12).read_bytes())
        main, stream = data.index(b"avih"), data.index(b"strh")
        data[main + 24 : main + 28] = data[stream + 40 : stream + 44] = (24).to_bytes(4, "little")
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def write_folder(moving_frames) -> Callable[..., Path]:
    def write(folder: Path, count: int = 12, suffix: str = "png", first: int = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for index, frame in enumerate(moving_frames(count)):
            Image.fromarray(frame).save(folder / f"{index + first}.{suffix}")
        return folder

    return write


@pytest.fixture
def refused() -> Callable[..., str]:
    """Call something, expect one line of InputError that names the path and every fact, and return the line."""

    def call(path: Path, *facts: str, by: Callable[[], object]) -> str:
        with pytest.raises(InputError) as caught:
            by()
        message = str(caught.value)
        assert str(path) in message
        assert "\n" not in message
        # The folder of a test is called after the test, and would often hold the fact.
        told = message.replace(str(path), "", 1)
        for fact in facts:
            assert fact in told
        return message

    return call
