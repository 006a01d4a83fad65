"""Frames as the tokens that the settings describe, and back: on one grid of patches, or the mean over shifted ones."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.video.baselines import padded
from cdt_fast.video.data import from_patches, to_patches
from cdt_fast.video.networks import Denoiser, is_adaptive
from cdt_fast.video.noise import known_deviation
from cdt_fast.video.settings import VideoSettings


def tokens_of(frames: Tensor, settings: VideoSettings) -> Tensor:
    """Frames `[b, T, h, w]` as the tokens that the settings describe."""
    data = settings.data
    return to_patches(frames, data.patch, data.sequence, data.patch_frames)


def frames_of(tokens: Tensor, frames: Tensor, settings: VideoSettings) -> Tensor:
    """The tokens of frames of the shape of `frames` as such."""
    data, shape = settings.data, tuple(frames.shape)
    return from_patches(tokens, shape, data.patch, data.sequence, data.patch_frames)


def reconstructed(
    model: Denoiser, settings: VideoSettings, noisy: Tensor, deviation: Tensor, grids: int | None
) -> list[Tensor]:
    """The frames `[b, T, h, w]` of every depth, each the mean over shifted grids of patches.

    Args:
        model, settings: the model and the settings of its run.
        noisy: `[b, T, h, w]`; at the borders they are continued by their mirror image.
        deviation: standard deviation of the noise, `[b]`.
        grids: how many of them along each side; None: as `VideoSettings.grid_places` says.
    """
    height, width = noisy.shape[-2:]
    places = settings.grid_places(grids)
    totals = [torch.zeros_like(noisy) for _ in range(model.layers + 1)]
    for top, left in places:
        moved = padded(noisy, top, left, settings.data.patch)
        tokens = tokens_of(moved, settings)
        known = known_deviation(is_adaptive(model), deviation, len(tokens))
        for level, depth in enumerate(model.reconstructions(tokens, **known)):
            part = frames_of(depth, moved, settings)[..., top : top + height, left : left + width]
            totals[level] = totals[level] + part
    return [total / len(places) for total in totals]
