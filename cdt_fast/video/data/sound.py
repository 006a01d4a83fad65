"""The sound of a source, carried over packet by packet as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from cdt_fast.video.data.source import FrameSource
from cdt_fast.video.data.video_file import VideoFile


class Sound:
    """The packets of the sound of a video that a container takes.

    Attributes:
        notes: what of the source it does not take, a line each.
    """

    def __init__(self, source: Any = None, container: Any = None, start: Fraction = Fraction(0)) -> None:
        self.notes: list[str] = []
        self._packets: Iterator[Any] = iter(())
        self._container, self._start = container, start
        self._waiting: Any = None
        if source is None:
            return
        carried = {}
        for stream in source.streams:
            if stream.type == "audio" and stream.codec_context is not None:
                if stream.codec_context.name in container.supported_codecs:
                    carried[stream.index] = container.add_stream_from_template(stream)
                else:
                    self.notes.append(
                        f"sound in {stream.codec_context.name} does not come through in this container; .mkv takes it"
                    )
            elif stream.type == "subtitle":
                self.notes.append("subtitles do not come through")
        if carried:
            chosen = [source.streams[index] for index in carried]
            self._packets = self._assigned(source.demux(chosen), carried)

    def _assigned(self, packets: Iterator[Any], carried: dict[int, Any]) -> Iterator[Any]:
        for packet in packets:
            if packet.dts is None:
                continue  # the last one of a stream, which is empty
            shift = round(self._start / packet.time_base)
            packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            packet.stream = carried[packet.stream.index]
            yield packet

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


@contextmanager
def carried_sound(source: FrameSource, container: Any) -> Iterator[Sound]:
    """The sound of `source` on its way into `container`; none where the source is no video file."""
    if not isinstance(source, VideoFile):
        yield Sound()
        return
    with source.opened() as opened:
        yield Sound(opened, container, source.start)
