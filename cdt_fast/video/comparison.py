"""A trained model on any clips, beside other denoisers: PSNR, SSIM and time a frame, depth by depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models import DUST
from cdt_fast.progress import progress_bar
from cdt_fast.video.data import find_clips, open_source
from cdt_fast.video.denoising import Denoising
from cdt_fast.video.exits import Exits
from cdt_fast.video.networks import Denoiser, device_of
from cdt_fast.video.noise import LEVELS
from cdt_fast.video.peers import Measured, measured, peers
from cdt_fast.video.settings import VideoSettings

SIGMAS = (10.0, 20.0, 30.0, 40.0, 50.0)  # the customary levels
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
# What is measured of a clip: frames from its middle, of which one piece, so that slow denoisers end too.
_SIDE, _FRAMES = 160, 16
_EARLY = "this run, leaving early"


@torch.no_grad()
def compare_denoisers(
    model: Denoiser,
    settings: VideoSettings,
    sources: Sequence[str],
    at: Sequence[float | str] = SIGMAS,
    progress: bool = True,
    exits: Exits | None = None,
) -> list[Measured]:
    """Measure a model at every depth, and all `peers`, on the luma of clips with white noise, or after shifts.

    Of each clip the 16 frames in its middle are measured (or as many more as fill windows of the model), at full
    resolution, the piece of 160 x 160 pixels in the middle of them. The peers have all of them at once. The model is
    told the noise, as they are, and once estimates it, which is what `denoise` does.

    Args:
        model, settings: of a run; a noise-adaptive network.
        sources: clean clips, as `find_clips` takes them.
        at: standard deviations of the noise in gray levels, or names of `shifts.SHIFTS`.
        progress: show a bar on stderr.
        exits: where windows leave the model early, which is measured as well; None: it is not.

    Raises:
        InputError: a clip cannot be read or has fewer frames, or the model takes one level alone.
    """
    if not isinstance(model, DUST) or not model.noise_adaptive:
        raise InputError("--clips compares a noise-adaptive network, which is what train video trains by default")
    clips = [_piece(clip.path, settings) for source in sources for clip in find_clips(source)]
    others = peers()
    named: dict[str, Any] = dict(others)
    depths = [f"this run, {depth} of {model.layers} layers" for depth in range(1, model.layers + 1)]
    for depth, name in enumerate(depths, 1):
        named[name] = partial(_ours, Denoising(model, settings, depth, grids=None), True)
    early = Denoising(model, settings, model.layers, grids=None, exits=exits)
    if exits is not None:
        named[_EARLY] = partial(_ours, early, True)
    named["this run, noise estimated"] = partial(_ours, replace(early, layers=[]), False)
    bar = progress_bar(range(len(named) * len(at)), desc="compare", unit="noise level", shown=progress)
    with bar:
        found = {name: measured(name, denoise, clips, at, bar.update) for name, denoise in named.items()}
    refused = next((each.skipped for name, each in found.items() if each.skipped and name not in others), "")
    if refused:
        raise InputError(refused)
    for before, after in pairwise(["noisy frames", *depths]):
        better = np.less(found[after].pieces, found[before].pieces)
        found[after] = replace(found[after], rising=float(better.mean()))
    if exits is not None:
        layers = sum(early.layers) / len(early.layers)
        found[_EARLY] = replace(found[_EARLY], name=f"{_EARLY}, after {layers:.2f} layers in the mean")
    return [replace(each, pieces=[]) for each in found.values()]


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


def as_table(measurements: Sequence[Measured], at: Sequence[float | str] = SIGMAS) -> list[list[str]]:
    """Rows of words, the heading first; "rising" is `Measured.rising`."""
    names = [each if isinstance(each, str) else f"σ {each:g}" for each in at]
    rows = [["PSNR in dB", *names, "mean", "SSIM", "ms a frame", "rising"]]
    for found in measurements:
        if found.skipped:
            rows.append([f"{found.name}: skipped, {found.skipped}", *[""] * (len(at) + 4)])
            continue
        mean, alike = (sum(values) / len(values) for values in (found.psnr, found.ssim))
        numbers = [*(f"{value:.2f}" for value in found.psnr), f"{mean:.2f}", f"{alike:.3f}"]
        rising = "" if found.rising is None else f"{found.rising:.1%}"
        rows.append([found.name, *numbers, f"{1000 * found.seconds_a_frame:.1f}", rising])
    return rows
