"""Frames as the tokens that the settings describe, and back: on one grid of patches, or the mean over shifted ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from cdt_fast.models import DUST
from cdt_fast.video.baselines import continued
from cdt_fast.video.data import from_patches, to_patches
from cdt_fast.video.exits import Exits, change
from cdt_fast.video.networks import Denoiser, is_adaptive
from cdt_fast.video.noise import known_deviation
from cdt_fast.video.settings import VideoSettings

# What is in a processor's caches together: more at once is slower there, and less leaves much of a GPU without work.
_PIXELS_AT_ONCE = 2**20


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
    exits: Exits | None = None,
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
        exits: where a single window is left before that; of a model that `refines_mean`.
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
        threshold = None if exits is None else exits.threshold(level)
        if threshold is None or deviation is None:
            continue  # where nothing is left early the host does not wait
        if change(level, results[-2], results[-1], deviation).item() > threshold:
            break
    return results


def mean_over_grids(
    denoise: Callable[..., list[Tensor]], settings: VideoSettings, grids: int | None, *frames: Tensor
) -> list[Tensor]:
    """What `denoise` gives for the tokens of each of `frames` `[b, T, h, w]`, as the mean over shifted grids.

    Of small frames all grids go through it at once, as so many more windows.
    """
    patch, places, totals = settings.data.patch, settings.grid_places(grids), []
    (height, width), furthest = frames[0].shape[-2:], tuple(map(max, zip(*places, strict=True)))
    rows, columns = _filled((height, width), furthest, patch)
    whole = [continued(each, (furthest[1], columns - width, furthest[0], rows - height)) for each in frames]
    # A sequence over places would see what grids of one size hold beyond the frame's border.
    together = max(1, _PIXELS_AT_ONCE // frames[0].numel()) if settings.data.sequence == "time" else 1
    for first in range(0, len(places), together):
        some = places[first : first + together]
        size = _filled((height, width), tuple(map(max, zip(*some, strict=True))), patch)
        corners = [(furthest[0] - top, furthest[1] - left) for top, left in some]
        cut = [_windows(each, corners, size) for each in whole]
        for number, tokens in enumerate(denoise(*(tokens_of(each.flatten(0, 1), settings) for each in cut))):
            shifted = frames_of(tokens, cut[0].flatten(0, 1), settings).view_as(cut[0]).unbind(1)
            for (top, left), part in zip(some, shifted, strict=True):
                part = part[..., top : top + height, left : left + width]
                if number == len(totals):
                    totals.append(part)
                else:
                    totals[number] = totals[number] + part
    return [total / len(places) for total in totals]


def _filled(shape: Sequence[int], moved: Sequence[int], patch: int) -> tuple[int, int]:
    """The least size that holds frames which are moved by so much, and that patches fill."""
    height, width = (-(-(side + by) // patch) * patch for side, by in zip(shape, moved, strict=True))
    return height, width


def _windows(frames: Tensor, corners: Sequence[tuple[int, int]], size: tuple[int, int]) -> Tensor:
    """Parts `[b, g, T, *size]` of frames `[b, T, h, w]`, by the first row and column of each."""
    parts = [frames[..., row : row + size[0], column : column + size[1]] for row, column in corners]
    return parts[0].unsqueeze(1) if len(parts) == 1 else torch.stack(parts, 1)
