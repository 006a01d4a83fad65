"""The one way from decoded frames to what a model sees.

Every published number rests on these pixels, so the path is pinned: a decoder's own gray conversion differs from it
by up to four levels. Raise `PREPROCESS_VERSION` with any change that can move a pixel; caches made before are then
rebuilt.
"""

from __future__ import annotations

import numpy as np
import torch

PREPROCESS_VERSION = 2

_RED, _GREEN, _BLUE = np.float32(0.299), np.float32(0.587), np.float32(0.114)


def preprocess(frame: np.ndarray, size: int) -> np.ndarray:
    """Luma of one frame, resized to a square.

    Args:
        frame: uint8 [h, w, 3] RGB, or [h, w] gray, in 0..255.
        size: height and width of the result in pixels; the aspect ratio is not kept.

    Returns:
        uint8 [size, size], 0..255.
    """
    pixels = frame.astype(np.float32)
    if pixels.ndim == 3:
        # Three products and two sums, not a matrix product: that may fuse or reorder them, machine by machine.
        pixels = _RED * pixels[..., 0] + _GREEN * pixels[..., 1] + _BLUE * pixels[..., 2]
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(pixels)[None, None], size=(size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return resized[0, 0].round_().clamp_(0, 255).to(torch.uint8).numpy()
