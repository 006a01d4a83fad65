"""The networks that denoise video: patches on one grid, or the mean over shifted grids, and their losses."""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.checks import InputError
from cdt_fast.models import DUST, DenoisingDUST, DenoisingViT, VideoUT, load_pretrained
from cdt_fast.ops.common import Weights
from cdt_fast.training.execution import disable_malloc_trim
from cdt_fast.video.data import from_patches, to_patches
from cdt_fast.video.noise import LEAST_DEVIATION, WHITE
from cdt_fast.video.quality import continued
from cdt_fast.video.settings import VideoSettings

Denoiser = DUST | DenoisingDUST | DenoisingViT
Place = tuple[int, int, int]  # rows, columns and frames that a grid of patches is moved by

# Trained on clips of several cameras and generated scenes; its README.md says which.
SHIPPED = Path(__file__).parent / "denoiser"
_HEAD_WIDTH = 64  # of a ViT with random weights
# At once in a layer: with more, sums on a CPU run out of its caches, with less a GPU is without work.
_PIXELS_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}


def device_of(model: nn.Module) -> torch.device:
    """Return where the weights are."""
    return next(model.parameters()).device


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
    if settings.crops:
        return shipped_network(settings) or DenoisingDUST(data.patch, data.patch_frames, model.code_size, model.layers)
    tied = not settings.constrained if model.tied is None else model.tied
    sizes = pixels, model.code_size or pixels, model.layers
    if model.model == "ut":
        return VideoUT(*sizes, tied=tied, scale=model.scale)
    return DUST(*sizes, tied=tied, scale=model.scale, sparsity=model.sparsity)


def shipped_network(settings: VideoSettings) -> DenoisingDUST | None:
    """Return the network of the package if a training by these settings, whose sizes it has, starts from it."""
    data, model = settings.data, settings.model
    if model.scratch or not settings.crops:
        return None
    shipped, pixels = DenoisingDUST.from_pretrained(SHIPPED), data.patch_frames * data.patch**2
    sizes = data.patch, data.patch_frames, model.code_size or pixels, model.layers
    return shipped if sizes == tuple(shipped.config[name] for name in shipped.ARGUMENTS) else None


def load_network(folder: Path, device: str = "auto") -> Denoiser:
    """Return the trained network in a folder, on the GPU where there is one and `device` is not "cpu"."""
    model = load_pretrained(folder)
    if not isinstance(model, Denoiser):
        raise InputError(f"{folder}: holds a {type(model).__name__}, expected a model for video")
    return model.to("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu").eval()


def tokens_of(frames: Tensor, settings: VideoSettings) -> Tensor:
    """Return frames `[b, T, h, w]` as the tokens that the settings describe."""
    return to_patches(frames, settings.data.patch, settings.sequence, settings.data.patch_frames)


