"""The sound of a source, carried over packet by packet as it is."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from typing import Any

from cdt_fast.errors import require
from cdt_fast.video.data.source import FrameSource
from cdt_fast.video.data.video_file import VideoFile

_TRIED_PACKETS = 3


class Sound:
    """The packets of the sound of a video that a container takes.

    Attributes:
        notes: what of the source it does not take, a line each.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._packets: Iterator[Any] = iter(())
        self._container: Any = None
        self._waiting: Any = None

    def carry(self, source: VideoFile, opened: Any, container: Any) -> None:
        """Add the streams of sound of a source, which is open as `opened`, to a container that nothing is in yet."""
        carried = {}
        for stream in opened.streams:
            if stream.type == "audio" and stream.codec_context is not None:
                if _takes(container.format.name, source, stream.index):
                    carried[stream.index] = container.add_stream_from_template(stream)
                else:
                    name = stream.codec_context.name
                    self.notes.append(f"sound in {name} does not come through in this container; .mkv takes most")
            elif stream.type == "subtitle":
                self.notes.append("subtitles do not come through")
        if carried:
            chosen = [opened.streams[index] for index in carried]
            self._container = container
            self._packets = _assigned(opened.demux(chosen), carried, source.start)

    def write_until(self, time: Fraction | None) -> None:
        """Write the packets up to a time in seconds, None: all that are left."""
        while True:
            packet = self._waiting if self._waiting is not None else next(self._packets, None)
            self._waiting = None
            if packet is None:
                return
            if time is not None and packet.dts * packet.time_base > time:
                self._waiting = packet
                return
            self._container.mux(packet)


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
        with source.opened() as opened, av.open(io.BytesIO(), "w", format=form) as trial:
            stream = opened.streams[index]
            there = trial.add_stream_from_template(stream)
            for packet in islice(_assigned(opened.demux(stream), {index: there}, source.start), _TRIED_PACKETS):
                trial.mux(packet)
    except (av.error.FFmpegError, ValueError):
        return False
    return True


@contextmanager
def carried_sound(source: FrameSource, container: Any) -> Iterator[Sound]:
    """The sound of `source` on its way into `container`; none where the source is no video file."""
    sound = Sound()
    if not isinstance(source, VideoFile):
        yield sound
        return
    reading = source.opened()
    opened = reading.__enter__()
    try:
        sound.carry(source, opened, container)
        yield sound
    finally:
        reading.__exit__(None, None, None)  # what fails meanwhile is the writing, which has its own messages
