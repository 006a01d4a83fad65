"""A video file, decoded with PyAV from its first packet to its last.

Nothing is sought and no header is believed: seeking by timestamp fails on some surveillance data sets, and header
frame counts are wrong in others (682 written, 341 there). What could be decoded of a damaged file comes with notes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cdt_fast.errors import InputError, require
from cdt_fast.video.data.display import Display
from cdt_fast.video.data.source import DEFAULT_FRAME_RATE, FrameSource

_EXPECTED = "expected a video, a folder of frames, or a .npy or .npz file"

_READ_BYTES = 1 << 18
_MOST_ZERO_BYTES = 128 << 20  # more than the black frame of 8K that is the largest packet of nothing else
_TS_PACKET_BYTES = (188, 192, 204)
# Of the times from frame to frame that are about equal where a camera keeps its rate, and of the stated duration.
_EVEN_SHARE = 0.9
_JUMP_SECONDS = 1  # the clock of joined files starts anew; less is disorder in one file
_PICTURE_CODECS = frozenset({"mjpeg", "png", "bmp", "gif", "tiff", "webp"})

_ISO_FIRST_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"styp", b"pnot"})
_ISO_NEEDED_BOXES = frozenset({b"moov", b"moof", b"mdat"})
_EBML_HEADER = b"\x1a\x45\xdf\xa3"
_MATROSKA_SEGMENT = b"\x18\x53\x80\x67"
_RIFF_UNKNOWN_SIZE = 0xFFFFFFFF


class _Input:
    """The file that FFmpeg reads; it is stopped where nothing but zeros comes, which it would search to the end.

    Attributes:
        name: by its suffix FFmpeg knows some formats.
        zeros: bytes of zeros since the last packet, in whole blocks; set to 0 with each.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.name = str(path.absolute())
        self.zeros = 0
        self._path, self._file = path, file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        self.zeros = 0 if block.strip(b"\0") else self.zeros + len(block)
        if self.zeros > _MOST_ZERO_BYTES:
            raise InputError(
                f"{self._path}: the video is damaged: {_MOST_ZERO_BYTES >> 20} MiB up to byte {self._file.tell()} are "
                "zeros, as in a file that was never written whole; copy or download it again"
            )
        return block


