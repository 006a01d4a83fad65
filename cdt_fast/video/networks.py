"""The networks that denoise video: patches on one grid, or the mean over shifted grids, and their losses."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.checks import InputError
from cdt_fast.models import DUST, DenoisingViT, VideoUT, load_pretrained
from cdt_fast.video.data import from_patches, to_patches
from cdt_fast.video.noise import LEAST_DEVIATION
from cdt_fast.video.quality import THRESHOLD_FACTOR, continued
from cdt_fast.video.settings import VideoSettings

Denoiser = DUST | DenoisingViT
Places = list[tuple[int, int]]  # rows and columns that grids of patches are moved by

# A first layer with an orthonormal dictionary, a step of 1 and a hard threshold is the thresholded transform that the
# baselines are, at their threshold. Later layers add a part of the noise again to what was denoised.
_FIRST_SPARSITY, _INNER_SPARSITY, _INNER_STEP = THRESHOLD_FACTOR, 3.5, 0.3
_SOFT_SPARSITY = 1.5
_HEAD_WIDTH = 64  # of a ViT with random weights
# What is in a processor's caches together: more at once is slower there, and less leaves much of a GPU without work.
_PIXELS_AT_ONCE = 2**20


def device_of(model: nn.Module) -> torch.device:
    """Return where the weights are."""
    return next(model.parameters()).device


def is_adaptive(model: Denoiser) -> bool:
    """Tell whether the model takes the noise's standard deviation."""
    return isinstance(model, DUST) and model.noise_adaptive


