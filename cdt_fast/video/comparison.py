"""A trained model on any clips, beside other denoisers, each as far as it is installed: PSNR, SSIM and time a frame."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdt_fast.errors import InputError, require
from cdt_fast.models import DUST
from cdt_fast.progress import progress_bar
from cdt_fast.video.baselines import blur, dct3d_denoise, dct3d_shifted_denoise
from cdt_fast.video.data import find_clips, open_source
from cdt_fast.video.denoising import Denoising
from cdt_fast.video.networks import Denoiser, device_of
from cdt_fast.video.noise import LEVELS
from cdt_fast.video.quality import psnr_of, ssim
from cdt_fast.video.settings import VideoSettings

# Frames `[T, h, w]` in [0, 1] and the noise's deviation in gray levels, to denoised ones.
Denoise = Callable[[Tensor, float], Tensor]

PIECE = (8, 32, 32)
_PATCH = 8  # of the transforms; a window is all frames that are measured
SIGMAS = (10.0, 20.0, 30.0, 40.0, 50.0)  # the customary levels
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
# What is measured of a clip: frames from its middle, of which one piece, so that slow denoisers end too.
_SIDE, _FRAMES = 160, 16


@dataclass(frozen=True)
class Measured:
    """What a denoiser did at each noise level.

    Attributes:
        name: what to call it.
        psnr: in dB on 0..255, the mean over clips.
        ssim: the mean over frames.
        seconds_a_frame: on this machine, the median over levels.
        skipped: why there is nothing, or "".
        pieces: mean squared error of every piece of `PIECE` frames, rows and columns.
        rising: of a depth of a network, the share of these pieces in which it is better than the depth before.
    """

    name: str
    psnr: list[float]
    ssim: list[float]
    seconds_a_frame: float
    skipped: str = ""
    pieces: list[float] = field(default_factory=list, repr=False)
    rising: float | None = None


@torch.no_grad()
def compare_denoisers(
    model: Denoiser,
    settings: VideoSettings,
    sources: Sequence[str],
    at: Sequence[float] = SIGMAS,
    progress: bool = True,
) -> list[Measured]:
    """Measure a model at every depth, and all `peers`, on the luma of clips with white noise.

    Of each clip the 16 frames in its middle are measured (or as many more as fill windows of the model), at full
    resolution, the piece of 160 x 160 pixels in the middle of them. The peers have all of them at once. The model is
    told the noise, as they are, and once estimates it, which is what `denoise` does.

    Args:
        model, settings: of a run; a noise-adaptive network.
        sources: clean clips, as `find_clips` takes them.
        at: standard deviations of the noise in gray levels.
        progress: show a bar on stderr.

    Raises:
        InputError: a clip cannot be read or has fewer frames, or the model takes one level alone.
    """
    if not isinstance(model, DUST) or not model.noise_adaptive:
        raise InputError("--clips compares a noise-adaptive network, which is what train video trains by default")
    clips = [_piece(clip.path, settings) for source in sources for clip in find_clips(source)]
    others = peers()
    named = dict(others)
    depths = [f"this run, {depth} of {model.layers} layers" for depth in range(1, model.layers + 1)]
    for depth, name in enumerate(depths, 1):
        named[name] = partial(_ours, Denoising(model, settings, depth, grids=settings.data.overlap), True)
    whole = Denoising(model, settings, model.layers, grids=settings.data.overlap)
    named["this run, noise estimated"] = partial(_ours, whole, False)
    bar = progress_bar(range(len(named) * len(at)), desc="compare", unit="noise level", shown=progress)
    with bar:
        found = {name: measured(name, denoise, clips, at, bar.update) for name, denoise in named.items()}
    refused = next((each.skipped for name, each in found.items() if each.skipped and name not in others), "")
    if refused:
        raise InputError(refused)
    for before, after in pairwise(["noisy frames", *depths]):
        better = np.less(found[after].pieces, found[before].pieces)
        found[after] = replace(found[after], rising=float(better.mean()))
    return list(found.values())


def _ours(denoising: Denoising, told: bool, frames: Tensor, sigma: float) -> Tensor:
    windows = frames.to(device_of(denoising.model)).split(denoising.settings.data.window)
    found = [denoising.plane(window.unsqueeze(0), sigma if told else None)[0] for window in windows]
    return torch.cat(found).cpu()


def _piece(path: Any, settings: VideoSettings) -> Tensor:
    """Luma `[T, h, w]` in [0, 1]."""
    window = settings.data.window
    window *= math.ceil(_FRAMES / window)
    total = sum(1 for _ in open_source(path).frames())
    if total < window:
        raise InputError(f"{path}: has {total} frames, fewer than what is measured, {window}")
    start = (total - window) // 2
    chosen = np.stack(list(islice(open_source(path).frames(), start, start + window))).astype(np.float32)
    luma = chosen @ _LUMA if chosen.ndim == 4 else chosen
    top, left = (max(0, (length - _SIDE) // 2) for length in luma.shape[1:])
    return torch.from_numpy(luma[:, top : top + _SIDE, left : left + _SIDE] / np.float32(LEVELS))


def as_table(measurements: Sequence[Measured], at: Sequence[float] = SIGMAS) -> list[list[str]]:
    """Rows of words, the heading first; "rising" is `Measured.rising`."""
    rows = [["PSNR in dB", *(f"σ {sigma:g}" for sigma in at), "mean", "SSIM", "ms a frame", "rising"]]
    for found in measurements:
        if found.skipped:
            rows.append([f"{found.name}: skipped, {found.skipped}", *[""] * (len(at) + 4)])
            continue
        mean, alike = (sum(values) / len(values) for values in (found.psnr, found.ssim))
        numbers = [*(f"{value:.2f}" for value in found.psnr), f"{mean:.2f}", f"{alike:.3f}"]
        rising = "" if found.rising is None else f"{found.rising:.1%}"
        rows.append([found.name, *numbers, f"{1000 * found.seconds_a_frame:.1f}", rising])
    return rows


def peers() -> dict[str, Denoise]:
    """All of them by name. One that cannot run here raises ImportError or InputError when it is called."""
    return {
        "noisy frames": lambda frames, _: frames,
        "mean of 3x3 pixels": partial(_of_planes, blur),
        "3-D DCT, hard threshold": partial(_of_planes, dct3d_denoise),
        "3-D DCT, shifted grids": partial(_of_planes, dct3d_shifted_denoise),
        "OpenCV, multi-frame non-local means": _opencv,
        **{f"libavfilter, {name}": partial(_filtered, name, options) for name, options in _FILTERS.items()},
    }


def measured(
    name: str, denoise: Denoise, clips: Sequence[Tensor], at: Sequence[float], on_measured: Callable[[], Any]
) -> Measured:
    """Denoise each clip at each noise level; noise is that of the clip's and the level's number, the same for all.

    Args:
        name, denoise: the denoiser.
        clips: clean frames `[T, h, w]` in [0, 1].
        at: the levels, in gray levels.
        on_measured: called after each level.
    """
    psnr, alike, seconds, pieces = [], [], [], []
    for level, sigma in enumerate(at):
        values, similar, started, frames = [], [], 0.0, 0
        for number, clean in enumerate(clips):
            generator = torch.Generator().manual_seed(1000 * level + number)
            noisy = clean + sigma / LEVELS * torch.randn(clean.shape, generator=generator)
            begin = time.perf_counter()
            try:
                found = denoise(noisy, sigma)
            except (ImportError, InputError) as reason:
                return Measured(name, [], [], 0.0, str(reason))
            started += time.perf_counter() - begin
            frames += len(clean)
            squares = (found - clean).square()
            piece = [min(sides) for sides in zip(PIECE, clean.shape, strict=True)]
            pieces += torch.nn.functional.avg_pool3d(squares[None], piece).flatten().tolist()
            values.append(psnr_of(LEVELS * squares.mean().sqrt().item()) or float("inf"))
            similar.append(ssim(found.unsqueeze(0), clean.unsqueeze(0)).mean().item())
        psnr.append(sum(values) / len(values))
        alike.append(sum(similar) / len(similar))
        seconds.append(started / frames)
        on_measured()
    return Measured(name, psnr, alike, float(np.median(seconds)), pieces=pieces)


def _of_planes(denoise: Callable[[Tensor, float, int], Tensor], frames: Tensor, sigma: float) -> Tensor:
    height, width = frames.shape[-2:]
    fill = (0, -width % _PATCH, 0, -height % _PATCH)
    whole = torch.nn.functional.pad(frames.unsqueeze(0), fill, mode="replicate")
    return denoise(whole, sigma / LEVELS, _PATCH)[0, :, :height, :width]


def _opencv(frames: Tensor, sigma: float) -> Tensor:
    try:
        import cv2  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("opencv-python is not installed") from error
    bytes_ = list(_as_bytes(frames))
    # The window of frames is odd and lies within the clip; h at the strength that was best of a few factors.
    reach = min(2, (len(bytes_) - 1) // 2)
    result = [
        cv2.fastNlMeansDenoisingMulti(
            bytes_, min(max(index, reach), len(bytes_) - 1 - reach), 2 * reach + 1, None, 0.8 * sigma, 7, 21
        )
        for index in range(len(bytes_))
    ]
    return torch.from_numpy(np.stack(result)).float() / LEVELS


# Each at the strength that was best of a few factors of the noise at σ 10, 30 and 50, on clips that models trained on;
# those of nlmeans, atadenoise and fftdnoiz end at what the filter takes.
_FILTERS: dict[str, Callable[[float], str]] = {
    "nlmeans": lambda sigma: f"s={min(30.0, max(1.0, 0.8 * sigma)):.3f}:p=7:r=15",
    "atadenoise": lambda sigma: f"0a={min(0.3, 8 * sigma / 255):.4f}:0b={min(5.0, 3 * sigma):.4f}:s=9:a=p",
    "fftdnoiz": lambda sigma: f"sigma={min(100.0, 8 * sigma):.3f}:block=32:overlap=0.8:prev=1:next=1",
    "dctdnoiz": lambda sigma: f"sigma={1.6 * sigma:.3f}",
    "bm3d": lambda sigma: f"sigma={4 * sigma * sigma:.3f}:block=16:bstep=4:group=8:estim=basic",
}


def _filtered(name: str, options: Callable[[float], str], frames: Tensor, sigma: float) -> Tensor:
    """All frames through a filter of libavfilter."""
    av = require("av", "video", "the filters of libavfilter")
    if name not in av.filter.filters_available:
        raise InputError(f"this build of libavfilter has no {name}")
    graph = av.filter.Graph()
    height, width = frames.shape[-2:]
    # Of its formats dctdnoiz takes colors alone.
    form = "rgb24" if name == "dctdnoiz" else "gray"
    start = graph.add_buffer(width=width, height=height, format=form, time_base=Fraction(1, 25))
    chosen, end = graph.add(name, options(sigma)), graph.add("buffersink")
    start.link_to(chosen)
    chosen.link_to(end)
    graph.configure()
    for number, picture in enumerate(_as_bytes(frames)):
        given = np.repeat(picture[..., np.newaxis], 3, axis=2) if form == "rgb24" else picture
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(given), format=form)
        frame.pts, frame.time_base = number, Fraction(1, 25)
        graph.push(frame)
    graph.push(None)
    found = []
    while len(found) < len(frames):
        try:
            pixels = graph.pull().to_ndarray(format=form)
        except (av.error.BlockingIOError, av.error.EOFError) as error:
            raise InputError(f"{name} gave {len(found)} of {len(frames)} frames") from error
        found.append(pixels if pixels.ndim == 2 else pixels[..., 1])
    return torch.from_numpy(np.stack(found)).float() / LEVELS


def _as_bytes(frames: Tensor) -> Iterator[np.ndarray]:
    for frame in (frames * LEVELS).round().clamp(0, 255).to(torch.uint8):
        yield frame.numpy()
