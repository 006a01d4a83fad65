"""Small clips, written on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from cdt_fast.checks import InputError
from tests.video.clips import moving


@pytest.fixture
def write_folder() -> Callable[..., Path]:
    def write(folder: Path, count: int = 12, suffix: str = "png") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for number, frame in enumerate(moving(count), 1):
            Image.fromarray(frame).save(folder / f"{number}.{suffix}")
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
