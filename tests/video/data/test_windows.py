from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cdt_fast.checks import InputError
from cdt_fast.video.data.clips import Clip, open_source
from cdt_fast.video.data.crops import preprocess
from cdt_fast.video.data.scenes import demo_clip
from cdt_fast.video.data.windows import DecodedClip, load_clip, load_video, split_clips
from tests.video.clips import encode, moving, refused


def lengths(*frames: int, split: Any = None) -> list[DecodedClip]:
    return [DecodedClip(f"clip{index}", np.empty((number, 1, 1)), split) for index, number in enumerate(frames)]


def marked(train: list[int], test: list[int]) -> list[DecodedClip]:
    return lengths(*train, split="train") + lengths(*test, split="test")


@settings(max_examples=300, deadline=None)
@given(
    clips=st.lists(st.tuples(st.integers(2, 400), st.sampled_from([None, "train", "test"])), min_size=1, max_size=25),
    window=st.integers(1, 60),
)
def test_splits_never_share_frames(clips, window):
    described = [clip for number, split in clips for clip in lengths(number, split=split)]
    try:
        splits = split_clips(described, window)
    except InputError:
        assume(False)
        return
    for parts in (splits.train, splits.validation, splits.test):
        assert parts
        assert all(part.stop - part.start >= window for part in parts)
        assert all(0 <= part.start < part.stop <= described[part.clip].length for part in parts)
    assert all(described[part.clip].split != "test" for part in splits.train + splits.validation)
    if "test" in {split for _, split in clips}:
        assert all(described[part.clip].split == "test" for part in splits.test)
    ordered = sorted(splits.train + splits.validation + splits.test)
    for first, second in itertools.pairwise(ordered):
        if first.clip == second.clip:
            assert splits.method == "time"
            assert second.start - first.stop == window
    short = {index for index, clip in enumerate(described) if clip.length < window}
    assert {part.clip for part in ordered} == set(range(len(described))) - short
    assert len(splits.notes) == len(short)


@pytest.mark.parametrize(
    ("clips", "window", "expected"),
    [
        (lengths(1394), 20, ([(0, 0, 1100)], [(0, 1120, 1240)], [(0, 1260, 1380)])),
        (lengths(50, 100), 10, ([(0, 0, 10), (1, 0, 60)], [(0, 20, 30), (1, 70, 80)], [(0, 40, 50), (1, 90, 100)])),
        (lengths(*[9] * 25), 9, ([(n, 0, 9) for n in range(21)], [(21, 0, 9), (22, 0, 9)], [(23, 0, 9), (24, 0, 9)])),
        (marked([30] * 3, [40, 50]), 10, ([(0, 0, 30), (1, 0, 30)], [(2, 0, 30)], [(3, 0, 40), (4, 0, 50)])),
        (marked([75], [33]), 10, ([(0, 0, 50)], [(0, 60, 70)], [(1, 0, 33)])),
        (
            lengths(*[200] * 3),
            10,
            ([(n, 0, 140) for n in range(3)], [(n, 150, 170) for n in range(3)], [(n, 180, 200) for n in range(3)]),
        ),
        (marked([100] * 4, [30]), 10, ([(n, 0, 80) for n in range(4)], [(n, 90, 100) for n in range(4)], [(4, 0, 30)])),
        (lengths(*[30] * 3, split="train"), 10, ([(0, 0, 30)], [(1, 0, 30)], [(2, 0, 30)])),
    ],
)
def test_clips_are_divided_by_clip_or_by_time(clips, window, expected):
    splits = split_clips(clips, window)
    assert (splits.train, splits.validation, splits.test) == expected
    assert splits.method == ("clip" if all(start == 0 for _, start, _ in splits.validation) else "time")


@pytest.mark.parametrize(
    ("clips", "window", "facts"),
    [
        (lengths(49), 10, ["clip0", "49 frames", "5 windows of 10, 50 frames", "at most 9"]),
        (lengths(15, 18), 20, ["clip1", "longest training clip has 18 frames", "window of 20"]),
        (marked([25], [90]), 10, ["clip0", "25 frames", "3 windows of 10, 30 frames", "at most 8"]),
        (marked([90, 90], [7]), 10, ["clip0", "test clip", "7 frames"]),
        (lengths(90, split="test"), 10, ["the longest training clip has 0 frames"]),
    ],
)
def test_too_few_frames_are_refused(clips, window, facts):
    with pytest.raises(InputError) as caught:
        split_clips(clips, window)
    for fact in facts:
        assert fact in str(caught.value)


def save_clips(folder: Path, *frames: int, size: int = 16) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    clips = [generator.integers(0, 256, (number, size, size), dtype=np.uint8) for number in frames]
    for index, clip in enumerate(clips):
        np.save(folder / f"{index}.npy", clip)
    return clips


