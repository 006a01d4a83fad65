"""Frames to sequences of patches and back. Views and permutations only: any device, any dtype, differentiable."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from cdt_fast.errors import InputError

Sequence = Literal["time", "space", "spacetime"]


def to_patches(frames: torch.Tensor, patch: int = 16, sequence: Sequence = "time") -> torch.Tensor:
    """Cut frames into square patches and line them up as sequences of tokens.

    With P = (h / patch)(w / patch) positions, row by row, and n = patch² pixels a token, row by row:

    - "time": [b·P, T, n], each position is one sequence over time;
    - "space": [b·T, P, n], each frame is one sequence over its positions;
    - "spacetime": [b, T·P, n], each window is one sequence, frame after frame.

    Args:
        frames: [b, T, h, w], h and w multiples of `patch`.
        patch: height and width of a patch in pixels.
        sequence: what a sequence runs over.

    Raises:
        InputError: the shape, `patch` or `sequence` does not fit.
    """
    batch, time, rows, columns = _grid(tuple(frames.shape), patch, sequence)
    cut = frames.reshape(batch, time, rows, patch, columns, patch)
    if sequence == "time":
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch * rows * columns, time, patch * patch)
    cut = cut.permute(0, 1, 2, 4, 3, 5)
    if sequence == "space":
        return cut.reshape(batch * time, rows * columns, patch * patch)
    return cut.reshape(batch, time * rows * columns, patch * patch)


def from_patches(
    tokens: torch.Tensor, shape: tuple[int, ...], patch: int = 16, sequence: Sequence = "time"
) -> torch.Tensor:
    """The frames that `to_patches` cut; the exact inverse.

    Args:
        tokens: the result of `to_patches`.
        shape: (b, T, h, w) of the frames.
        patch, sequence: as given to `to_patches`.

    Returns:
        [b, T, h, w].

    Raises:
        InputError: the tokens do not have the shape that such frames give.
    """
    batch, time, rows, columns = _grid(tuple(shape), patch, sequence)
    expected = {
        "time": (batch * rows * columns, time, patch * patch),
        "space": (batch * time, rows * columns, patch * patch),
        "spacetime": (batch, time * rows * columns, patch * patch),
    }[sequence]
    if tuple(tokens.shape) != expected:
        raise InputError(
            f"tokens have shape {list(tokens.shape)}; frames {list(shape)} in patches of {patch} as {sequence!r} "
            f"sequences give {list(expected)}"
        )
    if sequence == "time":
        cut = tokens.reshape(batch, rows, columns, time, patch, patch).permute(0, 3, 1, 4, 2, 5)
    else:
        cut = tokens.reshape(batch, time, rows, columns, patch, patch).permute(0, 1, 2, 4, 3, 5)
    return cut.reshape(tuple(shape))


def _grid(shape: tuple[int, ...], patch: int, sequence: str) -> tuple[int, int, int, int]:
    if sequence not in get_args(Sequence):
        raise InputError(f"sequence is {sequence!r}; expected one of {', '.join(get_args(Sequence))}")
    if patch < 1:
        raise InputError(f"patch is {patch}; expected a positive number of pixels")
    if len(shape) != 4:
        raise InputError(f"frames have shape {list(shape)}; expected [batch, time, height, width]")
    batch, time, height, width = shape
    if height % patch or width % patch:
        raise InputError(f"frames are {width}x{height} pixels; both must be multiples of the patch, {patch}")
    return batch, time, height // patch, width // patch
