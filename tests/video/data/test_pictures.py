"""What picture files and their names say beyond a first page of 8-bit pixels, by way of what the user sees of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdt_fast.models import DUST
from cdt_fast.video.denoising import denoise_video
from cdt_fast.video.settings import VideoSettings


def denoise_notes(source: Path, target: Path) -> list[str]:
    settings = VideoSettings()
    settings.update("data", {"patch": 8, "window": 8, "patch_frames": 4, "overlap": 1})
    written: dict[str, Any] = denoise_video(DUST(256, 16, 1), settings, source, target, depth=0, progress=False)
    return written["notes"]


def test_denoising_says_what_the_reader_notes(tmp_path, write_lying_video):
    path = write_lying_video(tmp_path / "clip.avi")
    assert any(note.startswith(f"{path}: may be damaged") for note in denoise_notes(path, tmp_path / "out.mp4"))
