"""How the decoded pixels of a video are to be shown: applied to them, handed on as tags, or named as lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cdt_fast.errors import InputError

# Code points of ITU-T H.273, which are FFmpeg's numbers. These mean the same of primaries, transfer and matrix.
UNSPECIFIED = 2
_UNTAGGED = frozenset({0, UNSPECIFIED, 3})  # 0 and 3 are reserved; of a matrix, 0 is RGB
_BT709, _BT601 = 1, 5
LIMITED_RANGE = 1
_CONVERTIBLE = frozenset({1, 4, 5, 6, 7, 9})  # matrices that FFmpeg's scaler knows
_HDR = {16: "PQ", 18: "HLG"}

# Frame metadata that the decoder or `Display` applies, or that does not concern showing the frame.
_UNSEEN = frozenset(
    [
        "DISPLAYMATRIX",
        "FILM_GRAIN_PARAMS",
        "GOP_TIMECODE",
        "MOTION_VECTORS",
        "PANSCAN",
        "SEI_UNREGISTERED",
        "VIDEO_HINT",
    ]
)


def yuv_matrix(tag: int, height: int, width: int) -> int:
    """The matrix between RGB and YUV: the tagged one or, as players guess, BT.709 from HD size on and BT.601 below."""
    if tag not in _UNTAGGED:
        return tag
    return _BT709 if max(height, width) >= 1280 or min(height, width) > 576 else _BT601


class Display:
    """What the frames of one video say of how they are to be shown, gathered while they are decoded.

    Attributes:
        tags: of the first frame, properties for an encoder's codec context with which the pixels that `shown` returns
            look as in the source.
        lost: what else the frames say, which neither those pixels nor `tags` hold; the keys, in order.
        interlaced: number of interlaced frames.
    """

    def __init__(self, path: Path) -> None:
        self.tags: dict[str, Any] = {}
        self.lost: dict[str, None] = {}
        self.interlaced = 0
        self._path = path
        self._first: tuple[Any, ...] | None = None

    def shown(self, frame: Any, stream: Any) -> np.ndarray:
        """The pixels of a decoded frame, uint8 `[h, w, 3]` RGB or `[h, w]` gray, upright.

        Raises:
            InputError: FFmpeg cannot convert their colors.
        """
        self.interlaced += frame.interlaced_frame
        tags = {name: _tag(getattr(frame, name)) for name in ("color_primaries", "color_trc")}
        if _is_yuv(frame.format):
            tags |= {"colorspace": _tag(frame.colorspace), "color_range": frame.color_range}
            frame.colorspace = yuv_matrix(frame.colorspace, frame.height, frame.width)
            if frame.colorspace not in _CONVERTIBLE:
                raise InputError(
                    f"{self._path}: its colors have matrix {frame.colorspace} of ITU-T H.273, which FFmpeg does not "
                    "convert to RGB; expected BT.601, BT.709, BT.2020 with non-constant luminance, or RGB"
                )
        pixels = self._pixels(frame, stream)
        a, b, c, d = self._matrix(frame)
        shape = stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio
        if abs(b) > abs(a):
            pixels, a, d, shape = pixels.swapaxes(0, 1), c, b, shape and 1 / shape
        pixels = pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
        state = (a, b, c, d, tags["color_primaries"], tags["color_trc"], stream.codec_context.sample_aspect_ratio)
        if self._first is None:
            self._first = state
            self.tags = tags if shape is None else {**tags, "sample_aspect_ratio": shape}
        elif state != self._first:
            self.lost["changes of color tags, pixel shape or orientation in the middle"] = None
        return np.ascontiguousarray(pixels)

    def _pixels(self, frame: Any, stream: Any) -> np.ndarray:
        components = frame.format.components
        bits = max(component.bits for component in components)
        if bits > 8:
            hdr = f", with the color tags of HDR ({_HDR[frame.color_trc]})" if frame.color_trc in _HDR else ""
            self.lost[f"{bits} bits a color (8 are written{hdr})"] = None
        if frame.format.name.startswith("gray"):
            return frame.to_ndarray(format="gray")
        if stream.metadata.get("alpha_mode") == "1":  # of WebM: FFmpeg's own decoders leave it out
            self.lost["transparency"] = None
        if not frame.format.has_palette and not any(component.is_alpha for component in components):
            return frame.to_ndarray(format="rgb24")
        pixels = frame.to_ndarray(format="rgba")
        if pixels[..., 3].min() < 255:
            self.lost["transparency"] = None
        return pixels[..., :3]

    def _matrix(self, frame: Any) -> tuple[float, float, float, float]:
        """The display matrix: a pixel further right is shown further by (a, b), one further down by (c, d)."""
        try:
            data = {entry.type.name: entry for entry in frame.side_data}
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


def _tag(value: int) -> int:
    return UNSPECIFIED if value in _UNTAGGED else value


def _is_yuv(pixels: Any) -> bool:
    # The others are gray, with or without transparency, have a palette, or are XYZ, which FFmpeg converts by itself.
    return len(pixels.components) > 2 and not pixels.is_rgb and not pixels.name.startswith("xyz")
