"""A video file, decoded with PyAV from its first packet to its last.

Nothing is sought and no header is believed: seeking by timestamp fails on some surveillance data sets, and header
frame counts are wrong in others (682 written, 341 there).
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError, require
from cdt_fast.video.data.containers import declared_bytes
from cdt_fast.video.data.source import FrameSource

_EXPECTED = "expected a video, a folder of frames, or a .npy or .npz file"


class VideoFile(FrameSource):
    """Anything FFmpeg can decode that has a video stream.

    Raises:
        InputError: the file is empty, cut short, not a video, or has no video stream.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._require_whole()
        with self._open() as container:
            stream = self._stream(container)
            rate = stream.average_rate or stream.guessed_rate
            self.frame_rate = Fraction(rate) if rate else None

    @property
    def files(self) -> list[Path]:
        return [self.path]

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

    def _open(self) -> Any:
        av = require("av", "video", "reading a video file")
        try:
            # The absolute path keeps FFmpeg from taking a name with a colon for a network address; the list of
            # protocols keeps a playlist from fetching one.
            return av.open(str(self.path.absolute()), options={"protocol_whitelist": "file"})
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise InputError(f"{self.path}: cannot be read as a video ({_reason(error)}); {_EXPECTED}") from error

    def _stream(self, container: Any) -> Any:
        # FFmpeg shows text files as the video of a terminal that types them.
        if container.format.name == "tty":
            raise InputError(f"{self.path}: is a text file, not a video; {_EXPECTED}")
        for stream in container.streams.video:
            if stream.codec_context is not None:
                return stream
        raise InputError(f"{self.path}: has no video stream that can be decoded; {_EXPECTED}")

    def _read(self) -> Iterator[tuple[str, np.ndarray]]:
        av = require("av", "video", "reading a video file")
        count = 0
        with self._open() as container:
            stream = self._stream(container)
            stream.thread_type = "AUTO"
            try:
                for packet in container.demux(stream):
                    for frame in _decoded(packet, lenient=count == 0):
                        yield f"frame {count}", _pixels(frame)
                        count += 1
            except av.error.FFmpegError as error:
                raise InputError(
                    f"{self.path}: the video is damaged or cut short: decoding fails after {count} frames "
                    f"({_reason(error)}); copy or download it again"
                ) from error


def _decoded(packet: Any, lenient: bool) -> list[Any]:
    try:
        return packet.decode()
    except ValueError:
        # FFmpeg's "invalid data". Recordings of a live stream begin between two key frames, and what comes before
        # the first picture cannot be decoded in a whole file either.
        if lenient:
            return []
        raise


def _pixels(frame: Any) -> np.ndarray:
    return frame.to_ndarray(format="gray" if frame.format.name.startswith("gray") else "rgb24")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
