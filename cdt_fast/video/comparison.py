"""A trained model on any clips, beside the transforms and libavfilter's denoisers: PSNR, SSIM and time a frame."""

import math
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdt_fast.checks import InputError, require
from cdt_fast.progress import progress_bar
from cdt_fast.video.data.clips import find_clips, open_source
from cdt_fast.video.data.crops import luma
from cdt_fast.video.denoising import Denoising
from cdt_fast.video.networks import Denoiser, device_of
from cdt_fast.video.noise import LEVELS
from cdt_fast.video.quality import dct3d_shifted_denoise, psnr_of, ssim
from cdt_fast.video.settings import VideoSettings

SIGMAS = (10.0, 20.0, 30.0, 40.0, 50.0)  # the customary levels
_SIDE, _FRAMES, _PATCH = 160, 16, 8  # of the piece in the middle of a clip that is measured, and of the transform
# Each filter of libavfilter at the strength that was best of a few factors of the noise at σ 10, 30 and 50, on clips
# that models trained on; that of nlmeans ends at what the filter takes.
_FILTERS: dict[str, Callable[[float], str]] = {
    "nlmeans": lambda sigma: f"s={min(30.0, max(1.0, 0.8 * sigma)):.3f}:p=7:r=15",
    "dctdnoiz": lambda sigma: f"sigma={1.6 * sigma:.3f}",
    "bm3d": lambda sigma: f"sigma={4 * sigma * sigma:.3f}:block=16:bstep=4:group=8:estim=basic",
}


@torch.no_grad()
def compare_denoisers(
    model: Denoiser, settings: VideoSettings, sources: Sequence[str], at: Sequence[float] = SIGMAS
) -> list[dict[str, Any]]:
    """Measure a noise-adaptive model at every depth, and all `peers`, on the luma of clips with white noise.

    Of each clip 160 x 160 pixels of the 16 frames in its middle (or as many more as fill windows) are measured. The
    model is told the noise (in gray levels, one of `at`), as the peers are, and once estimates it, as `denoise` does.
    The noise is the same for all. The result is the name of each, and its means over clips by level: `psnr` in dB on
    0..255, `ssim`, and the median of `seconds_a_frame`.
    """
    if not settings.crops:
        raise InputError("--clips compares a network for crops, which is what train video trains by default")
    clips = [_piece(clip.path, settings.data.window) for source in sources for clip in find_clips(source)]

    def ours(depth: int, told: bool, frames: Tensor, sigma: float) -> Tensor:
        denoising, windows = Denoising(model, settings, depth), frames.to(device_of(model)).split(settings.data.window)
        return torch.cat([denoising.plane(window[None], sigma if told else None)[0] for window in windows]).cpu()

    named = peers()
    named |= {f"the network, {n} of {model.layers} layers": partial(ours, n, True) for n in range(1, model.layers + 1)}
    named["the network, noise estimated"] = partial(ours, model.layers, False)
    results: list[dict[str, Any]] = []
    for name, denoise in progress_bar(named.items(), desc="compare", unit="denoiser"):
        rows: list[Any] = []
        for level, sigma in enumerate(at):
            found = []
            for number, clean in enumerate(clips):
                noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1000 * level + number))
                begin = time.perf_counter()
                denoised = denoise(clean + sigma / LEVELS * noise, sigma)
                took = (time.perf_counter() - begin) / len(clean)
                psnr = psnr_of(LEVELS * (denoised - clean).square().mean().sqrt().item()) or math.inf
                found.append((psnr, ssim(denoised[None], clean[None]).mean().item(), took))
            rows.append(np.mean(found, 0))
        psnrs, alike, seconds = np.transpose(rows).tolist()
        results.append({"name": name, "psnr": psnrs, "ssim": alike, "seconds_a_frame": float(np.median(seconds))})
    return results


def as_table(results: Sequence[dict[str, Any]], at: Sequence[float] = SIGMAS) -> list[list[str]]:
    """Return rows of words, the heading first."""
    rows = [["PSNR in dB", *(f"σ {sigma:g}" for sigma in at), "mean", "SSIM", "ms a frame"]]
    for found in results:
        numbers = [f"{value:.2f}" for value in (*found["psnr"], np.mean(found["psnr"]))]
        numbers += [f"{np.mean(found['ssim']):.3f}", f"{1000 * found['seconds_a_frame']:.1f}"]
        rows.append([found["name"], *numbers])
    return rows


def peers() -> dict[str, Callable[[Tensor, float], Tensor]]:
    """Return by name what denoises frames `[T, h, w]` in [0, 1] with noise in gray levels: nothing, the transform, and
    the filters that this build of libavfilter has."""
    there = require("av", "video", "the filters of libavfilter").filter.filters_available
    return {
        "noisy frames": lambda frames, _: frames,
        "3-D DCT, shifted grids": lambda frames, sigma: dct3d_shifted_denoise(frames[None], sigma / LEVELS, _PATCH)[0],
        **{f"libavfilter, {name}": partial(_filtered, name) for name in _FILTERS if name in there},
    }


def _piece(path: Path, window: int) -> Tensor:
    """Return the luma of the middle of a clip, `[T, h, w]` in [0, 1]."""
    wanted = window * math.ceil(_FRAMES / window)
    total = sum(1 for _ in open_source(path).frames())
    if total < wanted:
        raise InputError(f"{path}: has {total} frames, fewer than what is measured, {wanted}")
    start = (total - wanted) // 2
    frames = np.stack([luma(frame) for frame in islice(open_source(path).frames(), start, start + wanted)])
    top, left = (max(0, (length - _SIDE) // 2) for length in frames.shape[1:])
    return torch.from_numpy(frames[:, top : top + _SIDE, left : left + _SIDE] / np.float32(LEVELS))


def _filtered(name: str, frames: Tensor, sigma: float) -> Tensor:
    av = require("av", "video", "the filters of libavfilter")
    graph, tick, (count, height, width) = av.filter.Graph(), Fraction(1, 25), frames.shape
    source = graph.add_buffer(width=width, height=height, format="gray", time_base=tick)
    graph.link_nodes(source, graph.add(name, _FILTERS[name](sigma)), graph.add("buffersink")).configure()
    for number, picture in enumerate((frames * LEVELS).round().clamp(0, 255).to(torch.uint8).numpy()):
        frame = av.VideoFrame.from_ndarray(picture, format="gray")
        frame.pts, frame.time_base = number, tick
        graph.push(frame)
    graph.push(None)
    return torch.from_numpy(np.stack([graph.pull().to_ndarray(format="gray") for _ in range(count)])) / LEVELS
