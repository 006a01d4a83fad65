from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from cdt_fast.video.data import cache
from cdt_fast.video.data.cache import preprocess
from cdt_fast.video.data.frames import open_source
from cdt_fast.video.data.trees import Clip


@pytest.fixture
def clip(tmp_path, write_folder) -> Clip:
    return Clip("walk", write_folder(tmp_path / "walk", count=5))


@pytest.fixture
def decoded(monkeypatch) -> list[Path]:
    """The clips that were decoded, a path each time."""
    calls: list[Path] = []
    original = cache.preprocess

    def counted(frame: np.ndarray, size: int) -> np.ndarray:
        calls.append(Path())
        return original(frame, size)

    monkeypatch.setattr(cache, "preprocess", counted)
    return calls


def load(clip: Clip, tmp_path: Path, size: int = 16) -> np.ndarray:
    return cache.load_clip(clip, size, tmp_path / "cache", progress=False).frames


def only_file(tmp_path: Path) -> Path:
    [path] = (tmp_path / "cache").iterdir()
    return path


def test_a_clip_is_decoded_once(clip, tmp_path, decoded):
    frames = load(clip, tmp_path)
    assert isinstance(frames, np.memmap)
    assert (frames.shape, frames.dtype, frames.flags.writeable) == ((5, 16, 16), np.uint8, False)
    assert np.array_equal(frames, [preprocess(frame, 16) for frame in open_source(clip.path).frames()])
    assert np.array_equal(load(clip, tmp_path), frames)
    assert len(decoded) == 5
    assert np.array_equal(np.load(only_file(tmp_path), allow_pickle=False), frames)


def test_another_size_is_another_file(clip, tmp_path):
    assert load(clip, tmp_path, 16).shape != load(clip, tmp_path, 24).shape
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_changed_clip_is_decoded_again(clip, tmp_path, decoded):
    load(clip, tmp_path)
    os.utime(clip.path / "3.png", ns=(1, 1))
    load(clip, tmp_path)
    (clip.path / "5.png").unlink()
    assert len(load(clip, tmp_path)) == 4
    assert len(decoded) == 14


def test_another_version_of_the_preprocessing_is_another_file(clip, tmp_path, decoded, monkeypatch):
    load(clip, tmp_path)
    monkeypatch.setattr(cache, "PREPROCESS_VERSION", -1)
    load(clip, tmp_path)
    assert len(decoded) == 10


@pytest.mark.parametrize("kept", [0, 1, 60, 128, 700, -16, -4, -1])
def test_a_cut_file_is_made_again(clip, tmp_path, decoded, kept):
    frames = np.array(load(clip, tmp_path))
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    assert np.array_equal(load(clip, tmp_path), frames)
    assert len(decoded) == 10


@pytest.mark.parametrize("place", [3, 60, 130, 900, -18, -14, -10, -6, -1])
def test_an_altered_file_is_made_again(clip, tmp_path, decoded, place):
    frames = np.array(load(clip, tmp_path))
    path = only_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    assert np.array_equal(load(clip, tmp_path), frames)
    assert len(decoded) == 10


def test_a_long_clip_keeps_its_header_in_place(tmp_path):
    np.save(tmp_path / "clip.npy", np.random.default_rng(0).integers(0, 256, (12345, 2, 2), dtype=np.uint8))
    frames = load(Clip("clip", tmp_path / "clip.npy"), tmp_path, size=2)
    assert np.array_equal(frames, np.load(tmp_path / "clip.npy"))


def test_a_bad_clip_leaves_nothing_behind(clip, tmp_path, refused):
    (clip.path / "4.png").write_bytes(b"broken")
    refused(clip.path / "4.png", "cannot be read", by=lambda: load(clip, tmp_path))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_said_and_leaves_nothing_behind(clip, tmp_path, refused, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "_write", full)
    refused(tmp_path / "cache", "No space left", "CDT_FAST_CACHE", by=lambda: load(clip, tmp_path))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(clip, tmp_path, refused):
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


def test_the_file_of_another_clip_is_not_taken_for_this_one(clip, tmp_path, write_folder, decoded):
    other = Clip("other", write_folder(tmp_path / "other", count=5, first=3))
    load(other, tmp_path)
    foreign = only_file(tmp_path)
    frames = np.array(load(clip, tmp_path))
    [own] = set((tmp_path / "cache").iterdir()) - {foreign}
    own.write_bytes(foreign.read_bytes())
    assert len(decoded) == 10
    assert np.array_equal(load(clip, tmp_path), frames)
    assert len(decoded) == 15


def test_only_the_owner_can_read_the_cache(clip, tmp_path):
    load(clip, tmp_path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache", only_file(tmp_path))] == [0o700, 0o600]


_DECODE = """
import sys
from pathlib import Path
from cdt_fast.video.data import cache, trees
def half(frame, size, preprocess=cache.preprocess):
    print("decoding", flush=True)
    sys.stdin.readline()
    return preprocess(frame, size)
cache.preprocess = half
cache.load_clip(trees.Clip("walk", Path(sys.argv[1])), 16, sys.argv[2], progress=False)
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
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_notes_are_kept_with_the_frames(tmp_path, write_lying_video, decoded):
    path = write_lying_video(tmp_path / "clip.avi")
    first = cache.load_clip(Clip("clip", path), 16, tmp_path / "cache", progress=False)
    again = cache.load_clip(Clip("clip", path), 16, tmp_path / "cache", progress=False)
    assert len(decoded) == len(first.frames)
    assert first.notes == again.notes
    assert "frames that it states" in first.notes[0]
    assert (again.frame_rate, again.frames.shape) == (Fraction(25), first.frames.shape)


def test_luma_weights():
    colors = {(255, 0, 0): 76, (0, 255, 0): 150, (0, 0, 255): 29, (255, 255, 255): 255, (10, 200, 77): 129}
    for color, level in colors.items():
        frame = np.full((20, 30, 3), color, np.uint8)
        assert (preprocess(frame, 16) == level).all()


def test_gray_passes_unchanged_at_its_own_size():
    frame = np.random.default_rng(0).integers(0, 256, (24, 24), dtype=np.uint8)
    result = preprocess(frame, 24)
    assert result.dtype == np.uint8
    assert np.array_equal(result, frame)


def test_resizing_is_antialiased_and_rounded():
    frame = np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    luma = torch.from_numpy(frame).double() @ torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    exact = torch.nn.functional.interpolate(luma[None, None], (16, 16), mode="bilinear", antialias=True)[0, 0]
    assert (torch.from_numpy(preprocess(frame, 16)) - exact).abs().max() <= 0.5 + 1e-3
    # Without antialiasing a fine checkerboard keeps its full contrast or turns into stripes.
    checkers = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    assert np.ptp(preprocess(checkers, 16)[2:-2, 2:-2]) <= 2


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)])
def test_read_only_frames_are_fine(shape):
    frame = np.zeros(shape, np.uint8)
    frame.setflags(write=False)
    assert preprocess(frame, 4).shape == (4, 4)
