from __future__ import annotations

import struct

import pytest

from cdt_fast.video.data.video_file import declared_bytes


def box(kind: bytes, size: int, held: int) -> bytes:
    """An MP4 box that says it has `size` bytes and has `held`."""
    return struct.pack(">I4s", size, kind) + bytes(held - 8)


def large_box(kind: bytes, size: int, held: int) -> bytes:
    return struct.pack(">I4sQ", 1, kind, size) + bytes(held - 16)


def chunk(kind: bytes, size: int, form: bytes, held: int) -> bytes:
    """An AVI chunk whose content says it has `size` bytes and has `held`."""
    return struct.pack("<4sI4s", kind, size, form) + bytes(held - 4)


EBML = b"\x1a\x45\xdf\xa3\x84" + bytes(4)
SEGMENT = b"\x18\x53\x80\x67"
HEADER_LIST = chunk(b"LIST", 21, b"hdrl", 22)


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        (box(b"ftyp", 24, 24) + box(b"mdat", 1000, 1000), 0),
        (box(b"ftyp", 24, 24) + box(b"mdat", 1000, 400), 600),
        (box(b"ftyp", 24, 24) + large_box(b"mdat", 6_000_000_000, 400), 6_000_000_000 - 400),
        (box(b"mdat", 100, 100) + box(b"moov", 90, 60), 30),
        (box(b"ftyp", 24, 24) + box(b"mdat", 0, 400), 0),  # Size 0: up to the end of the file.
        (box(b"ftyp", 24, 24) + box(b"mdat", 100, 100) + box(b"free", 900, 50), 0),  # Padding may be missing.
        (box(b"ftyp", 24, 24) + box(b"mdat", 100, 100) + bytes(64), 0),
        (chunk(b"RIFF", 5000, b"AVI ", 4) + HEADER_LIST + chunk(b"LIST", 300, b"movi", 300), 0),
        (chunk(b"RIFF", 5000, b"AVI ", 4) + HEADER_LIST + chunk(b"LIST", 300, b"movi", 120), 180),
        (chunk(b"RIFF", 5000, b"AVI ", 4) + chunk(b"LIST", 0xFFFFFFFF, b"movi", 120), 0),  # Written to a pipe.
        (
            chunk(b"RIFF", 112, b"AVI ", 4)
            + chunk(b"LIST", 100, b"movi", 100)
            + chunk(b"RIFF", 112, b"AVIX", 4)
            + chunk(b"LIST", 100, b"movi", 40),
            60,
        ),
        (EBML + SEGMENT + b"\x41\x00" + bytes(256), 0),
        (EBML + SEGMENT + b"\x41\x00" + bytes(200), 56),
        (EBML + SEGMENT + b"\x01" + b"\xff" * 7 + bytes(200), 0),  # Unknown size: a live recording.
        (b"\x1a\x45\xdf\xa3", 0),
        (b"", 0),
        (b"anything else" * 9, 0),
    ],
)
def test_missing_bytes(tmp_path, content, missing):
    path = tmp_path / "clip"
    path.write_bytes(content)
    assert declared_bytes(path) - len(content) == missing