class VideoFile(FrameSource):
    """Anything FFmpeg can decode that has a video stream.

    Raises:
        InputError: the file is empty, cut short, not a video, or has no video stream.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._require_whole()
        with self.opened() as (container, _):
            stream = self.stream(container)
            rate = stream.average_rate or stream.guessed_rate
            self.frame_rate = Fraction(rate) if rate else None
        self._jumped = Fraction(0)  # seconds that later times lie further on, after the clock started anew

    def _require_whole(self) -> None:
        try:
            held, declared = self.path.stat().st_size, declared_bytes(self.path)
        except OSError as error:
            raise InputError(f"{self.path}: the file cannot be read ({error.strerror})") from error
        if held == 0:
            raise InputError(f"{self.path}: the file is empty; {_EXPECTED}")
        if declared > held:
            raise InputError(
                f"{self.path}: the video is cut short: it holds {held} of {declared} bytes; copy or download it again"
            )

    @contextmanager
    def opened(self) -> Iterator[tuple[Any, _Input]]:
        """The file as FFmpeg's container, and what FFmpeg reads it through."""
        av = require("av", "video", "reading a video file")
        try:
            with self.path.open("rb") as file:
                source = _Input(self.path, file)
                # Without a protocol to open others by, a playlist reads neither a neighboring file nor an address.
                options = {"protocol_whitelist": "none"}
                with av.open(
                    source, options=options, metadata_errors="surrogateescape", buffer_size=_READ_BYTES
                ) as container:
                    yield container, source
        except InputError:
            raise
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise InputError(f"{self.path}: cannot be read as a video ({_reason(error)}); {_EXPECTED}") from error

    def stream(self, container: Any) -> Any:
        """The video among the streams of an opened file: FFmpeg's choice, never a cover picture.

        Raises:
            InputError: there is none that can be decoded.
        """
        # FFmpeg shows text files as the video of a terminal that types them.
        if container.format.name == "tty":
            raise InputError(f"{self.path}: is a text file, not a video; {_EXPECTED}")
        videos = [stream for stream in container.streams.video if not is_cover(stream)]
        if not videos and container.streams.video:
            raise InputError(f"{self.path}: has no video; only a cover picture; {_EXPECTED}")
        decodable = [stream for stream in videos if stream.codec_context is not None]
        if not decodable:
            raise InputError(f"{self.path}: has no video stream that can be decoded; {_EXPECTED}")
        # Posters and previews, which FFmpeg may rate higher.
        moving = [s for s in decodable if s.frames != 1 and s.codec_context.name not in _PICTURE_CODECS] or decodable
        best = container.streams.best("video")
        return best if best in moving else moving[0]

    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        av = require("av", "video", "reading a video file")
        count = damaged_packets = damaged_frames = 0
        display = Display(self.path)
        self.times, self.lost, self._jumped = [], display.lost, Fraction(0)
        with self.opened() as (container, source):
            stream = self.stream(container)
            stream.thread_type = "AUTO"
            due: list[Fraction] = []
            others_end = Fraction(0)
            try:
                for packet in container.demux():
                    source.zeros = 0
                    if packet.stream is not stream:
                        if packet.pts is not None:
                            others_end = max(others_end, (packet.pts + (packet.duration or 0)) * packet.time_base)
                        continue
                    damaged_packets += packet.is_corrupt
                    if packet.pts is not None and not packet.is_discard:
                        due.append(packet.pts * packet.time_base)
                    for frame in _decoded(packet, lenient=count == 0):
                        damaged_frames += frame.is_corrupt
                        self.times.append(self._time(frame, stream))
                        pixels = display.shown(frame, stream)
                        self.tags = display.tags
                        yield f"frame {count}", pixels
                        count += 1
            except av.error.FFmpegError as error:
                raise InputError(
                    f"{self.path}: the video is damaged or cut short: decoding fails after {count} frames "
                    f"({_reason(error)}); copy or download it again"
                ) from error
            missing, marked = _missing(self.times), max(damaged_packets, damaged_frames)
            stated, empty = stream.frames, missing
            if container.format.name == "avi" and self.times:
                empty += round(self.times[0] * (self.frame_rate or 0))  # it delays its first frame by empty ones
            if "mp4" in container.format.name.split(","):
                # The count includes pictures that an edit list hides, and those that need others from before the start.
                entries = [entry for entry in stream.index_entries if not entry.is_discard]
                start = due[:1] if entries and entries[0].is_keyframe else self.times[:1]
                stated = len(entries) - sum(time < start[0] for time in due if start)
            ends, duration = self._ends(stream, others_end, (container.duration or 0) / av.time_base)
            signs = {
                f"the decoder marks {marked} of {count} frames as damaged": marked > 0,
                f"it holds {count} of the {stated} frames that it states": stated > count + empty,
                f"it ends after {ends:.3g} of the {duration:.3g} s that it states": not stated
                and ends < _EVEN_SHARE * duration,
                f"{missing} frames are missing between the {count} that it holds, by their times": missing > 0,
                "it begins or ends within a packet": container.format.name == "mpegts"
                and all(self.path.stat().st_size % size for size in _TS_PACKET_BYTES),
            }
        self.notes = [f"{self.path}: may be damaged or cut short: {sign}" for sign, seen in signs.items() if seen]
        if display.interlaced:
            part = "" if display.interlaced == count else f" in {display.interlaced} of {count} frames"
            self.notes.append(
                f"{self.path}: is interlaced{part}: deinterlace it first, for example with ffmpeg -vf bwdif"
            )

    def _time(self, frame: Any, stream: Any) -> Fraction:
        stamp = frame.dts if frame.pts is None else frame.pts
        if not self.times:
            return Fraction(0) if stamp is None else stamp * stream.time_base
        following = self.times[-1] + 1 / (self.frame_rate or DEFAULT_FRAME_RATE)
        if stamp is None:
            return following
        time = stamp * stream.time_base + self._jumped
        if time < self.times[-1] - _JUMP_SECONDS:
            self._jumped += following - time
            return following
        return time

    def _ends(self, stream: Any, others_end: Fraction, of_file: float) -> tuple[float, float]:
        """When the file ends and when it states that it does, in seconds of one clock."""
        last, steps = self.times[-1] if self.times else Fraction(0), max(1, len(self.times) - 1)
        ends = float(max(last + (last - self.times[0]) / steps if self.times else last, others_end))
        if stream.duration is None:
            return ends, of_file
        return ends - float((stream.start_time or 0) * stream.time_base), float(stream.duration * stream.time_base)


