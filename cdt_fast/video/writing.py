"""Writing frames as a playable video that is shown, and sounds, like the source they come from."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError, require
from cdt_fast.video.data import FrameSource
from cdt_fast.video.data.source import DEFAULT_FRAME_RATE
from cdt_fast.video.data.video_file import LIMITED_RANGE, UNSPECIFIED, VideoFile, is_cover, yuv_matrix

# Containers that take H.264 and state the frame rate. Others that FFmpeg knows by their suffix (.gif, .webm, .png) take
# other codecs; .ts and .flv do not keep every rate.
CONTAINERS = (".mp4", ".m4v", ".mov", ".mkv", ".avi")
_ONE_RATE = ".avi"  # holds frames at one rate alone
_TICKS = 90_000  # a second, at least, of a video's frame times
_TIME_TOLERANCE = Fraction(2, 1000)  # containers round times to milliseconds or coarser ticks
_TRIED_PACKETS = 3
# Tags of a file itself. With "timecode" FFmpeg would refuse rates that no timecode has.
_FILE_TAGS = frozenset(
    {"major_brand", "minor_version", "compatible_brands", "encoder", "software", "timecode", "duration"}
)
_STREAM_TAGS = ("title", "language")
_CHAPTER_TRACK = "bin_data"  # FFmpeg's name of the texts of an MP4's chapters


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
        frames: uint8 `[h, w, 1 or 3]`, as many as `source` has; each comes after `source` gave its own.
        source: where frame times, sound and how to show the frames come from.

    Returns:
        `frames`, `width`, `height` and `frame_rate` of what was written, and a line for each thing of the source that
        did not come through.

    Raises:
        InputError: they cannot be written as video.
        OSError: the disk is full.
    """
    av = require("av", "video", "writing video")
    rate = source.frame_rate or DEFAULT_FRAME_RATE
    written = 0
    lost: list[str] = []
    notes: list[str] = []
    try:
        first = next(frames)
        height, width = first.shape[:2]
        times = [] if target.suffix.lower() == _ONE_RATE else source.times
        tick = Fraction(1, rate.numerator * -(-_TICKS // rate.numerator)) if times else 1 / rate
        ticks = _ticks(times, rate, tick)
        tags = {"colorspace": yuv_matrix(UNSPECIFIED, height, width), "color_range": LIMITED_RANGE, **source.tags}
        matrix, color_range = yuv_matrix(tags["colorspace"], height, width), tags["color_range"] or LIMITED_RANGE
        with av.open(str(path), "w") as container:
            stream = _video_stream(container, rate, tick, height, width, tags)
            with _carried(source, container, lost, notes) as write_carried_until:
                for frame in chain([first], frames):
                    pixels = np.ascontiguousarray(np.broadcast_to(frame, (height, width, 3)))
                    picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                    picture.colorspace = matrix
                    picture = picture.reformat(format=stream.pix_fmt, dst_color_range=color_range)
                    picture.time_base, picture.pts = tick, next(ticks)
                    written += 1
                    for packet in stream.encode(picture):
                        container.mux(packet)
                        if packet.dts is not None:
                            write_carried_until(packet.dts * packet.time_base)
                container.mux(stream.encode(None))
                write_carried_until(None)
        lost += _lost_tags(path, source)
    except (av.error.FFmpegError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(error.errno, error.strerror) from error
        raise InputError(f"{target}: cannot be written as video ({error})") from error
    if not times and not all(_keeps_rate(source.times, rate, number) for number in range(len(source.times))):
        notes.append(f"uneven frame times do not come through in {target.suffix}; .mp4 and .mkv hold them")
    lost = [*source.lost, *lost]
    if lost:
        notes.append(f"does not come through: {', '.join(dict.fromkeys(lost))}")
    return {"frames": written, "width": width, "height": height, "frame_rate": float(rate)}, notes


def _video_stream(container: Any, rate: Fraction, tick: Fraction, height: int, width: int, tags: dict[str, Any]) -> Any:
    # Without macroblock trees, whose assembly reads beyond small frames: the same frames are then the same bytes.
    options = {"crf": "16", "preset": "medium", "x264-params": "mbtree=0"}
    stream = container.add_stream("libx264", rate=rate, options=options)
    stream.width, stream.height = width, height
    # 4:2:0 is what every player takes; it needs even sides.
    stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
    stream.codec_context.time_base = stream.time_base = tick
    for name, value in tags.items():
        setattr(stream.codec_context, name, value)
    return stream


def _keeps_rate(times: list[Fraction], rate: Fraction, number: int) -> bool:
    return abs(times[number] - times[0] - number / rate) <= _TIME_TOLERANCE


def _ticks(times: list[Fraction], rate: Fraction, tick: Fraction) -> Iterator[int]:
    """When each frame is shown: at the steady rate until a frame departs from it, then at the frames' own times.

    `times` grows while frames are read; if it is empty, all frames are at the rate.
    """
    even, last = True, -1
    for number in count():
        even = even and (not times or _keeps_rate(times, rate, number))
        last = max(last + 1, round((number / rate if even else times[number] - times[0]) / tick))
        yield last


@contextmanager
def _carried(
    source: FrameSource, container: Any, lost: list[str], notes: list[str]
) -> Iterator[Callable[[Fraction | None], None]]:
    """Tags, chapters and sound of `source`, packet by packet as it is, on their way into a container.

    Yields what writes the packets up to a time in seconds (None: all that are left); what the container does not take
    is added to `lost` and `notes`.
    """
    if not isinstance(source, VideoFile):
        yield lambda _: None
        return
    start = source.times[0]
    reading = source.opened()
    opened = reading.__enter__()
    try:
        chapters = opened.chapters()
        if chapters and container.format.name == "avi":
            lost.append("chapters")
        else:
            container.set_chapters(_moved(chapters, start))
        tags = opened.metadata.items()
        container.metadata.update((name, _text(tag)) for name, tag in tags if name.lower() not in _FILE_TAGS)
        video = source.stream(opened)
        _copy_tags(video, container.streams.video[0])
        carried = {}
        for stream in opened.streams:
            if stream.type == "audio" and stream.codec_context is not None:
                if _takes(container.format.name, source, stream.index):
                    carried[stream.index] = container.add_stream_from_template(stream)
                    carried[stream.index].disposition = stream.disposition.value
                    _copy_tags(stream, carried[stream.index])
                else:
                    name = stream.codec_context.name
                    notes.append(f"sound in {name} does not come through in this container; .mkv takes most")
            elif stream is not video and not (chapters and stream.type == "data" and stream.name == _CHAPTER_TRACK):
                lost.append(_named(stream))
        streams = [opened.streams[index] for index in carried]
        packets = _assigned(opened.demux(streams), carried, start, lost) if streams else iter(())
        waiting = next(packets, None)

        def write_until(time: Fraction | None) -> None:
            nonlocal waiting
            while waiting is not None and (time is None or waiting.dts * waiting.time_base <= time):
                container.mux(waiting)
                waiting = next(packets, None)

        yield write_until
    finally:
        reading.__exit__(None, None, None)  # what fails meanwhile is the writing, which has its own messages


def _moved(chapters: list[Any], start: Fraction) -> list[Any]:
    """Chapters counted from the video's first frame, without those that end before it."""
    moved = []
    for chapter in chapters:
        shift = round(start / chapter["time_base"])
        first, end = max(0, chapter["start"] - shift), chapter["end"] - shift
        if end > 0:
            metadata = {name: _text(tag) for name, tag in chapter["metadata"].items()}
            moved.append({**chapter, "start": first, "end": end, "metadata": metadata})
    return moved


def _copy_tags(stream: Any, there: Any) -> None:
    there.metadata.update({name: _text(stream.metadata[name]) for name in _STREAM_TAGS if name in stream.metadata})


def _text(tag: str) -> str:
    """A tag as it was read, whose bytes are Latin-1 where they are not UTF-8, as in many old files."""
    try:
        tag.encode()
    except UnicodeEncodeError:
        return tag.encode(errors="surrogateescape").decode("latin-1")
    return tag


def _named(stream: Any) -> str:
    """What to call a stream that is left out."""
    if stream.type == "subtitle":
        return "subtitles"
    if stream.type == "video":
        return "a cover picture" if is_cover(stream) else "a second video"
    kind = {"audio": "sound", "attachment": "an attachment"}.get(stream.type, "data")
    name = stream.codec_context.name if stream.codec_context else getattr(stream, "name", None)
    return f"{kind} ({name or 'of a format that FFmpeg does not know'})"


def _lost_tags(path: Path, source: FrameSource) -> list[str]:
    """The tags of a source that a container did not take."""
    if not isinstance(source, VideoFile):
        return []
    av = require("av", "video", "writing video")
    with source.opened() as opened, av.open(str(path)) as written:
        names = sorted(_tags(opened, source.stream(opened)) - _tags(written, written.streams.video[0]))
    return [f"the tag {name}" for name in names]


def _tags(container: Any, video: Any) -> set[str]:
    found = {name.lower() for name in container.metadata} - _FILE_TAGS
    for stream in (video, *container.streams.audio):
        found |= {f"{name} of {stream.type}" for name in _STREAM_TAGS if stream.metadata.get(name, "und") != "und"}
    return found


def _assigned(packets: Iterator[Any], carried: dict[int, Any], start: Fraction, lost: list[str]) -> Iterator[Any]:
    """The packets for the streams that carry them, their times from the video's first frame."""
    hidden, last = {}, {}
    for packet in packets:
        if packet.dts is None or packet.pts is None:
            continue  # the last one of a stream, which is empty
        index, shift = packet.stream.index, round(start / packet.time_base)
        if packet.dts < last.get(index, packet.dts):
            lost.append("sound from where its clock jumps back")
            return
        last[index] = packet.dts
        packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
        packet.stream = carried[index]
        if packet.is_discard:
            hidden[index] = packet  # what an edit list cut off is not heard; a decoder needs the last of it
            continue
        if index in hidden:
            yield hidden.pop(index)
        yield packet


def _takes(form: str, source: VideoFile, index: int) -> bool:
    """Whether a container takes the first packets of a stream: its list of codecs promises more than it keeps."""
    av = require("av", "video", "carrying over sound")
    try:
        with source.opened() as opened, av.open(io.BytesIO(), "w", format=form) as trial:
            stream = opened.streams[index]
            there = trial.add_stream_from_template(stream)
            packets = _assigned(opened.demux(stream), {index: there}, source.times[0], [])
            for packet in islice(packets, _TRIED_PACKETS):
                trial.mux(packet)
    except (av.error.FFmpegError, ValueError):
        return False
    return True
