"""Frames to sequences of patches and back. Views and permutations only: any device, any dtype, differentiable."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from cdt_fast.errors import InputError

Sequence = Literal["time", "space", "spacetime"]


def to_patches(
    frames: torch.Tensor, patch: int = 16, sequence: Sequence = "time", patch_frames: int = 1
) -> torch.Tensor:
    """Cut frames into square patches of one or several frames and line them up as sequences of tokens.

    With D = `patch_frames`, t = T / D times, P = (h / patch)(w / patch) positions, row by row, and n = D patch² pixels
    a token, frame by frame and row by row:

    - "time": [b·P, t, n], each position is one sequence over time;
    - "space": [b·t, P, n], each D frames are one sequence over their positions;
    - "spacetime": [b, t·P, n], each window is one sequence, time after time.

    Args:
        frames: [b, T, h, w], T a multiple of `patch_frames`, h and w multiples of `patch`.
        patch: height and width of a patch in pixels.
        sequence: what a sequence runs over.
        patch_frames: frames of a patch.

    Raises:
        InputError: the shape, `patch`, `patch_frames` or `sequence` does not fit.
    """
    cut, order, tokens = _layout(tuple(frames.shape), patch, sequence, patch_frames)
    return frames.reshape(cut).permute(order).reshape(tokens)


def from_patches(
    tokens: torch.Tensor,
    shape: tuple[int, ...],
    patch: int = 16,
    sequence: Sequence = "time",
    patch_frames: int = 1,
) -> torch.Tensor:
    """The frames that `to_patches` cut; the exact inverse.

    Args:
        tokens: the result of `to_patches`.
        shape: (b, T, h, w) of the frames.
        patch, sequence, patch_frames: as given to `to_patches`.

    Returns:
        [b, T, h, w].

    Raises:
        InputError: the tokens do not have the shape that such frames give.
    """
    cut, order, expected = _layout(tuple(shape), patch, sequence, patch_frames)
    if tuple(tokens.shape) != expected:
        raise InputError(
            f"tokens have shape {list(tokens.shape)}; frames {list(shape)} in patches of {patch} as {sequence!r} "
            f"sequences give {list(expected)}"
        )
    moved = tokens.reshape([cut[axis] for axis in order])
    return moved.permute([order.index(axis) for axis in range(len(cut))]).reshape(tuple(shape))


def _layout(
    shape: tuple[int, ...], patch: int, sequence: str, patch_frames: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Frames cut along every axis, how these axes are put in order, and the shape of the tokens then."""
    if sequence not in get_args(Sequence):
        raise InputError(f"sequence is {sequence!r}; expected one of {', '.join(get_args(Sequence))}")
    if patch < 1:
        raise InputError(f"patch is {patch}; expected a positive number of pixels")
    if patch_frames < 1:
        raise InputError(f"patch_frames is {patch_frames}; expected a positive number of frames")
    if len(shape) != 4:
        raise InputError(f"frames have shape {list(shape)}; expected [batch, time, height, width]")
    batch, time, height, width = shape
    if time % patch_frames:
        raise InputError(f"there are {time} frames; expected a multiple of patch_frames, {patch_frames}")
    if height % patch or width % patch:
        raise InputError(f"frames are {width}x{height} pixels; both must be multiples of the patch, {patch}")
    times, rows, columns = time // patch_frames, height // patch, width // patch
    positions, pixels = rows * columns, patch_frames * patch**2
    cut = (batch, times, patch_frames, rows, patch, columns, patch)
    if sequence == "time":
        return cut, (0, 3, 5, 1, 2, 4, 6), (batch * positions, times, pixels)
    sequences = (batch * times, positions) if sequence == "space" else (batch, times * positions)
    return cut, (0, 1, 3, 5, 2, 4, 6), (*sequences, pixels)
