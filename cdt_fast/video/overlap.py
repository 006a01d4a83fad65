"""Frames as the tokens that the settings describe, and back: on one grid of patches, or the mean over shifted ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdt_fast.models import DUST
from cdt_fast.video.baselines import continued
from cdt_fast.video.data import from_patches, to_patches
from cdt_fast.video.networks import Denoiser, known_deviation
from cdt_fast.video.settings import VideoSettings

# Rows and columns.
Corners = list[tuple[int, int]]

# What is in a processor's caches together: more at once is slower there, and less leaves much of a GPU without work.
_PIXELS_AT_ONCE = 2**20


def training_input(frames: Tensor, settings: VideoSettings) -> Tensor:
    """What losses are of: frames `[b, T, h, w]` as they are where grids overlap, else their tokens."""
    return frames if settings.overlapping else tokens_of(frames, settings)


def tokens_of(frames: Tensor, settings: VideoSettings) -> Tensor:
    """Frames `[b, T, h, w]` as the tokens that the settings describe."""
    data = settings.data
    return to_patches(frames, data.patch, data.sequence, data.patch_frames)


def reconstructed(
    model: Denoiser,
    settings: VideoSettings,
    noisy: Tensor,
    deviation: Tensor | None,
    grids: int | None,
    depth: int | None = None,
) -> list[Tensor]:
    """The frames `[b, T, h, w]` of every depth up to `depth`, each the mean over shifted grids of patches.

    In a network that was trained on overlapping grids this mean is what the next layer starts from, and depth 0 is the
    input; else every grid goes through the network alone.

    Args:
        model, settings: the model and the settings of its run.
        noisy: `[b, T, h, w]`; at the borders they are continued by their mirror image.
        deviation: standard deviation of the noise, `[b]`, for a noise-adaptive model.
        grids: how many of them along each side; None: as `VideoSettings.grid_places` says.
        depth: number of layers, None for all.
    """
    stop = 1 + (model.layers if depth is None else depth)

    def known(tokens: Tensor) -> dict[str, Tensor]:
        return known_deviation(model, deviation, len(tokens))

    if not settings.overlapping:
        depths = mean_over_grids(lambda tokens: model.reconstructions(tokens, **known(tokens)), settings, grids, noisy)
        return depths[:stop]
    assert isinstance(model, DUST)
    cut, results = _Grids(settings, grids, noisy), [noisy]
    whole = cut.continued(noisy)

    def prepared(some: Corners) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
        tokens = cut.tokens(whole, some)
        return tokens, model.refinement(tokens, **known(tokens))

    of_all = prepared(cut.places) if len(cut.groups) == 1 else None
    for level in range(1, stop):
        given = whole if level == 1 else cut.continued(results[-1])

        def refined(some: Corners, level: int = level, given: Tensor = given) -> list[Tensor]:
            tokens, refine = of_all or prepared(some)
            return [refine(level, tokens if given is whole else cut.tokens(given, some))]

        results += cut.means(refined)
    return results


def mean_over_grids(
    denoise: Callable[[Tensor], list[Tensor]], settings: VideoSettings, grids: int | None, frames: Tensor
) -> list[Tensor]:
    """What `denoise` gives for the tokens of `frames` `[b, T, h, w]`, as the mean over shifted grids."""
    cut = _Grids(settings, grids, frames)
    whole = cut.continued(frames)
    return cut.means(lambda some: denoise(cut.tokens(whole, some)))


class _Grids:
    """Shifted grids of patches over frames `[b, T, h, w]`: of small frames all at once, as so many more windows.

    Attributes:
        places: rows and columns that each grid is moved by.
        groups: those that are computed together.
    """

    def __init__(self, settings: VideoSettings, grids: int | None, frames: Tensor) -> None:
        self._settings, (self._windows, self._times, *shape) = settings, frames.shape
        self._shape = (shape[0], shape[1])
        self.places = settings.grid_places(grids)
        # A sequence over places would see what grids of one size hold beyond the frame's border.
        together = max(1, _PIXELS_AT_ONCE // frames.numel()) if settings.data.sequence == "time" else 1
        self.groups = [self.places[first : first + together] for first in range(0, len(self.places), together)]

    def continued(self, frames: Tensor) -> Tensor:
        """Frames as far as the grids reach beyond them."""
        (top, left), (height, width) = _furthest(self.places), self._filled(self.places)
        return continued(frames, (left, width - self._shape[1], top, height - self._shape[0]))

    def tokens(self, whole: Tensor, some: Corners) -> Tensor:
        """The tokens of these grids, from what `continued` gave."""
        top, left = _furthest(self.places)
        corners = [(top - row, left - column) for row, column in some]
        return tokens_of(_parts(whole, corners, self._filled(some), False), self._settings)

    def means(self, tokens_at: Callable[[Corners], list[Tensor]]) -> list[Tensor]:
        """The frames of several results, from the tokens of each for some of the grids."""
        totals: list[Tensor] = []
        for some in self.groups:
            found = [self._sum(tokens, some) for tokens in tokens_at(some)]
            totals = [total + more for total, more in zip(totals, found, strict=True)] if totals else found
        return [total / len(self.places) for total in totals]

    def _sum(self, tokens: Tensor, some: Corners) -> Tensor:
        data = self._settings.data
        shape = (self._windows * len(some), self._times, *self._filled(some))
        frames = from_patches(tokens, shape, data.patch, data.sequence, data.patch_frames)
        parts = _parts(frames, some, self._shape, True)
        return parts if len(some) == 1 else parts.unflatten(0, (-1, len(some))).sum(1)

    def _filled(self, some: Corners) -> tuple[int, int]:
        """The least size that holds the frames as these grids move them, and that patches fill."""
        patch = self._settings.data.patch
        height, width = (
            -(-(side + by) // patch) * patch for side, by in zip(self._shape, _furthest(some), strict=True)
        )
        return height, width


def _furthest(places: Corners) -> tuple[int, int]:
    top, left = map(max, zip(*places, strict=True))
    return top, left


def _parts(frames: Tensor, corners: Corners, size: tuple[int, int], each: bool) -> Tensor:
    """A part of each of the frames `[n, T, h, w]`, or g parts of each, `[n·g, T, *size]`, by first row and column."""
    return _part(frames, corners[0], size) if len(corners) == 1 else _Parts.apply(frames, corners, size, each)  # type: ignore[return-value]


class _Parts(torch.autograd.Function):
    """Several parts: their gradient is made of parts too, in a few launches, where torch's of a slice takes three."""

    @staticmethod
    def forward(ctx: Any, frames: Tensor, corners: Corners, size: tuple[int, int], each: bool) -> Tensor:
        ctx.corners, ctx.size, ctx.each = corners, tuple(frames.shape[-2:]), each
        return _stacked(frames, corners, size, each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows, columns), (height, width) = zip(*ctx.corners, strict=True), ctx.size
        right, below = width - grad.shape[-1] - min(columns), height - grad.shape[-2] - min(rows)
        around = torch.nn.functional.pad(grad, (max(columns), right, max(rows), below))
        opposite = [(max(rows) - row, max(columns) - column) for row, column in ctx.corners]
        parts = _stacked(around, opposite, ctx.size, True)
        return parts if ctx.each else parts.unflatten(0, (-1, len(opposite))).sum(1), None, None, None


def _stacked(frames: Tensor, corners: Corners, size: tuple[int, int], each: bool) -> Tensor:
    if each:
        chosen = [(frame, corners[number % len(corners)]) for number, frame in enumerate(frames)]
    else:
        chosen = [(frame, corner) for frame in frames for corner in corners]
    return torch.stack([_part(*one, size) for one in chosen])


def _part(frames: Tensor, corner: tuple[int, int], size: tuple[int, int]) -> Tensor:
    return frames[..., corner[0] : corner[0] + size[0], corner[1] : corner[1] + size[1]]
