from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cdt_fast.video.data import cache
from cdt_fast.video.data.cache import preprocess
from cdt_fast.video.data.clips import Clip, open_source


@pytest.fixture
def clip(tmp_path, write_folder) -> Clip:
    return Clip("walk", write_folder(tmp_path / "walk", count=5))


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """The sizes that frames were decoded to, one a frame."""
    calls: list[int] = []
    monkeypatch.setattr(cache, "preprocess", lambda frame, size: calls.append(size) or preprocess(frame, size))
    return calls


def load(clip: Clip, tmp_path: Path, size: int = 16) -> np.ndarray:
    return cache.load_clip(clip, size, tmp_path / "cache", progress=False).frames


def held(tmp_path: Path, suffix: str = ".u8") -> list[Path]:
    return sorted((tmp_path / "cache").glob(f"*{suffix}"))


def test_a_clip_is_decoded_once(clip, tmp_path, decoded):
    frames = load(clip, tmp_path)
    assert isinstance(frames, np.memmap)
    assert (frames.shape, frames.dtype, frames.flags.writeable) == ((5, 16, 16), np.uint8, False)
    assert np.array_equal(frames, [preprocess(frame, 16) for frame in open_source(clip.path).frames()])
    assert np.array_equal(load(clip, tmp_path), frames)
    assert len(decoded) == 5
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache", *held(tmp_path))]
    assert modes == [0o700, 0o600]  # only the owner can read what was in a video


def test_another_size_version_or_content_is_another_file(clip, tmp_path, decoded, monkeypatch):
    load(clip, tmp_path)
    assert load(clip, tmp_path, 24).shape == (5, 24, 24)
    os.utime(clip.path / "3.png", ns=(1, 1))
    load(clip, tmp_path)
    (clip.path / "5.png").unlink()
    assert len(load(clip, tmp_path)) == 4
    monkeypatch.setattr(cache, "PREPROCESS_VERSION", -1)
    load(clip, tmp_path)
    assert len(decoded) == 5 + 5 + 5 + 4 + 4
    assert len(held(tmp_path)) == 5


@pytest.mark.parametrize("suffix", [".u8", ".json"])
@pytest.mark.parametrize("kept", [0, 1, -1])
def test_a_cut_file_is_made_again(clip, tmp_path, decoded, suffix, kept):
    frames = np.array(load(clip, tmp_path))
    [path] = held(tmp_path, suffix)
    path.write_bytes(path.read_bytes().rstrip()[:kept])
    assert np.array_equal(load(clip, tmp_path), frames)
    assert len(decoded) == 10


def test_a_bad_clip_or_a_full_disk_leaves_nothing_behind(clip, tmp_path, refused, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "preprocess", full)
    refused(tmp_path / "cache", "No space left", "CDT_FAST_CACHE", by=lambda: load(clip, tmp_path))
    (clip.path / "1.png").write_bytes(b"broken")
    refused(clip.path / "1.png", "cannot be read", by=lambda: load(clip, tmp_path))
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("a file")
    refused(tmp_path / "cache", "cannot be written", by=lambda: load(clip, tmp_path))


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CDT_FAST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.default_cache_dir() == tmp_path / ".cache" / "cdt_fast"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache.default_cache_dir() == tmp_path / "shared" / "cdt_fast"
    monkeypatch.setenv("CDT_FAST_CACHE", str(tmp_path / "chosen"))
    assert cache.default_cache_dir() == tmp_path / "chosen"


_DECODE = """
import sys
from pathlib import Path
from cdt_fast.video.data import cache, clips
def half(frame, size, preprocess=cache.preprocess):
    print("decoding", flush=True)
    sys.stdin.readline()
    return preprocess(frame, size)
cache.preprocess = half
cache.load_clip(clips.Clip("walk", Path(sys.argv[1])), 16, sys.argv[2], progress=False)
"""


def test_what_a_killed_decoding_left_is_removed_by_that_of_any_other_clip(clip, tmp_path, write_folder):
    command = [sys.executable, "-c", _DECODE, str(clip.path), str(tmp_path / "cache")]
    other = Clip("other", write_folder(tmp_path / "other", count=3))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "decoding\n"
        [half] = (tmp_path / "cache").iterdir()
        load(other, tmp_path)
        assert half.exists()  # it is being written
        process.kill()
    load(other, tmp_path, size=24)
    assert not half.exists()
    assert len(held(tmp_path)) == 2


def test_notes_are_kept_with_the_frames(tmp_path, write_lying_video, decoded):
    clip = Clip("clip", write_lying_video(tmp_path / "clip.avi"))
    first, again = (cache.load_clip(clip, 16, tmp_path / "cache", progress=False) for _ in range(2))
    assert len(decoded) == len(first.frames)
    assert first.notes == again.notes
    assert "frames that it states" in first.notes[0]
    assert again.frames.shape == first.frames.shape


def test_a_clip_without_a_whole_window_of_crops_is_empty(clip, tmp_path):
    found = cache.load_clip(clip, 16, tmp_path / "cache", progress=False, crops_of=9)
    assert len(found.frames) == 0


@pytest.mark.parametrize(
    ("color", "level"),
    [((255, 0, 0), 76), ((0, 255, 0), 150), ((0, 0, 255), 29), ((255, 255, 255), 255), ((10, 200, 77), 129)],
)
def test_luma_weights(color, level):
    assert (preprocess(np.full((20, 30, 3), color, np.uint8), 16) == level).all()


def test_resizing_is_antialiased_and_rounded():
    gray = np.random.default_rng(0).integers(0, 256, (24, 24), dtype=np.uint8)
    gray.setflags(write=False)
    assert np.array_equal(preprocess(gray, 24), gray)
    frame = np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    luma = torch.from_numpy(frame).double() @ torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    exact = torch.nn.functional.interpolate(luma[None, None], (16, 16), mode="bilinear", antialias=True)[0, 0]
    assert (torch.from_numpy(preprocess(frame, 16)) - exact).abs().max() <= 0.5 + 1e-3
    # Without antialiasing a fine checkerboard keeps its full contrast or turns into stripes.
    checkers = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    assert np.ptp(preprocess(checkers, 16)[2:-2, 2:-2]) <= 2
