"""A whole video through a trained model: same size, same frame rate, window by window."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdt_fast.errors import InputError, require
from cdt_fast.files import replaced_atomically
from cdt_fast.models import DUST
from cdt_fast.progress import progress_bar
from cdt_fast.video.data import from_patches, open_source, to_patches
from cdt_fast.video.networks import Denoiser, device_of
from cdt_fast.video.settings import VideoSettings

# For sources that state no rate: folders of frames and arrays.
DEFAULT_FRAME_RATE = Fraction(25)
# Containers that take H.264 and state the frame rate. Others that FFmpeg knows by their suffix (.gif, .webm, .png) take
# other codecs; .ts and .flv do not keep every rate.
CONTAINERS = (".mp4", ".m4v", ".mov", ".mkv", ".avi")


def denoise_video(
    model: Denoiser,
    settings: VideoSettings,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    depth: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Denoise `source` and write a playable video of the same size and frame rate.

    The red, green and blue planes are denoised each on their own, at full resolution, in windows of the length that
    the model was trained with. Sound is not carried over.

    Args:
        model: the trained model.
        settings: those of its run.
        source: a video file, a folder of frames or an array file.
        target: the video file to write, in a folder that exists; its suffix is one of `CONTAINERS`.
        depth: number of layers to run, None for all.
        overwrite: replace `target` if it exists.
        progress: show a bar on stderr.

    Returns:
        `frames`, `width`, `height`, `frame_rate` and `depth` of what was written, and the model's `layers`.

    Raises:
        InputError: the source cannot be read, or the target exists or cannot be written as video.
    """
    depth = model.layers if depth is None else depth
    if not 0 <= depth <= model.layers:
        raise InputError(f"--depth must be from 0 to {model.layers}, got {depth}")
    frames = open_source(source)
    target = Path(target)
    _check_target(target, Path(source), overwrite)
    rate = frames.frame_rate or DEFAULT_FRAME_RATE
    shown = progress_bar(_colored(frames.frames()), desc=f"denoise {frames.name}", unit="frame", shown=progress)
    with replaced_atomically(target) as temporary:
        denoised = _denoised(model, settings, shown, depth)
        count, height, width = _write(temporary, target, denoised, rate)
    return {
        "frames": count,
        "width": width,
        "height": height,
        "frame_rate": float(rate),
        "depth": depth,
        "layers": model.layers,
    }


def _check_target(target: Path, source: Path, overwrite: bool) -> None:
    if target.suffix.lower() not in CONTAINERS:
        given = f"ends in {target.suffix}" if target.suffix else "has no suffix"
        raise InputError(f"{target}: {given}; the suffix names the container, one of {', '.join(CONTAINERS)}")
    if not target.parent.is_dir():
        raise InputError(f"{target}: there is no folder {target.parent}")
    if not target.exists():
        return
    if target.is_dir() or target.samefile(source):
        raise InputError(f"{target}: is {'a folder' if target.is_dir() else 'the source'}; give another file")
    if not overwrite:
        raise InputError(f"{target}: exists already; give another file, or --overwrite")


def _colored(frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Gray frames `[h, w]` as `[h, w, 1]`; color as it is."""
    for frame in frames:
        yield frame[..., np.newaxis] if frame.ndim == 2 else frame


def _denoised(
    model: Denoiser, settings: VideoSettings, frames: Iterable[np.ndarray], depth: int
) -> Iterator[np.ndarray]:
    """The denoised frames, uint8 `[h, w, channels]`, one for each of `frames`."""
    window: list[np.ndarray] = []
    before: list[np.ndarray] = []
    for frame in frames:
        window.append(frame)
        if len(window) == settings.data.window:
            yield from _denoised_window(model, settings, np.stack(window), depth)
            before, window = window, []
    if window:
        # The rest is filled up with frames from before, so that it too has the context the model was trained with.
        context = before[len(window) :]
        yield from _denoised_window(model, settings, np.stack([*context, *window]), depth)[len(context) :]


def _denoised_window(model: Denoiser, settings: VideoSettings, frames: np.ndarray, depth: int) -> np.ndarray:
    patch = settings.data.patch
    height, width = frames.shape[1:3]
    planes = torch.from_numpy(frames).to(device_of(model)).permute(3, 0, 1, 2).to(torch.float32) / 255
    planes = torch.nn.functional.pad(planes, (0, -width % patch, 0, -height % patch), mode="replicate")
    # A plane at a time: at full size the codes of one are large enough.
    result = torch.cat([denoised_frames(model, settings, plane.unsqueeze(0), depth) for plane in planes])
    levels = (result * 255).round_().clamp_(0, 255).to(torch.uint8)
    return levels[..., :height, :width].permute(1, 2, 3, 0).cpu().numpy()


@torch.no_grad()
def denoised_frames(model: Denoiser, settings: VideoSettings, frames: Tensor, depth: int | None = None) -> Tensor:
    """Denoise windows of frames.

    Args:
        model, settings: the model and the settings of its run.
        frames: `[b, T, h, w]` in [0, 1], h and w multiples of the patch.
        depth: number of layers to run, None for all.

    Returns:
        `[b, T, h, w]`, not clipped to [0, 1].
    """
    sequence = settings.data.sequence
    batch, time, height, width = frames.shape
    if not isinstance(model, DUST) and (height, width) != (settings.data.size,) * 2:
        raise InputError(
            f"a vit denoises frames of the size it was trained on, {settings.data.size}x{settings.data.size}, got "
            f"{width}x{height}"
        )
    tokens = model(to_patches(frames, settings.data.patch, sequence), depth=depth)
    return from_patches(tokens, (batch, time, height, width), settings.data.patch, sequence)


def _write(path: Path, target: Path, frames: Iterator[np.ndarray], rate: Fraction) -> tuple[int, int, int]:
    """Encode `frames` at `path`; the messages name `target`. Returns frames, height and width."""
    av = require("av", "video", "writing video")
    count = height = width = 0
    try:
        with av.open(str(path), "w") as container:
            stream = None
            for frame in frames:
                if stream is None:
                    height, width = frame.shape[:2]
                    stream = container.add_stream("libx264", rate=rate, options={"crf": "16", "preset": "medium"})
                    stream.width, stream.height = width, height
                    # 4:2:0 is what every player takes; it needs even sides.
                    stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
                    # What FFmpeg turns RGB into; untagged, players take pictures of HD size for BT.709.
                    stream.codec_context.colorspace = av.video.reformatter.Colorspace.smpte170m
                    stream.codec_context.color_range = av.video.reformatter.ColorRange.MPEG
                picture = np.repeat(frame, 3, axis=2) if frame.shape[2] == 1 else frame
                for packet in stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")):
                    container.mux(packet)
                count += 1
            if stream is not None:
                container.mux(stream.encode(None))
    except (av.error.FFmpegError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(error.errno, error.strerror) from error
        raise InputError(f"{target}: cannot be written as video ({error})") from error
    return count, height, width
