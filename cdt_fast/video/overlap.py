"""Denoised frames and their losses: of patches on one grid, or of the mean over shifted grids of patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.models import DUST
from cdt_fast.video.data import from_patches, to_patches
from cdt_fast.video.networks import Denoiser, is_adaptive, known_deviation
from cdt_fast.video.noise import LEAST_DEVIATION
from cdt_fast.video.quality import continued
from cdt_fast.video.settings import VideoSettings

Places = list[tuple[int, int]]  # rows and columns

# What is in a processor's caches together: more at once is slower there, and less leaves much of a GPU without work.
_PIXELS_AT_ONCE = 2**20


def training_input(frames: Tensor, settings: VideoSettings) -> Tensor:
    """Return what losses are of: frames `[b, T, h, w]` as they are where grids overlap, else their tokens."""
    return frames if settings.overlapping else tokens_of(frames, settings)


def tokens_of(frames: Tensor, settings: VideoSettings) -> Tensor:
    """Return frames `[b, T, h, w]` as the tokens that the settings describe."""
    data = settings.data
    return to_patches(frames, data.patch, data.sequence, data.patch_frames)


def reconstructed(
    model: Denoiser,
    settings: VideoSettings,
    noisy: Tensor,
    deviation: Tensor | None,
    grids: int | None,
    depth: int | None = None,
    only_last: bool = False,
) -> list[Tensor]:
    """Return the frames `[b, T, h, w]` of every depth up to `depth`, each the mean over shifted grids of patches.

    In a network that was trained on overlapping grids this mean is what the next layer starts from, and depth 0 is the
    input; else every grid goes through the network alone.

    Args:
        model, settings: the model and the settings of its run.
        noisy: `[b, T, h, w]`; at the borders they are continued by their mirror image.
        deviation: standard deviation of the noise, `[b]`, for a noise-adaptive model.
        grids: how many of them along each side; None: as `VideoSettings.grid_places` says.
        depth: number of layers, None for all.
        only_last: the result of the last of these depths is enough.
    """
    stop = 1 + (model.layers if depth is None else depth)
    cut, results = _Grids(settings, grids, noisy), [noisy]
    whole = cut.continued(noisy)

    def known(tokens: Tensor) -> dict[str, Tensor]:
        return known_deviation(model, deviation, len(tokens))

    def alone(some: Places) -> list[Tensor]:
        tokens = cut.tokens(whole, some)
        if only_last:
            return [model(tokens, depth=depth, **known(tokens))]
        return model.reconstructions(tokens, **known(tokens))[:stop]

    if not settings.overlapping:
        return cut.means(alone)
    assert isinstance(model, DUST)

    def prepared(some: Places) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
        tokens = cut.tokens(whole, some)
        return tokens, model.refinement(tokens, **known(tokens))

    of_all = prepared(cut.places) if len(cut.groups) == 1 else None
    for level in range(1, stop):
        given = whole if level == 1 else cut.continued(results[-1])

        def refined(some: Places, level: int = level, given: Tensor = given) -> list[Tensor]:
            tokens, refine = of_all or prepared(some)
            return [refine(level, tokens if given is whole else cut.tokens(given, some))]

        results += cut.means(refined)
    return results


class _Grids:
    """Shifted grids of patches over frames `[b, T, h, w]`: of small frames all at once, as so many more windows.

    Attributes:
        places: rows and columns that each grid is moved by.
        groups: those that are computed together.
    """

    def __init__(self, settings: VideoSettings, grids: int | None, frames: Tensor) -> None:
        self._settings, (_, self._times, *self._shape) = settings, frames.shape
        self.places = settings.grid_places(grids)
        # A sequence over places would see what grids of one size hold beyond the frame's border.
        together = max(1, _PIXELS_AT_ONCE // frames.numel()) if settings.data.sequence == "time" else 1
        self.groups = [self.places[first : first + together] for first in range(0, len(self.places), together)]

    def continued(self, frames: Tensor) -> Tensor:
        """Return frames as far as the grids reach beyond them."""
        (top, left), (height, width) = _furthest(self.places), self._filled(self.places)
        return continued(frames, (left, width - self._shape[1], top, height - self._shape[0]))

    def tokens(self, whole: Tensor, some: Places) -> Tensor:
        """Return the tokens of these grids, from what `continued` gave."""
        (top, left), (height, width) = _furthest(self.places), self._filled(some)
        parts = [_part(whole, top - row, left - column, height, width) for row, column in some]
        return tokens_of(torch.stack(parts, 1).flatten(0, 1), self._settings)

    def means(self, tokens_at: Callable[[Places], list[Tensor]]) -> list[Tensor]:
        """Return the frames of several results, from the tokens of each for some of the grids."""
        totals: list[Tensor] = []
        for some in self.groups:
            found = [self._sum(tokens, some) for tokens in tokens_at(some)]
            totals = [total + more for total, more in zip(totals, found, strict=True)] if totals else found
        return [total / len(self.places) for total in totals]

    def _sum(self, tokens: Tensor, some: Places) -> Tensor:
        data, (height, width) = self._settings.data, self._shape
        frames = from_patches(
            tokens, (-1, self._times, *self._filled(some)), data.patch, data.sequence, data.patch_frames
        )
        of_each = zip(frames.unflatten(0, (-1, len(some))).unbind(1), some, strict=True)
        parts = [_part(moved, *corner, height, width) for moved, corner in of_each]
        return torch.stack(parts).sum(0)

    def _filled(self, some: Places) -> tuple[int, int]:
        """Return the least size that holds the frames as these grids move them, and that patches fill."""
        patch = self._settings.data.patch
        height, width = (
            -(-(side + by) // patch) * patch for side, by in zip(self._shape, _furthest(some), strict=True)
        )
        return height, width


def _part(frames: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """Cut a part out of frames; the gradient of a negative pad is one operation, and that of a slice several."""
    right, below = left + width - frames.shape[-1], top + height - frames.shape[-2]
    return torch.nn.functional.pad(frames, (-left, right, -top, below))


def _furthest(places: Places) -> tuple[int, int]:
    top, left = map(max, zip(*places, strict=True))
    return top, left


class ReconstructionLosses(nn.Module):
    """The losses of a model that denoises as a forward, so that the hooks of a distributed wrapper fire.

    Args:
        model: the network.
        autocast: the dtype of the matrix products; None: that of the weights.
        overlapping: the settings of a run whose losses are those of the mean over shifted grids of patches; None: of
            the patches of one grid.
    """

    def __init__(self, model: Denoiser, autocast: torch.dtype | None, overlapping: VideoSettings | None = None) -> None:
        super().__init__()
        self.model, self._autocast, self._overlapping = model, autocast, overlapping

    def forward(
        self, noisy: Tensor, clean: Tensor, deviation: Tensor, weights: Tensor | Sequence[float] | None
    ) -> tuple[Tensor, Tensor]:
        """Return `(total, per_depth)` as `DUST.layer_losses`.

        Args:
            noisy, clean: tokens, or frames `[b, T, h, w]` where grids overlap.
            deviation: of the noise, `[b]`.
            weights: of the depths.
        """
        # Without autocast's cache: a copy of the weights that outlives a capture would be read at the next one.
        narrow = torch.autocast(noisy.device.type, self._autocast, cache_enabled=False) if self._autocast else None
        with narrow or nullcontext():
            if self._overlapping is None:
                known = known_deviation(self.model, deviation, len(noisy))
                return self.model.layer_losses(noisy, clean, weights, **known)
            data = self._overlapping.data
            depths = reconstructed(self.model, self._overlapping, noisy, deviation, data.overlap)
            # A row of pixels is a token to the loss: scaled, its mean over rows is the sum over a patch's pixels.
            scale = torch.full_like(deviation, (data.patch_frames * data.patch**2 / clean.shape[-1]) ** 0.5)
            if is_adaptive(self.model):
                scale = scale / deviation.clamp(min=LEAST_DEVIATION)
            scale = scale.to(clean)[:, None, None, None]
            scaled = [depth * scale for depth in depths]
            return ops.layerwise_reconstruction_loss(scaled, clean * scale, depth_weights=weights)
