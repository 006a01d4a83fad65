"""Writing frames as a playable video, with the frame times and the sound of the source they come from."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError, require
from cdt_fast.video.data import FrameSource
from cdt_fast.video.data.video_file import VideoFile

# For sources that state no rate: folders of frames and arrays.
DEFAULT_FRAME_RATE = Fraction(25)
# Containers that take H.264 and state the frame rate. Others that FFmpeg knows by their suffix (.gif, .webm, .png) take
# other codecs; .ts and .flv do not keep every rate.
CONTAINERS = (".mp4", ".m4v", ".mov", ".mkv", ".avi")
_ONE_RATE = ".avi"  # holds frames at one rate alone
_TICK = Fraction(1, 90_000)  # of uneven frame times, in seconds
_TRIED_PACKETS = 3


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


def write_video(
    path: Path, target: Path, frames: Iterator[np.ndarray], source: FrameSource
) -> tuple[dict[str, Any], list[str]]:
    """Encode frames as H.264.

    Args:
        path: where to write.
        target: what messages call it.
        frames: uint8 `[h, w, 1 or 3]`, as many as `source` has.
        source: where frame times and sound come from.

    Returns:
        `frames`, `width`, `height` and `frame_rate` of what was written, and a line for each thing of the source that
        did not come through.

    Raises:
        InputError: they cannot be written as video.
        OSError: the disk is full.
    """
    av = require("av", "video", "writing video")
    rate = source.frame_rate or DEFAULT_FRAME_RATE
    times, notes = source.uneven_times(), []
    if times is not None and target.suffix.lower() == _ONE_RATE:
        notes.append(f"uneven frame times do not come through in {target.suffix}; .mp4 and .mkv hold them")
        times = None
    count = height = width = 0
    try:
        with av.open(str(path), "w") as container, _carried_sound(source, container, notes) as write_sound_until:
            stream = None
            for count, frame in enumerate(frames, 1):
                if stream is None:
                    height, width = frame.shape[:2]
                    stream = _video_stream(av, container, rate, height, width)
                    if times is not None:
                        stream.codec_context.time_base = stream.time_base = _TICK
                pixels = np.repeat(frame, 3, axis=2) if frame.shape[2] == 1 else frame
                picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                if times is not None:
                    # Of a damaged clip more frames may come than packets have times: they follow, a millisecond apart.
                    late = max(0, count - len(times))
                    time = times[min(count, len(times)) - 1] + Fraction(late, 1000)
                    picture.time_base, picture.pts = _TICK, round(time / _TICK)
                for packet in stream.encode(picture):
                    container.mux(packet)
                    if packet.dts is not None:
                        write_sound_until(packet.dts * packet.time_base)
            if stream is not None:
                container.mux(stream.encode(None))
                write_sound_until(None)
    except (av.error.FFmpegError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(error.errno, error.strerror) from error
        raise InputError(f"{target}: cannot be written as video ({error})") from error
    return {"frames": count, "width": width, "height": height, "frame_rate": float(rate)}, notes


def _video_stream(av: Any, container: Any, rate: Fraction, height: int, width: int) -> Any:
    # Without macroblock trees, whose assembly reads beyond small frames: the same frames are then the same bytes.
    options = {"crf": "16", "preset": "medium", "x264-params": "mbtree=0"}
    stream = container.add_stream("libx264", rate=rate, options=options)
    stream.width, stream.height = width, height
    # 4:2:0 is what every player takes; it needs even sides.
    stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
    # What FFmpeg turns RGB into; untagged, players take pictures of HD size for BT.709.
    stream.codec_context.colorspace = av.video.reformatter.Colorspace.smpte170m
    stream.codec_context.color_range = av.video.reformatter.ColorRange.MPEG
    return stream


@contextmanager
def _carried_sound(
    source: FrameSource, container: Any, notes: list[str]
) -> Iterator[Callable[[Fraction | None], None]]:
    """The sound of `source`, packet by packet as it is, on its way into a container that nothing is in yet.

    Yields what writes the packets up to a time in seconds (None: all that are left); what the container does not take
    is added to `notes`.
    """
    if not isinstance(source, VideoFile):
        yield lambda _: None
        return
    reading = source.opened()
    opened, _ = reading.__enter__()
    try:
        carried = {}
        for stream in opened.streams:
            if stream.type == "audio" and stream.codec_context is not None:
                if _takes(container.format.name, source, stream.index):
                    carried[stream.index] = container.add_stream_from_template(stream)
                else:
                    name = stream.codec_context.name
                    notes.append(f"sound in {name} does not come through in this container; .mkv takes most")
            elif stream.type == "subtitle":
                notes.append("subtitles do not come through")
        streams = [opened.streams[index] for index in carried]
        packets = _assigned(opened.demux(streams), carried, source.start) if streams else iter(())
        waiting = next(packets, None)

        def write_until(time: Fraction | None) -> None:
            nonlocal waiting
            while waiting is not None and (time is None or waiting.dts * waiting.time_base <= time):
                container.mux(waiting)
                waiting = next(packets, None)

        yield write_until
    finally:
        reading.__exit__(None, None, None)  # what fails meanwhile is the writing, which has its own messages


def _assigned(packets: Iterator[Any], carried: dict[int, Any], start: Fraction) -> Iterator[Any]:
    """The packets for the streams that carry them, their times from the video's first frame."""
    for packet in packets:
        if packet.dts is None or packet.pts is None:
            continue  # the last one of a stream, which is empty
        shift = round(start / packet.time_base)
        packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
        packet.stream = carried[packet.stream.index]
        yield packet


def _takes(form: str, source: VideoFile, index: int) -> bool:
    """Whether a container takes the first packets of a stream: its list of codecs promises more than it keeps."""
    av = require("av", "video", "carrying over sound")
    try:
        with source.opened() as (opened, _), av.open(io.BytesIO(), "w", format=form) as trial:
            stream = opened.streams[index]
            there = trial.add_stream_from_template(stream)
            for packet in islice(_assigned(opened.demux(stream), {index: there}, source.start), _TRIED_PACKETS):
                trial.mux(packet)
    except (av.error.FFmpegError, ValueError):
        return False
    return True
