from __future__ import annotations

import numpy as np
import pytest
import torch

from cdt_fast.video.data.preprocess import preprocess


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