def known_deviation(model: Denoiser, deviation: Tensor | None, sequences: int) -> dict[str, Tensor]:
    """Return what the methods of a model take of the noise: nothing, or its deviation for each sequence of a window."""
    if deviation is None or not is_adaptive(model):
        return {}
    return {"deviation": deviation.clamp(min=LEAST_DEVIATION).repeat_interleave(sequences // len(deviation))}


def build_network(settings: VideoSettings) -> Denoiser:
    """Return the untrained network that the settings describe, or a pretrained ViT; InputError if they do not fit."""
    model, data = settings.model, settings.data
    pixels = data.patch_frames * data.patch**2
    if model.model == "vit":
        grid = (data.size // data.patch,) * 2
        if model.pretrained is None:
            heads = math.gcd(model.width, max(1, model.width // _HEAD_WIDTH))
            return DenoisingViT(pixels, grid, model.layers, width=model.width, heads=heads)
        vit = DenoisingViT.from_pretrained(model.pretrained, grid=grid)
        if vit.patch_size != pixels:
            side = math.isqrt(vit.patch_size)
            raise InputError(f"[data] patch must be {side}, that of the ViT in {model.pretrained}; got {data.patch}")
        return vit
    common: dict[str, Any] = {
        "patch_size": pixels,
        "patch_frames": data.patch_frames,
        "tight_frame": settings.crops or data.patch_frames > 1,
        "noise_adaptive": settings.crops,
        "code_size": model.code_size or pixels,
        "layers": model.layers,
        "tied": not settings.constrained if model.tied is None else model.tied,
        "scale": model.scale,
    }
    if model.model == "ut":
        return VideoUT(**common)
    inner, hard = model.layers - 1, model.nonlinearity == "hard_threshold"
    # A layer that starts from the mean over grids would see nothing of it with a whole step.
    if hard or settings.crops:
        largest = DUST(**{**common, "layers": 1}).step
        common["step"] = [largest] + [_INNER_STEP * largest] * inner
    default = [_FIRST_SPARSITY] + [_INNER_SPARSITY] * inner if hard else _SOFT_SPARSITY
    sparsity = default if model.sparsity is None else model.sparsity
    return DUST(**common, sparsity=sparsity, nonlinearity=model.nonlinearity)


def load_network(folder: Path, device: str) -> Denoiser:
    """Return the trained network of a run, on the GPU where there is one and `device` is not "cpu"."""
    model = load_pretrained(folder)
    if not isinstance(model, Denoiser):
        raise InputError(f"{folder}: holds a {type(model).__name__}, expected a model for video")
    return model.to("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu").eval()


def tokens_of(frames: Tensor, settings: VideoSettings) -> Tensor:
    """Return frames `[b, T, h, w]` as the tokens that the settings describe."""
    return to_patches(frames, settings.data.patch, settings.sequence, settings.data.patch_frames)


def training_input(frames: Tensor, settings: VideoSettings) -> Tensor:
    """Return what losses are of: frames `[b, T, h, w]` as they are for crops, else their tokens."""
    return frames if settings.crops else tokens_of(frames, settings)


def reconstructed(
    model: Denoiser,
    settings: VideoSettings,
    noisy: Tensor,
    deviation: Tensor | None,
    grids: int | None = None,
    depth: int | None = None,
    only_last: bool = False,
) -> list[Tensor]:
    """Return the frames `[b, T, h, w]` of every depth up to `depth`, each the mean over shifted grids of patches.

    In a network for crops this mean is what the next layer starts from, and depth 0 is the input; else every grid goes
    through the network alone. At the borders frames are continued by their mirror image.

    Args:
        deviation: standard deviation of the noise, `[b]`, for a noise-adaptive model.
        grids: how many of them along each side; None: as in the training.
        depth: number of layers, None for all.
        only_last: the result of the last of these depths is enough.
    """
    stop = 1 + (model.layers if depth is None else depth)
    places, shape, patch = settings.grid_places(grids), noisy.shape[-2:], settings.data.patch
    # A sequence over places would see what grids of one size hold beyond the frame's border.
    together = max(1, _PIXELS_AT_ONCE // noisy.numel()) if settings.sequence == "time" else 1
    groups = [places[first : first + together] for first in range(0, len(places), together)]
    top, left = _furthest(places)

    def filled(some: Places) -> list[int]:  # the least size that holds the moved frames, and that patches fill
        return [-(-(side + by) // patch) * patch for side, by in zip(shape, _furthest(some), strict=True)]

    def whole(frames: Tensor) -> Tensor:
        height, width = filled(places)
        return continued(frames, (left, width - shape[1], top, height - shape[0]))

    def cut(frames: Tensor, some: Places) -> Tensor:  # those of small frames as so many windows
        parts = [_part(frames, top - row, left - column, *filled(some)) for row, column in some]
        return tokens_of(torch.stack(parts, 1).flatten(0, 1), settings)

    def shown(tokens: Tensor, some: Places) -> Tensor:
        size = (-1, noisy.shape[1], *filled(some))
        frames = from_patches(tokens, size, patch, settings.sequence, settings.data.patch_frames)
        moved = frames.unflatten(0, (-1, len(some))).unbind(1)
        return torch.stack([_part(part, *at, *shape) for part, at in zip(moved, some, strict=True)]).sum(0)

    def begun(some: Places) -> tuple[Any, ...]:
        tokens = cut(first, some)
        known = known_deviation(model, deviation, len(tokens))
        return tokens, known, model.refinement(tokens, **known) if settings.crops and isinstance(model, DUST) else None

    def outputs(some: Places, level: int, given: Tensor) -> list[Tensor]:
        tokens, known, refine = of_all or begun(some)
        if refine:
            return [refine(level, tokens if level == 1 else cut(given, some))]
        return [model(tokens, depth=depth, **known)] if only_last else model.reconstructions(tokens, **known)[:stop]

    def means(level: int, given: Tensor) -> list[Tensor]:
        sums = ([shown(tokens, some) for tokens in outputs(some, level, given)] for some in groups)
        totals = reduce(lambda before, more: [a + b for a, b in zip(before, more, strict=True)], sums)
        return [total / len(places) for total in totals]

    first, results = whole(noisy), [noisy]
    of_all = begun(places) if len(groups) == 1 else None
    if not settings.crops:
        return means(stop - 1, first)
    for level in range(1, stop):
        results += means(level, first if level == 1 else whole(results[-1]))
    return results


def _part(frames: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """Cut a part out of frames; the gradient of a negative pad is one operation, and that of a slice several."""
    sides = -left, left + width - frames.shape[-1], -top, top + height - frames.shape[-2]
    return torch.nn.functional.pad(frames, sides)


def _furthest(places: Places) -> list[int]:
    return [max(along) for along in zip(*places, strict=True)]


class ReconstructionLosses(nn.Module):
    """The losses of a model that denoises as a forward, so that the hooks of a distributed wrapper fire.

    They are those of the mean over shifted grids where `settings` are of crops, else of single patches. `autocast` is
    the dtype of the matrix products, None for that of the weights.
    """

    def __init__(self, model: Denoiser, autocast: torch.dtype | None, settings: VideoSettings | None = None) -> None:
        super().__init__()
        self.model, self._autocast, self._settings = model, autocast, settings

    def forward(
        self, noisy: Tensor, clean: Tensor, deviation: Tensor, weights: Tensor | Sequence[float] | None
    ) -> tuple[Tensor, Tensor]:
        """Return `(total, per_depth)` as `DUST.layer_losses`, of what `training_input` gives, and deviations `[b]`."""
        # Without autocast's cache: a copy of the weights that outlives a capture would be read at the next one.
        narrow = torch.autocast(noisy.device.type, self._autocast, cache_enabled=False) if self._autocast else None
        with narrow or nullcontext():
            if self._settings is None or not self._settings.crops:
                known = known_deviation(self.model, deviation, len(noisy))
                return self.model.layer_losses(noisy, clean, weights, **known)
            data = self._settings.data
            depths = reconstructed(self.model, self._settings, noisy, deviation)
            # A row of pixels is a token to the loss: scaled, its mean over rows is the sum over a patch's pixels.
            scale = torch.full_like(deviation, (data.patch_frames * data.patch**2 / clean.shape[-1]) ** 0.5)
            if is_adaptive(self.model):
                scale = scale / deviation.clamp(min=LEAST_DEVIATION)
            scale = scale.to(clean)[:, None, None, None]
            scaled = [depth * scale for depth in depths]
            return ops.layerwise_reconstruction_loss(scaled, clean * scale, depth_weights=weights)
