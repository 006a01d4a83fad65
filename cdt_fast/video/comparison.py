"""A trained model on any clips, beside other denoisers: PSNR, SSIM and time a frame, depth by depth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models import DUST
from cdt_fast.progress import progress_bar
from cdt_fast.video.data import find_clips, open_source
from cdt_fast.video.denoising import denoised_frames, estimated_noise
from cdt_fast.video.networks import Denoiser, device_of
from cdt_fast.video.noise import LEVELS
from cdt_fast.video.peers import Measured, measured, peers
from cdt_fast.video.settings import VideoSettings

SIGMAS = (10.0, 20.0, 30.0, 40.0, 50.0)  # the customary levels
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
# What is measured of a clip: frames from its middle, of which one piece, so that slow denoisers end too.
_SIDE = 160


@torch.no_grad()
def compare_denoisers(
    model: Denoiser,
    settings: VideoSettings,
    sources: Sequence[str],
    sigmas: Sequence[float] = SIGMAS,
    progress: bool = True,
) -> list[Measured]:
    """Measure a model at every depth, and all `peers`, on the luma of clips with white noise.

    Of each clip the window in its middle is measured, at full resolution, the piece of 160 x 160 pixels in the middle
    of it. The model is told the noise, as the peers are, and once estimates it.

    Args:
        model, settings: of a run; a noise-adaptive network.
        sources: clean clips, as `find_clips` takes them.
        sigmas: standard deviations of the noise in gray levels.
        progress: show a bar on stderr.

    Raises:
        InputError: a clip cannot be read or is shorter than a window, or the model takes one level alone.
    """
    if not isinstance(model, DUST) or not model.noise_adaptive:
        raise InputError("--clips compares a noise-adaptive network, which is what train video trains by default")
    clips = [_piece(clip.path, settings) for source in sources for clip in find_clips(source)]
    named: dict[str, Any] = dict(peers())
    for depth in range(1, model.layers + 1):
        named[f"this run, {depth} of {model.layers} layers"] = partial(_ours, model, settings, depth, True)
    named["this run, noise estimated"] = partial(_ours, model, settings, model.layers, False)
    bar = progress_bar(range(len(named) * len(sigmas)), desc="compare", unit="noise level", shown=progress)
    with bar:
        return [measured(name, denoise, clips, sigmas, bar.update) for name, denoise in named.items()]


def _ours(model: Denoiser, settings: VideoSettings, depth: int, told: bool, frames: Tensor, sigma: float) -> Tensor:
    given = frames.unsqueeze(0).to(device_of(model))
    deviation = given.new_full((1,), sigma / LEVELS if told else estimated_noise(given))
    return denoised_frames(model, settings, given, deviation, depth=depth, grids=None)[0].cpu()


def _piece(path: Any, settings: VideoSettings) -> Tensor:
    """Luma `[T, h, w]` in [0, 1]."""
    window = settings.data.window
    total = sum(1 for _ in open_source(path).frames())
    if total < window:
        raise InputError(f"{path}: has {total} frames, fewer than the window of the model, {window}")
    start = (total - window) // 2
    chosen = np.stack(list(islice(open_source(path).frames(), start, start + window))).astype(np.float32)
    luma = chosen @ _LUMA if chosen.ndim == 4 else chosen
    top, left = (max(0, (length - _SIDE) // 2) for length in luma.shape[1:])
    return torch.from_numpy(luma[:, top : top + _SIDE, left : left + _SIDE] / np.float32(LEVELS))


def as_table(measurements: Sequence[Measured], sigmas: Sequence[float] = SIGMAS) -> list[list[str]]:
    """Rows of words, the heading first."""
    rows = [["PSNR in dB", *(f"σ {sigma:g}" for sigma in sigmas), "mean", "SSIM", "ms a frame"]]
    for found in measurements:
        if found.skipped:
            rows.append([f"{found.name}: skipped, {found.skipped}", *[""] * (len(sigmas) + 3)])
            continue
        mean, alike = (sum(values) / len(values) for values in (found.psnr, found.ssim))
        numbers = [*(f"{value:.2f}" for value in found.psnr), f"{mean:.2f}", f"{alike:.3f}"]
        rows.append([found.name, *numbers, f"{1000 * found.seconds_a_frame:.1f}"])
    return rows
