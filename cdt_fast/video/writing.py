"""Writing frames as a playable video that is shown, and sounds, like the source they come from."""

import errno
import functools
import io
from collections.abc import Iterable, Iterator
from fractions import Fraction
from heapq import merge
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.checks import InputError, require
from cdt_fast.video.data.source import DEFAULT_FRAME_RATE, FrameSource
from cdt_fast.video.data.video_file import FULL_RANGE, LIMITED_RANGE, UNSPECIFIED, VideoFile, is_cover, yuv_matrix

# Containers that take H.264 and state the frame rate. Others that FFmpeg knows by their suffix (.gif, .webm, .png) take
# other codecs; .ts and .flv do not keep every rate, and .avi holds one rate alone.
CONTAINERS = (".mp4", ".m4v", ".mov", ".mkv")
_TICKS = 90_000  # a second, at least, of a video's frame times
_TIME_TOLERANCE = Fraction(2, 1000)  # containers round times to milliseconds or coarser ticks
_TRIED_PACKETS = 3
_PRIMING = Fraction(1, 10)  # seconds, at most, of silence that encoders of sound put first
_ROUNDED = 1 << 2 | 1 << 18  # SWS_BICUBIC, its default, and SWS_ACCURATE_RND of FFmpeg's scaler
# Tags of a file itself. With "timecode" FFmpeg would refuse rates that no timecode has.
_FILE_TAGS = {"major_brand", "minor_version", "compatible_brands", "encoder", "software", "timecode", "duration"}
_STREAM_TAGS = ("title", "language")
_LATIN_1 = {0xDC00 + byte: byte for byte in range(128, 256)}  # from what "surrogateescape" makes of bytes
_CHAPTER_TRACK = "bin_data"  # FFmpeg's name of the texts of an MP4's chapters
# Without macroblock trees, whose assembly reads beyond small frames: the same frames are then the same bytes. With its
# trellis, without which noise of σ 30 is coded as 27, "veryfast" is as good as "medium", in half of the time.
_ENCODING = {"crf": "16", "preset": "veryfast", "trellis": "1", "x264-params": "mbtree=0"}


def check_target(target: Path, source: Path, overwrite: bool) -> None:
    """Raise InputError for a file that cannot be written."""
    if target.suffix.lower() not in CONTAINERS:
        given = f"ends in {target.suffix}" if target.suffix else "has no suffix"
        raise InputError(f"{target}: {given}; the suffix names the container, one of {', '.join(CONTAINERS)}")
    if not target.parent.is_dir():
        raise InputError(f"{target}: there is no folder {target.parent}")
    if target.exists() and (target.is_dir() or target.samefile(source)):
        raise InputError(f"{target}: is {'a folder' if target.is_dir() else 'the source'}; give another file")
    if target.exists() and not overwrite:
        raise InputError(f"{target}: exists already; give another file, or --overwrite")