def test_windows_hold_the_frames_they_name(tmp_path):
    clips = save_clips(tmp_path / "set", 23, 17, 31, 12)
    data = load_video(tmp_path / "set", window=5, size=16)
    by_name = {f"{number}.npy": clip for number, clip in enumerate(clips)}
    names = []
    for windows in (data.train, data.validation, data.test):
        for index in range(len(windows)):
            clip, first = windows.name(index)
            names.append((clip, first))
            batch = windows.batch([index])
            assert (batch.dtype, tuple(batch.shape)) == (torch.uint8, (1, 5, 16, 16))
            assert np.array_equal(batch[0], by_name[clip][first : first + 5])
    expected = [(f"{clip}.npy", first) for clip, count in enumerate((4, 3, 6, 2)) for first in range(0, 5 * count, 5)]
    assert names == expected
    batch = data.train.batch(torch.tensor([3, 0, 3]))
    assert torch.equal(batch, torch.cat([data.train.batch([3]), data.train.batch([0]), data.train.batch([3])]))
    batch.zero_()
    assert data.train.batch([3]).any()
    assert torch.equal(data.train.augmented([3], [9]), data.train.batch([3]))  # whole frames are trained on as they are
    with pytest.raises(IndexError):
        data.train.batch([len(data.train)])
    for limit, left in ((None, range(2)), (9, range(2)), (1, [0])):
        test = data.limited(limit).test
        assert [test.name(index) for index in range(len(test))] == [data.test.name(index) for index in left]
    assert len(data.test) == 2
    alike = load_video(tmp_path / "set", window=1, size=16)
    for limit, left in ((5, [0, 2, 4, 7, 9]), (8, [0, 1, 3, 4, 6, 7, 9, 10])):  # spread, also where most are left
        test = alike.limited(limit).test
        assert [test.name(index) for index in range(len(test))] == [("3.npy", first) for first in left]


def test_sigma_is_of_the_training_frames_alone(tmp_path):
    clips = save_clips(tmp_path / "set", 70, 10, 10)
    data = load_video(tmp_path / "set", window=5, size=16)
    assert data.sigma == pytest.approx((clips[0] / 255.0).std(), rel=1e-12)
    [clip] = save_clips(tmp_path / "one", 100)
    single = load_video(tmp_path / "one" / "0.npy", window=10, size=16)
    assert single.sigma == pytest.approx((clip[:60] / 255.0).std(), rel=1e-12)


def test_flat_training_frames_are_refused(tmp_path):
    np.save(tmp_path / "flat.npy", np.full((50, 16, 16), 7, np.uint8))
    refused(Path("flat.npy"), "flat gray", "level 7", by=lambda: load_video(tmp_path / "flat.npy", window=5, size=16))


def test_a_marked_tree(tmp_path):
    save_clips(tmp_path / "set" / "training", 20, 20)
    save_clips(tmp_path / "set" / "testing", 20)
    data = load_video(tmp_path / "set", window=5, size=16)
    names = [part.name(0) for part in (data.train, data.validation, data.test)]
    assert names == [("training/0.npy", 0), ("training/1.npy", 0), ("testing/0.npy", 0)]


def test_a_short_clip_is_told_its_own_frames_where_crops_leave_a_rest(tmp_path):
    save_clips(tmp_path, 60)
    told = "has 60 frames, and dividing it by time needs 5 windows of 16, 80 frames; choose a window of at most 12"
    refused(Path("0.npy"), told, by=lambda: load_video(tmp_path / "0.npy", window=16, size=16, crops=True))


def test_the_word_demo_is_the_generated_clip(tmp_path, monkeypatch):
    data = load_video("demo", size=32)
    assert data.train.name(0) == ("demo", 0)
    assert (len(data.train), len(data.validation), len(data.test)) == (8, 1, 1)
    assert np.array_equal(data.train.batch([0])[0], demo_clip(frames=20, size=32))
    monkeypatch.chdir(tmp_path)
    refused(Path("demo"), "no such file", by=lambda: load_video("./demo"))


def test_describe_counts_the_notes_of_many_clips_and_spells_out_control_characters(tmp_path):
    save_clips(tmp_path / "set", *[20] * 3, *[3] * 15)
    (tmp_path / "set" / "3.npy").rename(tmp_path / "set" / "\x1b[2J.npy")
    text = load_video(tmp_path / "set", window=5, size=16).description
    assert "18 clips, split by clip; frames 16x16\n" in text
    assert "windows of 5 frames: 4 training, 4 validation, 4 test" in text
    assert "left out, its 3 frames are less than a window of 5" in text
    assert text.count("left out") == 10
    assert text.endswith("\nand 5 more notes")
    assert "\x1b" not in text


def test_a_clip_is_read_as_it_is_decoded_with_its_notes(tmp_path):
    times = [Fraction(number, 25) for number in (*range(6), *range(9, 15))]
    path = encode(tmp_path / "clip.mkv", moving(12), "libx264", times=times, options={"bf": "0"})
    clip = load_clip(Clip("clip", path), 16, progress=False)
    assert np.array_equal(clip.frames, [preprocess(frame, 16) for frame in open_source(path).frames()])
    assert not clip.frames.flags.writeable
    assert "3 frames are missing" in clip.notes[0]
    assert len(load_clip(Clip("clip", path), 16, False, crops_of=13).frames) == 0  # shorter than a window of crops
