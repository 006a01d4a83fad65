"""How many bytes a video file says it has: the one certain sign that it was cut short.

Frame counts and durations in headers are often wrong in whole files, so they prove nothing. The sizes of the parts
that hold the pictures are what a player walks by: MP4 and QuickTime boxes with pictures or their index, AVI `movi`
lists, the Matroska segment. A part that ends past the end of the file is missing bytes.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

_ISO_FIRST_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"styp", b"pnot"})
_ISO_NEEDED_BOXES = frozenset({b"moov", b"moof", b"mdat"})
_EBML_HEADER = b"\x1a\x45\xdf\xa3"
_MATROSKA_SEGMENT = b"\x18\x53\x80\x67"
_RIFF_UNKNOWN_SIZE = 0xFFFFFFFF


def declared_bytes(path: Path) -> int:
    """Bytes that the file needs to have for its picture data to be whole; its own size where it does not say."""
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
