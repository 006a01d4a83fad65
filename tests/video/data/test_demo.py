from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest

from cdt_fast.checks import InputError
from cdt_fast.video.data.demo import demo_clip


@pytest.fixture(scope="module")
def clip() -> np.ndarray:
    return demo_clip()


def test_it_is_the_same_on_every_machine(clip):
    assert (
        hashlib.sha256(clip.tobytes()).hexdigest() == "7009bb35bc9dcaa0d4580e381340d5e4f235cdeb35f48568ad3a340719f38669"
    )


def test_fewer_frames_are_the_beginning_and_a_seed_changes_the_scene(clip):
    assert np.array_equal(demo_clip(frames=7), clip[:7])
    assert np.abs(demo_clip(frames=1, seed=1)[0].astype(int) - clip[0]).mean() > 1


def test_another_size_is_the_same_scene(clip):
    small = demo_clip(frames=1, size=80)[0].astype(int)
    blocks = clip[0].reshape(80, 2, 80, 2).mean(axis=(1, 3))
    assert np.abs(small - blocks).mean() < 6
    assert demo_clip(frames=1, size=1).shape == (1, 1, 1)


def test_it_is_quick():
    start = time.process_time()
    demo_clip()
    assert time.process_time() - start < 6


def test_nothing_to_draw_is_refused():
    with pytest.raises(InputError, match="frames is 0"):
        demo_clip(frames=0)
