"""Frames as the tokens that the settings describe, and back: on one grid of patches, or the mean over shifted ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cdt_fast.models import DUST
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


def refines_mean(model: Denoiser, settings: VideoSettings) -> bool:
    """Whether each layer starts from the mean over grids: in a network that was trained on overlapping ones."""
    return isinstance(model, DUST) and settings.overlapping


def reconstructed(
    model: Denoiser,
    settings: VideoSettings,
    noisy: Tensor,
    deviation: Tensor | None,
    grids: int | None,
    depth: int | None = None,
) -> list[Tensor]:
    """The frames `[b, T, h, w]` of every depth up to `depth`, each the mean over shifted grids of patches.

    Where `refines_mean`, this mean is what the next layer starts from, and depth 0 is the input; else every grid goes
    through the network alone.

    Args:
        model, settings: the model and the settings of its run.
        noisy: `[b, T, h, w]`; at the borders they are continued by their mirror image.
        deviation: standard deviation of the noise, `[b]`, for a noise-adaptive model.
        grids: how many of them along each side; None: as `VideoSettings.grid_places` says.
        depth: number of layers, None for all.
    """
    stop = 1 + (model.layers if depth is None else depth)

    def known(tokens: Tensor) -> dict[str, Tensor]:
        return known_deviation(is_adaptive(model), deviation, len(tokens))

    if not refines_mean(model, settings):
        return mean_over_grids(lambda tokens: model.reconstructions(tokens, **known(tokens)), settings, grids, noisy)[
            :stop
        ]
    assert isinstance(model, DUST)
    results = [noisy]
    for level in range(1, stop):
        refine = partial(model.refine, level)
        results += mean_over_grids(
            lambda tokens, estimate, refine=refine: [refine(tokens, estimate, **known(tokens))],
            settings,
            grids,
            noisy,
            results[-1],
        )
    return results


def mean_over_grids(
    denoise: Callable[..., list[Tensor]], settings: VideoSettings, grids: int | None, *frames: Tensor
) -> list[Tensor]:
    """What `denoise` gives for the tokens of each of `frames` `[b, T, h, w]`, as the mean over shifted grids."""
    (height, width), places, totals = frames[0].shape[-2:], settings.grid_places(grids), []
    for top, left in places:
        moved = [padded(each, top, left, settings.data.patch) for each in frames]
        for number, tokens in enumerate(denoise(*(tokens_of(each, settings) for each in moved))):
            part = frames_of(tokens, moved[0], settings)[..., top : top + height, left : left + width]
            if number == len(totals):
                totals.append(torch.zeros_like(part))
            totals[number] = totals[number] + part
    return [total / len(places) for total in totals]
