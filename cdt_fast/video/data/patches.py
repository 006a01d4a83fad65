"""Frames to sequences of patches and back. Views and permutations only: any device, any dtype, differentiable."""

from __future__ import annotations

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

    Raises:
        InputError: T is no multiple of `patch_frames`, or h or w of `patch`.
    """
    cut, tokens = _layout(tuple(frames.shape), patch, sequence, patch_frames)
    return frames.reshape(cut).permute(_IN_ORDER[sequence]).reshape(tokens)


def from_patches(
    tokens: Tensor, shape: tuple[int, ...], patch: int = 16, sequence: Sequence = "time", patch_frames: int = 1
) -> Tensor:
    """Return the frames `shape`, (b, T, h, w) with b perhaps -1, that `to_patches` cut; the exact inverse.

    Raises:
        InputError: the tokens are not those of such frames.
    """
    cut, expected = _layout(shape, patch, sequence, patch_frames)
    if tuple(tokens.shape[1:]) != expected[1:]:
        raise InputError(
            f"tokens have shape {list(tokens.shape)}; frames {list(shape)} in patches of {patch} as {sequence!r} "
            f"sequences give {list(expected)}"
        )
    order = _IN_ORDER[sequence]
    moved = tokens.reshape([cut[axis] for axis in order])
    return moved.permute([order.index(axis) for axis in range(len(cut))]).reshape(shape)


def _layout(shape: tuple[int, ...], patch: int, sequence: str, patch_frames: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape of frames cut along every axis, and that of their tokens."""
    if len(shape) != 4 or sequence not in get_args(Sequence) or min(patch, patch_frames) < 1:
        raise InputError(
            f"frames have shape {list(shape)}, patch is {patch}, patch_frames {patch_frames}, sequence {sequence!r}; "
            f"expected [batch, time, height, width], positive sizes and one of {', '.join(get_args(Sequence))}"
        )
    batch, time, height, width = shape
    if time % patch_frames or height % patch or width % patch:
        raise InputError(
            f"{time} frames of {width}x{height} pixels cannot be cut into patches of {patch_frames} frames and "
            f"{patch}x{patch} pixels: expected multiples of them"
        )
    times, rows, columns = time // patch_frames, height // patch, width // patch
    cut = (batch, times, patch_frames, rows, patch, columns, patch)
    return cut, (-1, times if sequence == "time" else rows * columns, patch_frames * patch**2)