def is_cover(stream: Any) -> bool:
    """Whether a stream holds a cover picture, or thumbnails of chapters."""
    return bool(stream.disposition & type(stream.disposition).attached_pic)


def _decoded(packet: Any, lenient: bool) -> list[Any]:
    try:
        return packet.decode()
    except ValueError:
        # FFmpeg's "invalid data". Recordings of a live stream begin between two key frames, and what comes before
        # the first picture cannot be decoded in a whole file either.
        if lenient:
            return []
        raise


def _missing(times: list[Fraction]) -> int:
    """How many frames fit into the gaps of a clip whose frames otherwise come at one rate."""
    steps = sorted(later - earlier for earlier, later in pairwise(times))
    usual = steps[len(steps) // 2] if steps else 0
    even = sum(0.5 * usual < step < 1.5 * usual for step in steps)
    if usual <= 0 or even < _EVEN_SHARE * len(steps):
        return 0
    return sum(round(step / usual) - 1 for step in steps if step >= 1.5 * usual)


def _pixels(frame: Any) -> np.ndarray:
    """As it is to be shown: turned by what the file says of its orientation, in quarters of a turn."""
    pixels = frame.to_ndarray(format="gray" if frame.format.name.startswith("gray") else "rgb24")
    quarters = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, quarters)) if quarters else pixels


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def declared_bytes(path: Path) -> int:
    """Bytes that the file needs to have for its picture data to be whole; its own size where it does not say.

    Frame counts and durations in headers are often wrong in whole files, so they prove nothing. The sizes of the parts
    that hold the pictures are what a player walks by: MP4 and QuickTime boxes with pictures or their index, AVI `movi`
    lists, the Matroska segment. A part that ends past the end of the file is missing bytes: the one certain sign that
    it was cut short.
    """
    actual = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(12)
        if start[4:8] in _ISO_FIRST_BOXES:
            end = _iso_end(file, actual)
        elif start[:4] == b"RIFF" and start[8:12] == b"AVI ":
            end = _avi_end(file, actual)
        elif start[:4] == _EBML_HEADER:
            end = _matroska_end(file)
        else:
            end = 0
    return max(end, actual)


def _iso_end(file: BinaryIO, actual: int) -> int:
    position = 0
    end = 0
    while position + 16 <= actual:
        file.seek(position)
        size, kind, large = struct.unpack(">I4sQ", file.read(16))
        if size == 1:
            size = large
        if size < 8:
            break
        position += size
        if kind in _ISO_NEEDED_BOXES:
            end = position
    return end


def _avi_end(file: BinaryIO, actual: int) -> int:
    position = 0
    end = 0
    while position + 12 <= actual:
        file.seek(position)
        kind, size, form = struct.unpack("<4sI4s", file.read(12))
        if kind == b"RIFF":
            # Files above 1 GB are a row of RIFF chunks, each with its own list of pictures.
            position += 12
            continue
        if size == _RIFF_UNKNOWN_SIZE:
            break
        if kind == b"LIST" and form == b"movi":
            end = position + 8 + size
        position += 8 + size + size % 2
    return end


def _matroska_end(file: BinaryIO) -> int:
    file.seek(len(_EBML_HEADER))
    header_size = _ebml_number(file)
    if header_size is None:
        return 0
    file.seek(header_size, os.SEEK_CUR)
    if file.read(4) != _MATROSKA_SEGMENT:
        return 0
    size = _ebml_number(file)
    return 0 if size is None else file.tell() + size


def _ebml_number(file: BinaryIO) -> int | None:
    """A variable-length size: the leading zero bits of the first byte count the bytes that follow. None: unknown."""
    first = file.read(1)
    if not first or first[0] == 0:
        return None
    following = 8 - first[0].bit_length()
    mask = (1 << (7 - following)) - 1
    value = int.from_bytes(bytes([first[0] & mask]) + file.read(following), "big")
    unknown = (1 << (7 * (following + 1))) - 1
    return None if value == unknown else value