@contextmanager
def _workers(wanted: bool) -> Iterator[tuple[int, Callable[..., Iterable[Any]]]]:
    """Yield how many threads of Python there are, without gradients, and `map` over them: two, with half of torch's
    threads each, wait for each other once a layer, not in every operation."""
    threads = torch.get_num_threads()
    if not wanted or threads < 2:
        yield 1, map
        return
    dtype, narrow = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def begin() -> None:  # these settings are those of a thread
        torch.set_num_threads(threads // 2)
        torch.set_grad_enabled(False)
        torch.set_autocast_dtype("cpu", dtype)
        torch.set_autocast_enabled("cpu", narrow)

    disable_malloc_trim(of_threads=True)
    try:
        with ThreadPoolExecutor(2, initializer=begin) as pool:
            yield 2, pool.map
    finally:
        torch.set_num_threads(threads)  # for threads to come


def reconstructed(
    model: Denoiser,
    settings: VideoSettings,
    noisy: Tensor,
    deviation: Tensor,
    depth: int | None = None,
    only_last: bool = False,
    few_grids: bool = False,
    blur: tuple[float, float] = WHITE,
) -> list[Tensor]:
    """Return the frames `[b, T, h, w]` of every depth up to `depth`.

    In a network for crops, which is told the noise's `deviation` `[b]`, each is the weighted mean over shifted grids of
    patches, which the next layer starts from, and depth 0 is the input; the paper's networks have one grid. At the
    borders frames are continued by their mirror image, and at the end of the window by its begin: a mirror image would
    have the same noise in one patch twice. `only_last`: the last of these depths is enough, and so are four grids in
    layers between the first and the last, and six in that, if every other layer has its grids between those of the
    former; `few_grids`: four in all. `blur`: as in `Noise`.
    """
    stop, data, (height, width) = model.layers if depth is None else depth, settings.data, noisy.shape[-2:]
    counts = [4 if few_grids else 8] * stop  # of grids of each layer
    if only_last and not few_grids:
        counts = [8, *[4] * (stop - 2), 6][:stop]
    grids = [settings.grid_places(count, only_last and level % 2 == 1) for level, count in enumerate(counts)]
    grids = grids if isinstance(model, DenoisingDUST) else []
    top, left, late = (max(along) for along in zip((0, 0, 0), *chain(*grids), strict=True))
    rows, columns = (-(-length // data.patch) * data.patch for length in (height + top, width + left))

    def whole(frames: Tensor) -> Tensor:  # a grid that is moved by (row, column) starts at (top - row, left - column)
        frames = torch.cat([frames, frames[:, :late]], 1) if late else frames
        return continued(frames, (left, columns - width, top, rows - height))

    if not isinstance(model, DenoisingDUST):
        given = whole(noisy)
        tokens = tokens_of(given, settings)
        outputs = [model(tokens, depth=depth)] if only_last else model.reconstructions(tokens)[: stop + 1]
        shown = (from_patches(output, tuple(given.shape), data.patch, settings.sequence) for output in outputs)
        return [frames[..., :height, :width] for frames in shown]

    window, cpu = noisy.shape[1], noisy.device.type == "cpu" and not torch.is_grad_enabled()
    cell = math.gcd(data.patch_frames, late)  # frames of one weight
    # Whole grids together, as many as fit; else bands of a grid.
    most = _PIXELS_AT_ONCE["cpu" if cpu else "cuda"]
    together = max(1, most // (noisy.numel() // (height * width) * rows * columns))
    band = max(1, most // (noisy.numel() // (height * width) * data.patch * columns)) * data.patch

    def patches(frames: Tensor, place: Place, start: int, length: int, cell: int = 1) -> Tensor:
        """Return a view of a band of a grid's patches, [b, rows, columns, times, frames, patch, patch]."""
        up, back, first, last = top - place[0] + start, left - place[1], place[2] // cell, (place[2] + window) // cell
        view = frames[:, first:last, up : up + length, back : back + columns].unflatten(3, (-1, data.patch))
        view = view.unflatten(2, (-1, data.patch)).unflatten(1, (window // data.patch_frames, -1))
        return view.permute(0, 3, 5, 1, 2, 4, 6)

    def tokens_of_band(frames: Tensor, some: list[Place], start: int, length: int) -> Tensor:
        each = [patches(frames, place, start, length).flatten(4).flatten(0, 2) for place in some]
        return torch.cat(each) if each[1:] else each[0]

    unit = deviation.clamp(min=LEAST_DEVIATION).to(noisy)[:, None, None, None]
    results, refinements = [noisy / unit], dict[Any, Any]()
    given = whole(results[0])
    in_codes = model.noise_in_codes(blur) if any(blur) else None

    def sums(level: int, estimate: Tensor, parts: list[tuple[list[Place], int, int]]) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the patches of some parts of a layer, and that of the weights."""
        total, weights = torch.zeros_like(estimate), torch.zeros_like(estimate[:, ::cell])
        for some, start, length in parts:
            tokens, key = tokens_of_band(estimate, some, start, length), (*some, start)
            if level == 1:
                refinements[key] = model.refinement(tokens, in_codes)
            refine = refinements.get(key) or model.refinement(tokens_of_band(given, some, start, length), in_codes)
            found = refine(level, tokens)
            for place, values, weight in zip(some, *(each.chunk(len(some)) for each in found), strict=True):
                there = patches(total, place, start, length)
                factor = weight.view(*there.shape[:4], 1, 1, 1)
                there.addcmul_(values.view(there.shape), factor)
                patches(weights, place, start, length, cell).add_(factor)
        return total, weights

    with _workers(cpu) as (workers, run):
        for level, places in enumerate(grids, 1):
            parts = [
                (places[first : first + together], start, min(band, rows - start))
                for first in range(0, len(places), together)
                for start in range(0, rows, band)
            ]
            estimate = whole(results[-1]) if level > 1 else given
            shares = (parts[worker::workers] for worker in range(workers))
            found = zip(*run(partial(sums, level, estimate), shares), strict=True)
            total, weights = (reduce(Tensor.add_, each) for each in found)
            if late:
                total[:, :late] += total[:, window:]
                weights[:, : late // cell] += weights[:, window // cell :]
            mean = total[:, :window].unflatten(1, (-1, cell)) / weights[:, : window // cell].unsqueeze(2)
            results.append(mean.flatten(1, 2)[..., top : top + height, left : left + width])
    return [noisy, *(frames * unit for frames in results[max(1, stop) if only_last else 1 :])]


class ReconstructionLosses(nn.Module):
    """The losses of a model that denoises as a forward, so that the hooks of a distributed wrapper fire: those of the
    mean over shifted grids where `settings` are of crops, else of single patches. `autocast`: as `Workload.losses`."""

    def __init__(self, model: Denoiser, autocast: torch.dtype | None, settings: VideoSettings | None = None) -> None:
        super().__init__()
        self.model, self._autocast, self._settings = model, autocast, settings

    def forward(self, noisy: Tensor, clean: Tensor, deviation: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return `(total, per_depth)` as `DUST.layer_losses`, of tokens, or of frames for crops; deviations `[b]`."""
        # Without autocast's cache: a copy of the weights that outlives a capture would be read at the next one.
        narrow = torch.autocast(noisy.device.type, self._autocast, cache_enabled=False) if self._autocast else None
        with narrow or nullcontext():
            if not isinstance(self.model, DenoisingDUST):
                return self.model.layer_losses(noisy, clean, weights)
            assert self._settings is not None
            data = self._settings.data
            depths = reconstructed(self.model, self._settings, noisy, deviation)
            # A row of pixels is a token to the loss: scaled, its mean over rows is the sum over a patch's pixels.
            pixels = data.patch_frames * data.patch**2 / clean.shape[-1]
            scale = (pixels**0.5 / deviation.clamp(min=LEAST_DEVIATION)).to(clean)[:, None, None, None]
            scaled = [depth * scale for depth in depths]
            return ops.layerwise_reconstruction_loss(scaled, clean * scale, depth_weights=weights)
