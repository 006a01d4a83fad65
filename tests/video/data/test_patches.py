from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdt_fast.checks import InputError
from cdt_fast.video.data.patches import from_patches, to_patches

MODES = ["time", "space"]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 4),
    patch=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.bfloat16]),
)
def test_the_inverse_is_exact(sizes, patch, mode, dtype):
    batch, time, rows, columns = sizes
    frames = torch.arange(batch * time * rows * columns * patch**2).reshape(batch, time, rows * patch, columns * patch)
    frames = (frames % 251).to(dtype)
    tokens = to_patches(frames, patch, mode)
    assert tokens.shape[-1] == patch**2
    assert torch.equal(from_patches(tokens, tuple(frames.shape), patch, mode), frames)


def test_where_each_patch_goes():
    batch, time, rows, columns, patch = 2, 3, 2, 4, 5
    frames = torch.rand(batch, time, rows * patch, columns * patch)
    positions = rows * columns
    over_time = to_patches(frames, patch)
    over_space = to_patches(frames, patch, "space")
    assert over_time.shape == (batch * positions, time, patch**2)
    assert over_space.shape == (batch * time, positions, patch**2)
    for b, t, row, column in [(0, 0, 0, 0), (1, 2, 1, 3), (0, 1, 1, 0), (1, 0, 0, 2)]:
        place = frames[b, t, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch].reshape(-1)
        position = row * columns + column
        assert torch.equal(over_time[b * positions + position, t], place)
        assert torch.equal(over_space[b * time + t, position], place)


@pytest.mark.parametrize("mode", MODES)
def test_any_strides_and_gradients(mode):
    frames = torch.rand(6, 4, 2, 3, dtype=torch.float64, requires_grad=True).permute(3, 2, 0, 1)
    assert torch.equal(to_patches(frames, 2, mode), to_patches(frames.contiguous(), 2, mode))
    assert torch.autograd.gradcheck(lambda x: to_patches(x, 2, mode), (frames,))


@pytest.mark.parametrize(
    ("shape", "patch", "mode", "fact"),
    [
        ((1, 2, 30, 32), 16, "time", r"\[1, 2, 30, 32\] cannot be cut"),
        ((2, 32, 32), 16, "time", "batch, time, height, width"),
        ((1, 2, 32, 32), 0, "time", "0x0 pixels"),
        ((1, 2, 32, 32), 16, "frames", "one of time, space"),
    ],
)
def test_what_does_not_fit_is_refused(shape, patch, mode, fact):
    with pytest.raises(InputError, match=fact):
        to_patches(torch.zeros(shape), patch, mode)


def test_tokens_of_another_shape_are_refused():
    with pytest.raises(InputError, match=r"\[4, 2, 256\].*\[8, 1, 256\]|tokens have shape"):
        from_patches(torch.zeros(8, 1, 256), (1, 2, 32, 32))
