"""Frames to sequences of patches and back. Views and permutations only: any device, any dtype, differentiable."""

import operator
from typing import Literal, get_args

from torch import Tensor

from cdt_fast.checks import InputError

Sequence = Literal["time", "space"]
_IN_ORDER = {"time": (0, 3, 5, 1, 2, 4, 6), "space": (0, 1, 3, 5, 2, 4, 6)}  # of the axes that `_layout` cuts


def to_patches(frames: Tensor, patch: int = 16, sequence: Sequence = "time", patch_frames: int = 1) -> Tensor:
    """Cut frames [b, T, h, w] into square patches of one or several frames, lined up as sequences of tokens.

    With D = `patch_frames`, t = T / D times, P = (h / patch)(w / patch) positions, row by row, and n = D patch² pixels
    a token, frame by frame and row by row:

    - "time": [b·P, t, n], each position is one sequence over time;
    - "space": [b·t, P, n], each D frames are one sequence over their positions.

    InputError: T is no multiple of `patch_frames`, or h or w of `patch`.
    """
    cut, tokens = _layout(tuple(frames.shape), patch, sequence, patch_frames)
    return frames.reshape(cut).permute(_IN_ORDER[sequence]).reshape(tokens)


def from_patches(
    tokens: Tensor, shape: tuple[int, ...], patch: int = 16, sequence: Sequence = "time", patch_frames: int = 1
) -> Tensor:
    """Return the frames `shape`, (b, T, h, w) with b perhaps -1, that `to_patches` cut; the exact inverse. InputError:
    the tokens are not those of such frames."""
    cut, expected = _layout(shape, patch, sequence, patch_frames)
    if tuple(tokens.shape[1:]) != expected[1:]:
        how = f"frames {list(shape)} in patches of {patch} as {sequence!r} sequences give {list(expected)}"
        raise InputError(f"tokens have shape {list(tokens.shape)}; {how}")
    order = _IN_ORDER[sequence]
    moved = tokens.reshape([cut[axis] for axis in order])
    return moved.permute([order.index(axis) for axis in range(len(cut))]).reshape(shape)


def _layout(shape: tuple[int, ...], patch: int, sequence: str, patch_frames: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape of frames cut along every axis, and that of their tokens."""
    sizes = (patch_frames, patch, patch)
    fits = len(shape) == 4 and min(sizes) > 0 and not any(map(operator.mod, shape[1:], sizes))
    if not fits or sequence not in get_args(Sequence):
        raise InputError(
            f"frames {list(shape)} cannot be cut into patches of {patch_frames} frames and {patch}x{patch} pixels over "
            f"{sequence!r}: expected [batch, time, height, width], multiples of them, and one of time, space"
        )
    times, rows, columns = (length // size for length, size in zip(shape[1:], sizes, strict=True))
    cut = (shape[0], times, patch_frames, rows, patch, columns, patch)
    return cut, (-1, times if sequence == "time" else rows * columns, patch_frames * patch**2)
