"""A trained model on any clips, beside the transforms and libavfilter's denoisers: PSNR, SSIM and time a frame."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from cdt_fast import page
from cdt_fast.checks import InputError, MissingExtra, require
from cdt_fast.progress import progress_bar
from cdt_fast.training.report import as_png
from cdt_fast.video.data.clips import find_clips, open_source
from cdt_fast.video.data.crops import luma
from cdt_fast.video.data.windows import middle
from cdt_fast.video.denoising import Denoising
from cdt_fast.video.figures import detail, draw_frame, grid
from cdt_fast.video.networks import Denoiser
from cdt_fast.video.noise import LEVELS
from cdt_fast.video.quality import dct3d_shifted_denoise, psnr_of, ssim
from cdt_fast.video.settings import VideoSettings

SIGMAS = (10.0, 20.0, 30.0, 40.0, 50.0)  # the customary levels of white noise
_CAMERAS = (10.0,)  # levels of a camera's noise
_SIDES, _FRAMES = (160, 160), (16, 30)  # of the piece in the middle of a clip; at least and at most
_LEAST_SIDE = 16  # of the frames that the filters take
_PATCH, _WINDOW = 8, 16  # of the transform
# Each filter of libavfilter at the strength that was best of a few factors of the noise at σ 10, 30 and 50, on clips
# that models trained on; that of nlmeans ends at what the filter takes. Of a camera's noise another factor is best.
_FILTERS: dict[str, Callable[[float], str]] = {
    "nlmeans": lambda sigma: f"s={min(30.0, max(1.0, 0.8 * sigma)):.3f}:p=7:r=15",
    "dctdnoiz": lambda sigma: f"sigma={1.6 * sigma:.3f}",
    "bm3d": lambda sigma: f"sigma={4 * sigma * sigma:.3f}:block=16:bstep=4:group=8:estim=basic",
}
_FACTOR_OF_CAMERAS = {"3-D DCT, shifted grids": 2.0, "ffmpeg, dctdnoiz": 1.7, "ffmpeg, bm3d": 1.4}


class Measured(NamedTuple):
    """A denoiser on some clips."""

    name: str
    psnr: list[float]  # dB on 0..255, the mean over clips a level, those of a camera's noise last
    ssim: list[float]
    rate: float  # frames a second of the first clip, at its full size
    shown: Tensor  # `[h, w]` in [0, 1], the middle of the first clip at the level in the middle


class Comparison(NamedTuple):
    """All denoisers, the first of them the identity, and what they were measured on."""

    measured: list[Measured]
    sigmas: Sequence[float]
    of_cameras: Sequence[float]
    clean: Tensor  # the frame that is shown of each, whole, as the rates are of


def read_clips(sources: Sequence[str]) -> list[tuple[str, Iterable[np.ndarray], int]]:
    """Return the name, the frames and the number of frames of all clips in the sources."""
    clips = [clip.path for source in sources for clip in find_clips(source)]
    return [(str(path), open_source(path).frames(), sum(1 for _ in open_source(path).frames())) for path in clips]


@torch.no_grad()
def compare_denoisers(
    model: Denoiser,
    settings: VideoSettings,
    clips: Sequence[tuple[str, Iterable[np.ndarray], int]],
    at: Sequence[float] = SIGMAS,
    of_cameras: Sequence[float] = _CAMERAS,
) -> Comparison:
    """Measure a noise-adaptive model at every depth, and all `peers`, on the luma of clips with white noise and with
    that of a camera, whose missing colors were filled in from beside.

    Of each clip 160 x 160 pixels of the 30 frames in its middle (of a shorter one all) are measured, and of the first
    one the time of whole frames. The model is told the noise's deviation (in gray levels), as the peers are, and once
    estimates it, as `denoise` does. All are given the same noisy frames, in bytes.
    """
    if not settings.crops:
        raise InputError("--clips compares a network for crops, which is what train video trains by default")
    whole = [_middle(*clip) for clip in clips]
    pieces = [torch.stack([torch.from_numpy(middle(frame, _SIDES)) for frame in frames.numpy()]) for frames in whole]

    def ours(depth: int, told: bool, frames: Tensor, sigma: float) -> Tensor:
        given = (LEVELS * frames[..., None]).round().to(torch.uint8).numpy()
        denoising = Denoising(model, settings, depth, sigma if told else None)
        return torch.stack(list(denoising.exact(given))).squeeze(-1).cpu()

    named = peers()
    named |= {f"cdt_fast, {n} of {model.layers} layers": partial(ours, n, True) for n in range(1, model.layers + 1)}
    named["cdt_fast, noise estimated"] = partial(ours, model.layers, False)
    level, middle_frame, measured = at[len(at) // 2], len(whole[0]) // 2, list[Measured]()
    shown = _noisy(whole[0], level, 0)
    for name, denoise in progress_bar(named.items(), desc="compare", unit="denoiser"):
        rows: list[Any] = []
        for draw, sigma in enumerate([*at, *of_cameras]):
            found, camera = [], draw >= len(at)
            strength = sigma * (_FACTOR_OF_CAMERAS.get(name, 1.0) if camera else 1.0)
            for number, clean in enumerate(pieces):
                denoised = denoise(_noisy(clean, sigma, 1000 * draw + number, camera), strength)
                psnr = psnr_of(LEVELS * (denoised - clean).square().mean().sqrt().item())
                found.append((psnr, ssim(denoised[None], clean[None]).mean().item()))
            rows.append(np.mean(found, 0).tolist())
        psnrs, alike = map(list, zip(*rows, strict=True))
        # The filters see one frame at a time, so that a few are enough.
        noisy = shown[middle_frame - 2 : middle_frame + 2] if name.startswith("ffmpeg") else shown
        begin = time.perf_counter()
        denoised = denoise(noisy, level)
        rate = len(noisy) / (time.perf_counter() - begin)
        measured.append(Measured(name, psnrs, alike, rate, denoised[len(denoised) // 2]))
    return Comparison(measured, at, of_cameras, whole[0][middle_frame])


def as_table(found: Comparison) -> list[list[str]]:
    """Return rows of words, the heading first."""
    height, width = found.clean.shape
    rate = f"frames a second at {width}x{height}"
    cameras, white = [f"a camera's, σ {sigma:g}" for sigma in found.of_cameras], len(found.sigmas)
    rows = [["PSNR in dB", *(f"σ {sigma:g}" for sigma in found.sigmas), "mean", "SSIM", *cameras, rate]]
    for number, one in enumerate(found.measured):
        numbers = [f"{value:.2f}" for value in (*one.psnr[:white], np.mean(one.psnr[:white]))]
        numbers += [f"{np.mean(one.ssim[:white]):.3f}", *(f"{value:.2f}" for value in one.psnr[white:])]
        rows.append([one.name, *numbers, f"{one.rate:.1f}" if number else ""])
    return rows


def draw(found: Comparison) -> Any:
    """Draw what each made of a part of the same noisy frame, the clean one last."""
    part, level = detail(found.clean, min(*found.clean.shape, _SIDES[0])), len(found.sigmas) // 2
    shown = [
        (one.shown, f"{one.name}\n{one.psnr[level]:.2f} dB" + f", {one.rate:.1f} frames/s" * bool(number))
        for number, one in enumerate(found.measured)
        if " of " not in one.name
    ]
    figure, axes = grid(2, -(-(len(shown) + 1) // 2), 2.6, 3.1)
    for axis, (frame, words) in zip(axes.flat, [*shown, (found.clean, "clean\n")], strict=False):
        draw_frame(axis, frame[part], words)
    return figure


def picture(found: Comparison) -> str:
    """Return the picture for a page, or where matplotlib is not installed a line that says so."""
    caption = f"A part of a frame with noise of σ {found.sigmas[len(found.sigmas) // 2]:g}, and what each makes of it"
    try:
        return page.picture(as_png(draw(found)), caption)
    except MissingExtra as error:
        return page.paragraph(f"No picture: {error}")


def write_report(path: str | os.PathLike[str], found: Comparison, command: str) -> None:
    """Write a page with the table and the picture."""
    parts = [page.paragraph(f"`{command}` makes this page."), page.table(as_table(found)), picture(found)]
    page.write_page(path, "Denoisers side by side", parts)


def peers() -> dict[str, Callable[[Tensor, float], Tensor]]:
    """Return by name what denoises frames `[T, h, w]` in [0, 1] with noise in gray levels: nothing, the transform, and
    the filters that this build of libavfilter has."""
    there = require("av", "video", "the filters of libavfilter").filter.filters_available
    return {
        "noisy frames": lambda frames, _: frames,
        "3-D DCT, shifted grids": lambda frames, sigma: torch.cat(
            [dct3d_shifted_denoise(part[None], sigma / LEVELS, _PATCH)[0] for part in frames.split(_WINDOW)]
        ),
        **{f"ffmpeg, {name}": partial(_filtered, name) for name in _FILTERS if name in there},
    }


def _middle(name: str, frames: Iterable[np.ndarray], total: int) -> Tensor:
    """Return the luma of the frames in the middle of a clip, `[T, h, w]` in [0, 1]."""
    least, most = _FRAMES
    if total < least:
        raise InputError(f"{name}: has {total} frames, fewer than what is measured, {least}")
    wanted = min(total, most)
    start = (total - wanted) // 2
    chosen = np.stack([middle(luma(frame)) for frame in islice(frames, start, start + wanted)])
    height, width = chosen.shape[1:]
    if min(height, width) < _LEAST_SIDE:
        raise InputError(f"{name}: is {width}x{height}, and clips of at least {_LEAST_SIDE}x{_LEAST_SIDE} are measured")
    return torch.from_numpy(chosen / np.float32(LEVELS))


def _noisy(clean: Tensor, sigma: float, seed: int, camera: bool = False) -> Tensor:
    """Return frames `[T, h, w]` with noise, rounded and clipped as a file has them."""
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    if camera:
        noise = _of_a_camera(noise)
    return (LEVELS * clean + sigma * noise).round_().clamp_(0, 255) / LEVELS


def _of_a_camera(raw: Tensor) -> Tensor:
    """Return the brightness of raw pixels `[T, h, w]` of one color each, the other two linear between those beside,
    with the deviation 1."""
    height, width = raw.shape[1:]
    row, column = torch.meshgrid(torch.arange(height) % 2, torch.arange(width) % 2, indexing="ij")
    taps = torch.tensor([0.5, 1.0, 0.5])
    square, cross = torch.outer(taps, taps), torch.tensor([[0, 1, 0], [1, 4, 1], [0, 1, 0]]) / 4
    brightness = torch.zeros_like(raw)
    colors = (row < column, square, 0.299), (row == column, cross, 0.587), (row > column, square, 0.114)
    for there, kernel, weight in colors:
        known = pad((raw * there).unsqueeze(1), (1, 1, 1, 1), "reflect")
        brightness += weight * conv2d(known, kernel[None, None]).squeeze(1)
    return brightness / brightness.std()


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
