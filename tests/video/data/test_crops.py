from __future__ import annotations

import numpy as np
import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.video.data.crops import cut_crops, from_opponent, preprocess, to_opponent
from cdt_fast.video.data.scenes import demo_clip, moving_leaves
from cdt_fast.video.data.windows import DecodedClip, Part, Windows, load_video
from tests.video.clips import colored


def cropped(frames: np.ndarray, name: str = "clip") -> DecodedClip:
    return DecodedClip(name, np.stack(list(cut_crops(frames, 4, 24, crops=2))))


def test_a_change_of_colors_keeps_white_noise_and_has_an_inverse() -> None:
    planes = torch.randn(3, 5, 4, dtype=torch.float64)
    there = to_opponent(planes)
    assert there.square().sum().item() == pytest.approx(planes.square().sum().item(), rel=1e-12)
    torch.testing.assert_close(from_opponent(there), planes, rtol=0, atol=1e-12)
    assert to_opponent(torch.ones(3, 1))[1:].abs().max() < 1e-6  # gray has no color


def test_full_crops_stand_still_and_the_others_are_means_of_larger_ones_along_a_path() -> None:
    frames = colored(11, 60, 70)
    windows = list(cut_crops(frames, 5, 16, crops=4))
    assert [window.shape for window in windows] == [(4, 3, 5, 16, 16)] * 2  # the eleventh frame fills no window
    moved = []
    for number, window in enumerate(windows):
        for crop, factor in zip(window, (1, 1, 2, 3), strict=True):
            path = np.array([place_of(crop[:, time], frames[5 * number + time], factor) for time in range(5)])
            steps = np.diff(path, axis=0)
            assert ((steps >= 0).all(0) | (steps <= 0).all(0)).all()  # straight on, or stopped at the border
            assert np.abs(steps).max() <= 3 * factor * 5 / 4 + 1
            assert factor > 1 or not steps.any()
            moved.append(steps.any())
    assert sum(moved) >= 2


def place_of(crop: np.ndarray, frame: np.ndarray, factor: int) -> tuple[int, int]:
    """Where in a frame [h, w, 3] a crop [3, side, side] is from, made smaller by `factor`."""
    side = crop.shape[-1]
    cuts = np.lib.stride_tricks.sliding_window_view(frame, (side * factor, side * factor), axis=(0, 1))
    small = cuts.reshape(*cuts.shape[:3], side, factor, side, factor).mean((4, 6))
    [place] = np.argwhere((np.abs(small - crop) <= 0.51).all((2, 3, 4)))
    return tuple(place)


def test_frames_smaller_than_a_crop_are_continued_by_their_mirror_image() -> None:
    frames = colored(4, 5, 9)
    [window] = cut_crops(frames, 4, 8, crops=2)
    left = next(left for left in (0, 1) if np.array_equal(window[0, 0, :, :5], frames[:, :, left : left + 8, 0]))
    assert np.array_equal(window[0, 0, :, 5:8], frames[:, 4:1:-1, left : left + 8, 0])


def test_samples_are_luma_and_colors_and_the_same_seed_gives_the_same_sample() -> None:
    clip = cropped(colored(8, 40, 40))
    train = Windows([clip], [Part(0, 0, 8)], 4, 16, training=True)
    assert len(train) == 2 * 2 * 4
    colors = torch.from_numpy(clip.frames[0, 0].astype(np.float32))[..., :16, :16]
    luma = 0.299 * colors[0] + 0.587 * colors[1] + 0.114 * colors[2]
    found = train.batch(range(4))
    torch.testing.assert_close(found[0], luma, rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1:], to_opponent(colors), rtol=0, atol=1e-4)
    once, again, other = (train.augmented([3], [seed]) for seed in (7, 7, 8))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    held_out = Windows([clip], [Part(0, 4, 8)], 4, 16)
    assert len(held_out) == 1
    assert held_out.name(0) == ("clip, crop 0", 4)


def test_no_frame_is_in_two_parts_and_levels_are_gray_levels(tmp_path) -> None:
    np.save(tmp_path / "0.npy", colored(3, 40, 40))  # too short for a window
    np.save(tmp_path / "1.npy", colored(60, 40, 40))
    data = load_video(tmp_path, window=4, size=16, crops=True, progress=False)
    assert data.sigma == 1 / 255
    starts = [{part.name(index)[1] for index in range(len(part))} for part in (data.train, data.test)]
    assert not starts[0] & starts[1]
    assert data.train.batch([0]).shape == (1, 4, 16, 16)


def test_pieces_that_move_across_are_of_the_same_plane_and_at_a_steady_speed(monkeypatch) -> None:
    """A clip of plain gray whose colors are all zero stays so; a bright one beside a dark one shows in half of all."""
    monkeypatch.setattr("cdt_fast.video.data.crops.GENERATED", 0.0)
    clips = [cropped(np.full((8, 30, 30), level, np.uint8), str(level)) for level in (50, 200)]
    train = Windows(clips, [Part(0, 0, 8), Part(1, 0, 8)], 4, 16, training=True)
    found = torch.stack([train.augmented([0], [seed])[0] for seed in range(200)])
    bright_share = ((found - 200).abs() < 1).flatten(1).any(1).double().mean().item()
    assert 0.15 < bright_share < 0.35  # half of all get a piece, and half of the samples are bright
    assert (((found - 50).abs() < 1) | ((found - 200).abs() < 1)).all()
    assert torch.stack([train.augmented([2], [seed])[0] for seed in range(20)]).abs().max() < 1e-4


def test_generated_crops_are_half_and_depend_on_the_seed_alone(monkeypatch) -> None:
    train = Windows([cropped(np.full((8, 30, 30), 50, np.uint8))], [Part(0, 0, 8)], 4, 16, training=True)
    drawn = torch.stack([train.augmented([0], [seed])[0] for seed in range(200)])
    assert 0.4 < (drawn.flatten(1).std(1) > 1).double().mean().item() < 0.6
    measured = train.batch([0])
    monkeypatch.setattr("cdt_fast.video.data.crops.GENERATED", 1.0)
    first, again, other = (train.augmented([index], [seed])[0] for index, seed in ((0, 5), (8, 5), (0, 6)))
    assert torch.equal(first, again)  # whatever sample it stands for
    assert not torch.allclose(first, other)
    assert torch.equal(train.batch([0]), measured)  # what is measured is never generated


def test_leaves_move_and_are_gray_levels() -> None:
    seen = [moving_leaves(6, 24, np.random.default_rng(seed)) for seed in range(12)]
    for frames in seen:
        assert (frames.shape, frames.dtype) == ((6, 24, 24), torch.float32)
        assert 0 <= frames.min() <= frames.max() <= 255
        assert frames.std() > 1
    assert torch.equal(seen[3], moving_leaves(6, 24, np.random.default_rng(3)))
    assert sum(bool((frames[0] - frames[-1]).abs().max() < 1e-3) for frames in seen) < 6


def test_the_demo_clip_is_a_still_scene_in_which_pieces_move() -> None:
    clip = demo_clip(frames=40, size=80)
    assert (clip.shape, clip.dtype) == ((40, 80, 80), np.uint8)
    assert np.array_equal(demo_clip(frames=7, size=80), clip[:7])
    assert not np.array_equal(demo_clip(frames=1, size=80, seed=1), clip[:1])
    changed = (clip[1:] != clip[:-1]).mean((1, 2))
    assert 0.02 < changed.min() < changed.max() < 0.4
    assert demo_clip(frames=1, size=8).shape == (1, 8, 8)
    with pytest.raises(InputError, match="frames is 0"):
        demo_clip(frames=0)


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
