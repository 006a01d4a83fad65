"""A video file, decoded with PyAV from its first packet to its last, and shown as the file says.

Nothing is sought and no header is believed: seeking by timestamp fails on some surveillance data sets, and header
frame counts are wrong in others (682 written, 341 there). What could be decoded of a damaged file comes with notes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.checks import InputError, require
from cdt_fast.video.data.source import DEFAULT_FRAME_RATE, FrameSource

_EXPECTED = "expected a video, a folder of frames, or a .npy file"
_EVEN_SHARE = 0.9  # of the steps from frame to frame that are about equal, and of the stated duration
_JUMP_SECONDS = 1  # the clock of joined files starts anew; less is disorder in one file
_PICTURE_CODECS = frozenset({"mjpeg", "png", "bmp", "gif", "tiff", "webp"})
# SWS_POINT, SWS_FULL_CHR_H_INT and SWS_ACCURATE_RND of FFmpeg's scaler, whose fast path to RGB truncates. The denoiser
# tells colors of half the resolution by their pixels, which are to be repeated. PyAV 17 does not name the last two.
EXACT = 1 << 4 | 1 << 13 | 1 << 18

# Code points of ITU-T H.273, which are FFmpeg's numbers. These mean the same of primaries, transfer and matrix.
UNSPECIFIED, LIMITED_RANGE, FULL_RANGE = 2, 1, 2
_UNTAGGED = frozenset({0, UNSPECIFIED, 3})  # 0 and 3 are reserved; of a matrix, 0 is RGB
_BT709, _BT601 = 1, 5
_CONVERTIBLE = frozenset({1, 4, 5, 6, 7, 9})  # matrices that FFmpeg's scaler knows
_HDR = {16: ", with the color tags of HDR (PQ)", 18: ", with the color tags of HDR (HLG)"}
# Frame metadata that is applied here or by the decoder, or does not concern showing the frame.
_UNSEEN = {"DISPLAYMATRIX", "FILM_GRAIN_PARAMS", "GOP_TIMECODE", "MOTION_VECTORS", "PANSCAN"}
_UNSEEN |= {"SEI_UNREGISTERED", "VIDEO_HINT"}


class VideoFile(FrameSource):
    """Anything FFmpeg can decode that has a video stream; InputError: the file is empty, no video, or without one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self.opened() as container:
            stream = self.stream(container)
            self.frame_rate = stream.average_rate or stream.guessed_rate or None
            self.expected = stream.frames or None

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the file as FFmpeg's container."""
        av = require("av", "video", "reading a video file")
        try:
            # Without a protocol to open others by, a playlist reads neither a neighboring file nor an address.
            how: dict[str, Any] = {"options": {"protocol_whitelist": "none"}}
            if int(av.__version__.partition(".")[0]) < 19:  # what later ones do with a tag that is no UTF-8
                how["metadata_errors"] = "surrogateescape"
            with self.path.open("rb") as file, av.open(file, buffer_size=1 << 18, **how) as container:
                yield container
        except InputError:
            raise
        except (av.error.FFmpegError, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{self.path}: cannot be read as a video ({reason}); {_EXPECTED}") from error

    def stream(self, container: Any) -> Any:
        """Return the video of an opened file: FFmpeg's choice, never a cover picture; or raise InputError."""
        if container.format.name == "tty":  # FFmpeg shows text files as the video of a terminal that types them
            raise InputError(f"{self.path}: is a text file, not a video; {_EXPECTED}")
        decodable = [s for s in container.streams.video if s.codec_context is not None and not is_cover(s)]
        if not decodable:
            raise InputError(f"{self.path}: has no video stream that can be decoded; {_EXPECTED}")
        # Not posters and previews, which FFmpeg may rate higher.
        moving = [s for s in decodable if s.frames != 1 and s.codec_context.name not in _PICTURE_CODECS] or decodable
        best = container.streams.best("video")
        return best if best in moving else moving[0]

    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        av = require("av", "video", "reading a video file")
        self.times, self.tags, self.lost, self._first = [], {}, {}, None
        self._jumped = Fraction(0)  # seconds that later times lie further on, after the clock started anew
        interlaced = damaged_packets = damaged_frames = others_end = 0
        due: list[Fraction] = []  # times of the packets that are to be shown
        missing: list[str] = []
        entered: list[int] = []  # times of an AVI, which FFmpeg may have made up in the order of decoding; a heap
        with self.opened() as container:
            stream = self.stream(container)
            stream.thread_type = "AUTO"
            try:
                for packet in container.demux():
                    if packet.stream is not stream:
                        if packet.pts is not None:
                            others_end = max(others_end, (packet.pts + (packet.duration or 0)) * packet.time_base)
                        continue
                    damaged_packets += packet.is_corrupt
                    if container.format.name == "avi" and packet.pts is not None:
                        heappush(entered, packet.pts)
                    if packet.pts is not None and not packet.is_discard:
                        due.append(packet.pts * packet.time_base)
                    try:
                        frames = packet.decode()
                    except ValueError:  # invalid data; a recording of a live stream begins between two key frames
                        if self.times:
                            raise
                        entered.clear()
                        continue
                    for frame in frames:
                        damaged_frames += frame.is_corrupt
                        interlaced += frame.interlaced_frame
                        stamp = frame.dts if frame.pts is None else frame.pts
                        self.times.append(self._time(heappop(entered) if entered else stamp, stream))
                        self.lasting = (frame.duration or 0) * stream.time_base
                        yield f"frame {len(self.times) - 1}", self._shown(frame, stream)
                missing += self._missing(container, stream, due, others_end) if len(self.times) > 1 else []
            except av.error.FFmpegError as error:
                raise InputError(
                    f"{self.path}: the video is damaged or cut short: decoding fails after {len(self.times)} frames "
                    f"({error.strerror}); copy or download it again"
                ) from error
            finally:  # an excerpt may end before the file does
                count, marked = len(self.times), max(damaged_packets, damaged_frames)
                signs = [f"the decoder marks {marked} of {count} frames as damaged"] if marked else []
                self.notes = [f"{self.path}: may be damaged or cut short: {sign}" for sign in signs + missing]
                if interlaced:
                    where = f"{self.path}: is interlaced in {interlaced} of {count} frames"
                    self.notes.append(f"{where}: deinterlace it first, as with ffmpeg -vf bwdif")

    def _time(self, stamp: int | None, stream: Any) -> Fraction:
        last = self.times[-1:]
        following = last[0] + 1 / (self.frame_rate or DEFAULT_FRAME_RATE) if last else Fraction(0)
        time = following if stamp is None else stamp * stream.time_base + self._jumped
        if last and time < last[0] - _JUMP_SECONDS:
            self._jumped += following - time
            return following
        return time

    def _missing(self, container: Any, stream: Any, due: list[Fraction], others_end: Any) -> Iterator[str]:
        times, count = self.times, len(self.times)
        steps = [later - earlier for earlier, later in pairwise(times)]
        usual = sorted(steps)[len(steps) // 2]
        even = sum(0.5 * usual < step < 1.5 * usual for step in steps) >= _EVEN_SHARE * len(steps)
        # Of a few steps, all but three: these nearer to each other, as a rate that varies has such ones too.
        even |= sum(abs(step - usual) < 0.2 * usual for step in steps) >= max(len(steps) - 3, len(steps) // 2 + 1)
        missing = sum(round(step / usual) - 1 for step in steps if step >= 1.5 * usual) if usual > 0 and even else 0
        stated, empty, form = stream.frames, missing, container.format.name
        if form == "avi":
            empty += round(times[0] * (self.frame_rate or 0))  # it delays its first frame by empty ones
        if "mp4" in form.split(","):
            # The count includes pictures that an edit list hides, and those that need others from before the start.
            entries = [entry for entry in stream.index_entries if not entry.is_discard]
            start = due[0] if due and entries and entries[0].is_keyframe else times[0]
            stated = len(entries) - sum(time < start for time in due)
        if stated > count + empty:
            yield f"it holds {count} of the {stated} frames that it states"
        if not stated:
            ends = max(times[-1] + (times[-1] - times[0]) / (count - 1), others_end)
            duration = Fraction(container.duration or 0, 10**6)
            if stream.duration is not None:
                ends -= (stream.start_time or 0) * stream.time_base
                duration = stream.duration * stream.time_base
            if ends < _EVEN_SHARE * duration:
                yield f"it ends after {float(ends):.3g} of the {float(duration):.3g} s that it states"
        if missing:
            gaps = f"{missing} frame{'s are' if missing > 1 else ' is'} missing"
            yield f"{gaps} between the {count} that it holds, by their times"

    def _shown(self, frame: Any, stream: Any) -> np.ndarray:
        """Return a decoded frame upright. What its pixels do not carry goes into `tags`, for an encoder, or `lost`."""
        pixels, components = frame.format, frame.format.components
        # Others are gray, with or without transparency, have a palette, or are XYZ, which FFmpeg converts by itself.
        is_yuv = len(components) > 2 and not pixels.is_rgb and not pixels.name.startswith("xyz")
        names = ("color_primaries", "color_trc", "colorspace")[: 2 + is_yuv]
        tags = {name: UNSPECIFIED if (tag := getattr(frame, name)) in _UNTAGGED else tag for name in names}
        if is_yuv:
            tags["color_range"] = frame.color_range
            frame.colorspace = yuv_matrix(frame.colorspace, frame.height, frame.width)
            if frame.colorspace not in _CONVERTIBLE:
                unknown = f"matrix {frame.colorspace} of ITU-T H.273"
                raise InputError(f"{self.path}: its colors have {unknown}, which FFmpeg does not convert to RGB")
        bits = max(component.bits for component in components)
        if bits > 8:
            self.lost[f"{bits} bits a color (8 are written{_HDR.get(frame.color_trc, '')})"] = None
        halved = (pixels.chroma_width(2), pixels.chroma_height(2)) == (1, 1)  # as even sides are written
        if (len(components) > 2 or pixels.has_palette) and not (halved or frame.width % 2 or frame.height % 2):
            self.lost["half the resolution of its colors"] = None
        transparent = pixels.has_palette or any(component.is_alpha for component in components)
        gray = pixels.name.startswith("gray")
        form = "gray" if gray else "rgba" if transparent else "rgb24"
        wide = pixels.chroma_width(2) == 2
        shown = (frame if wide else _unsited(frame)).to_ndarray(format=form, interpolation=EXACT)
        if gray and frame.color_range == LIMITED_RANGE:  # which FFmpeg leaves as it is
            shown = np.rint((shown.astype(np.float32) - 16) * (255 / 219)).clip(0, 255).astype(np.uint8)
        # WebM names its transparency, which FFmpeg's own decoders leave out.
        if stream.metadata.get("alpha_mode") == "1" or (not gray and transparent and shown[..., 3].min() < 255):
            self.lost["transparency"] = None
        shown = shown if gray else shown[..., :3]
        a, b, c, d = self._matrix(frame)
        shape = stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio
        state = (a, b, c, d, *map(tags.get, names[:2]), stream.codec_context.sample_aspect_ratio)
        if abs(b) > abs(a):
            shown, a, d, shape = shown.swapaxes(0, 1), c, b, shape and 1 / shape
        if self._first is None:
            self._first, self.tags = state, {**tags, **({"sample_aspect_ratio": shape} if shape else {})}
        elif state != self._first:
            self.lost["changes of color tags, pixel shape or orientation in the middle"] = None
        return np.ascontiguousarray(shown[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])

    def _matrix(self, frame: Any) -> tuple[float, float, float, float]:
        """Return the display matrix: a pixel further right is shown further by (a, b), one further down by (c, d)."""
        try:
            entries = (frame.side_data[number] for number in range(len(frame.side_data)))  # PyAV 19 iterates over types
            data = {entry.type.name: entry for entry in entries}
        except ValueError:  # of a type that FFmpeg has and PyAV has not; it reads the angle all the same
            self.lost["frame metadata that PyAV cannot read"] = None
            angle = np.deg2rad(frame.rotation)
            return np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)
        for name in sorted(data.keys() - _UNSEEN):
            self.lost["closed captions" if name == "A53_CC" else name.lower().replace("_", " ")] = None
        if "DISPLAYMATRIX" not in data:
            return 1, 0, 0, 1
        a, b, _, c, d = np.frombuffer(data["DISPLAYMATRIX"], np.int32)[:5].tolist()
        if min(abs(a), abs(b)) > 0.02 * max(abs(a), abs(b)):
            self.lost["the part of its turn that is no multiple of 90 degrees"] = None
        return a, b, c, d


def _unsited(frame: Any) -> Any:
    """Return a frame without the place of its colors, which H.264 states: by it FFmpeg repeats them a pixel away from
    those whose mean is written again."""
    from av import VideoFrame

    plain = VideoFrame(frame.width, frame.height, frame.format.name)
    for planes in zip(frame.planes, plain.planes, strict=True):
        rows, copy = (np.asarray(memoryview(plane)).view(np.uint8).reshape(-1, plane.line_size) for plane in planes)
        width = min(rows.shape[1], copy.shape[1])
        copy[:, :width] = rows[:, :width]
    plain.colorspace, plain.color_range = frame.colorspace, frame.color_range
    return plain


def yuv_matrix(tag: int, height: int, width: int) -> int:
    """Return the matrix between RGB and YUV: the tagged one or, as players guess, BT.709 for HD and BT.601 below."""
    if tag not in _UNTAGGED:
        return tag
    return _BT709 if max(height, width) >= 1280 or min(height, width) > 576 else _BT601


def is_cover(stream: Any) -> bool:
    """Tell whether a stream holds a cover picture, or thumbnails of chapters."""
    return bool(stream.disposition & type(stream.disposition).attached_pic)