def write_video(
    path: Path, target: Path, frames: Iterator[np.ndarray], source: FrameSource
) -> tuple[dict[str, Any], list[str]]:
    """Encode frames as H.264, with the times, the tags and the sound of what they were read from.

    Args:
        path, target: where to write, and what messages call it.
        frames: uint8 `[h, w, 1 or 3]`, as many as `source` has; each comes after `source` gave its own.

    Returns:
        What was written, and a line for each thing of the source that did not come through.
    """
    av = require("av", "video", "writing video")
    rate, count = source.frame_rate or DEFAULT_FRAME_RATE, 0
    lost, notes = list[str](), list[str]()
    try:
        first = next(frames)
        height, width = first.shape[:2]
        tags = {"colorspace": yuv_matrix(UNSPECIFIED, height, width), "color_range": LIMITED_RANGE, **source.tags}
        with av.open(str(path), "w") as container:
            # 4:2:0 is what every player takes; it needs even sides.
            pixels = {"width": width, "height": height, "pix_fmt": "yuv444p" if width % 2 or height % 2 else "yuv420p"}
            stream = container.add_stream("libx264", rate=rate, options=_ENCODING, **pixels, **tags)
            pictures = _encoded(stream, chain([first], frames), source, rate)
            sound = _carried(source, container, lost, notes) if isinstance(source, VideoFile) else iter(())
            for packet in merge(pictures, sound, key=lambda packet: packet.dts * packet.time_base):
                count += packet.stream.type == "video"
                container.mux(packet)
        if isinstance(source, VideoFile):
            with source.opened() as opened, av.open(str(path)) as written:
                names = _tags(opened, source.stream(opened)) - _tags(written, written.streams.video[0])
            lost += [f"the tag {name}" for name in sorted(names)]
    except InputError:
        raise
    except (av.error.FFmpegError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(error.errno, error.strerror) from error
        raise InputError(f"{target}: cannot be written as video ({error})") from error
    if lost := [*source.lost, *dict.fromkeys(lost)]:
        notes.append(f"does not come through: {', '.join(lost)}")
    return {"frames": count, "width": width, "height": height, "frame_rate": float(rate)}, notes


def _encoded(stream: Any, frames: Iterable[np.ndarray], source: FrameSource, rate: Fraction) -> Iterator[Any]:
    """Yield the packets of frames, at the steady rate until one departs from it, then at their own times."""
    av = require("av", "video", "writing video")
    tick = Fraction(1, rate.numerator * -(-_TICKS // rate.numerator)) if source.times else 1 / rate
    stream.codec_context.time_base = stream.time_base = tick
    last, even = -1, True
    for number, frame in enumerate(frames):
        colored = np.ascontiguousarray(np.broadcast_to(frame, (stream.height, stream.width, 3)))
        picture = av.VideoFrame.from_ndarray(colored, format="rgb24")
        picture.colorspace = yuv_matrix(stream.colorspace, stream.height, stream.width)
        picture = _yuv(picture, stream.pix_fmt, stream.color_range == FULL_RANGE)
        steady = number / rate
        shown = source.times[number] - source.times[0] if source.times else steady
        even = even and abs(shown - steady) <= _TIME_TOLERANCE
        last = max(last + 1, round((steady if even else shown) / tick))
        picture.time_base, picture.pts = tick, last
        yield from stream.encode(picture)
    for packet in stream.encode(None):
        if packet.pts == last and source.lasting:
            packet.duration = round(source.lasting / tick)
        yield packet


@functools.cache
def _full_levels() -> np.ndarray:
    """Return the levels of full range, uint8 `[3, 65536]`, for each of limited range in 16 bits."""
    least, zero, scale = np.array([[16, 128, 128], [0, 128, 128], [255 / 219, 255 / 224, 255 / 224]])[..., None]
    return np.rint((np.arange(2**16) / 256 - least) * scale + zero).clip(0, 255).astype(np.uint8)


def _yuv(picture: Any, form: str, full: bool) -> Any:
    """Convert RGB. To full range by hand: FFmpeg takes half a level from both differences of colors, each time."""
    av = require("av", "video", "writing video")
    if full:
        limited = picture.reformat(format="yuv444p16le", dst_color_range=LIMITED_RANGE).to_ndarray()
        planes = np.stack([level[limited[..., plane]] for plane, level in enumerate(_full_levels())])
        converted = av.VideoFrame.from_ndarray(planes, format="yuv444p")
        converted.colorspace, converted.color_range, picture = picture.colorspace, FULL_RANGE, converted
    return picture.reformat(format=form, dst_color_range=1 + full, interpolation=_ROUNDED)


def _carried(source: VideoFile, container: Any, lost: list[str], notes: list[str]) -> Iterator[Any]:
    """Copy tags, then yield the packets of sound; what the container does not take goes into `lost` and `notes`."""
    start, carried = source.times[0], {}
    with source.opened() as opened:
        chapters, video = opened.chapters(), source.stream(opened)
        lost += ["chapters"] * bool(chapters)
        container.metadata.update(_texts(opened, {name for name in opened.metadata if name.lower() not in _FILE_TAGS}))
        container.streams.video[0].metadata.update(_texts(video, _STREAM_TAGS))
        for stream in opened.streams:
            if stream.type == "audio" and stream.codec_context is not None:
                if _takes(container.format.name, source, stream.index):
                    there = carried[stream.index] = container.add_stream_from_template(stream)
                    there.disposition = stream.disposition.value
                    there.metadata.update(_texts(stream, _STREAM_TAGS))
                else:
                    sound = f"sound in {stream.codec_context.name}"
                    notes.append(f"{sound} does not come through in this container; .mkv takes most")
            elif stream is not video and not (chapters and stream.type == "data" and stream.name == _CHAPTER_TRACK):
                lost.append(_named(stream))
        heard = [opened.streams[index] for index in carried]
        begins = [stream.start_time * stream.time_base for stream in heard if stream.start_time is not None]
        if container.format.name != "matroska" and min(begins, default=start) < start - _PRIMING:
            lost.append("sound before the first frame")  # which an edit list hides
        if heard:
            yield from _assigned(opened.demux(heard), carried, start, lost)


def _texts(tagged: Any, names: Iterable[str]) -> dict[str, str]:
    """Return tags, whose bytes that are not UTF-8 are taken for Latin-1, as in many old files."""
    found = {"title": tagged.metadata.get("name"), **tagged.metadata}  # what MP4 calls a track's title
    return {name: found[name].translate(_LATIN_1) for name in names if found.get(name)}


def _tags(container: Any, video: Any) -> set[str]:
    streams = (video, *container.streams.audio)
    pairs = ((stream.type, *tag) for stream in streams for tag in _texts(stream, _STREAM_TAGS).items())
    named = {f"{name} of {kind} ({text})" for kind, name, text in pairs if text != "und"}
    return {name.lower() for name in container.metadata} - _FILE_TAGS | named


def _named(stream: Any) -> str:
    if stream.type == "video":
        return "a cover picture" if is_cover(stream) else "a second video"
    kind = {"audio": "sound", "attachment": "an attachment", "subtitle": "subtitles"}.get(stream.type, "data")
    name = stream.codec_context.name if stream.codec_context else getattr(stream, "name", None)
    return kind if stream.type == "subtitle" else f"{kind} ({name or 'of a format that FFmpeg does not know'})"


def _assigned(packets: Iterator[Any], carried: dict[int, Any], start: Fraction, lost: list[str]) -> Iterator[Any]:
    """Yield the packets for the streams that carry them, their times counted from the video's first frame."""
    hidden, last, begun = {}, {}, set[int]()
    for packet in packets:
        if packet.dts is None or packet.pts is None:
            continue  # the last one of a stream, which is empty
        index, shift = packet.stream.index, round(start / packet.time_base)
        if packet.dts < last.get(index, packet.dts):
            lost.append("sound from where its clock jumps back")
            return
        last[index] = packet.dts
        packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
        # From PyAV 19 on, a stream says by itself how much of its beginning is not heard.
        whole = index not in begun and getattr(packet.stream.codec_context, "initial_padding", 0)
        packet.stream = carried[index]
        if packet.is_discard and not whole:
            hidden[index] = packet  # what an edit list cut off is not heard; a decoder needs the last of it
            continue
        if not packet.is_discard:
            begun.add(index)
        if index in hidden:
            yield hidden.pop(index)
        yield packet


def _takes(form: str, source: VideoFile, index: int) -> bool:
    """Tell whether a container takes the first packets of a stream: its list of codecs promises more than it keeps."""
    av = require("av", "video", "carrying over sound")
    try:
        with source.opened() as opened, av.open(io.BytesIO(), "w", format=form) as trial:
            there = trial.add_stream_from_template(opened.streams[index])
            packets = _assigned(opened.demux(opened.streams[index]), {index: there}, source.times[0], [])
            for packet in islice(packets, _TRIED_PACKETS):
                trial.mux(packet)
    except (av.error.FFmpegError, ValueError):
        return False
    return True
