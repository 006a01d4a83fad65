"""Writing frames as a playable video, with the frame times and the sound of the source they come from."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError, require
from cdt_fast.video.data import FrameSource
from cdt_fast.video.data.sound import carried_sound

# For sources that state no rate: folders of frames and arrays.
DEFAULT_FRAME_RATE = Fraction(25)
# Containers that take H.264 and state the frame rate. Others that FFmpeg knows by their suffix (.gif, .webm, .png) take
# other codecs; .ts and .flv do not keep every rate.
CONTAINERS = (".mp4", ".m4v", ".mov", ".mkv", ".avi")
_ONE_RATE = ".avi"  # holds frames at one rate alone
_TICK = Fraction(1, 90_000)  # of uneven frame times, in seconds


@dataclass
class Written:
    """What was written, and what of the source did not come through, a line each."""

    frames: int = 0
    height: int = 0
    width: int = 0
    notes: list[str] = field(default_factory=list)


def check_target(target: Path, source: Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written before anything is computed.

    Raises:
        InputError: its suffix is no container's, its folder is missing, or there is something already.
    """
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


def write_video(path: Path, target: Path, frames: Iterator[np.ndarray], source: FrameSource) -> Written:
    """Encode frames as H.264.

    Args:
        path: where to write.
        target: what messages call it.
        frames: uint8 `[h, w, 1 or 3]`, as many as `source` has.
        source: where frame times and sound come from.

    Raises:
        InputError: they cannot be written as video.
        OSError: the disk is full.
    """
    av = require("av", "video", "writing video")
    written = Written()
    rate = source.frame_rate or DEFAULT_FRAME_RATE
    times = source.uneven_times()
    if times is not None and target.suffix.lower() == _ONE_RATE:
        written.notes.append(f"uneven frame times do not come through in {target.suffix}; .mp4 and .mkv hold them")
        times = None
    try:
        with av.open(str(path), "w") as container, carried_sound(source, container) as sound:
            written.notes += sound.notes
            stream = None
            for frame in frames:
                if stream is None:
                    written.height, written.width = frame.shape[:2]
                    stream = _video_stream(av, container, rate, written)
                    if times is not None:
                        stream.codec_context.time_base = stream.time_base = _TICK
                pixels = np.repeat(frame, 3, axis=2) if frame.shape[2] == 1 else frame
                picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                if times is not None:
                    # Of a damaged clip more frames may come than packets have times: they follow, a millisecond apart.
                    late = max(0, written.frames - len(times) + 1)
                    time = times[min(written.frames, len(times) - 1)] + Fraction(late, 1000)
                    picture.time_base, picture.pts = _TICK, round(time / _TICK)
                for packet in stream.encode(picture):
                    container.mux(packet)
                    if packet.dts is not None:
                        sound.write_until(packet.dts * packet.time_base)
                written.frames += 1
            if stream is not None:
                container.mux(stream.encode(None))
                sound.write_until(None)
    except (av.error.FFmpegError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(error.errno, error.strerror) from error
        raise InputError(f"{target}: cannot be written as video ({error})") from error
    return written


def _video_stream(av: Any, container: Any, rate: Fraction, written: Written) -> Any:
    # Without macroblock trees, whose assembly reads beyond small frames: the same frames are then the same bytes.
    options = {"crf": "16", "preset": "medium", "x264-params": "mbtree=0"}
    stream = container.add_stream("libx264", rate=rate, options=options)
    stream.width, stream.height = written.width, written.height
    # 4:2:0 is what every player takes; it needs even sides.
    stream.pix_fmt = "yuv444p" if written.width % 2 or written.height % 2 else "yuv420p"
    # What FFmpeg turns RGB into; untagged, players take pictures of HD size for BT.709.
    stream.codec_context.colorspace = av.video.reformatter.Colorspace.smpte170m
    stream.codec_context.color_range = av.video.reformatter.ColorRange.MPEG
    return stream
