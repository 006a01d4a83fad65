"""Unpack a downloaded archive without letting it write anywhere else, or without end."""

from __future__ import annotations

import lzma
import os
import secrets
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from cdt_fast.errors import InputError
from cdt_fast.files import MOST_LEVELS, read_json, write_json

MOST_ENTRIES = 2_000_000
"""More files and folders than any data set holds."""

MOST_GROWTH = 20
"""How many times as large as its archive a data set may be; pictures and videos shrink to a third at best."""

_RECORD = ".fetched.json"
_LEAST_BOUND = 64 << 20  # bytes that any archive may hold, however small it is
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Content:
    """How much there is: files, and the sum of their sizes in bytes."""

    files: int
    bytes: int


def unpack_archive(archive: Path, folder: Path) -> None:
    """Unpack a .zip or a .tar (also compressed) into a new folder, which appears only when it is whole.

    Files and folders are made; links and devices in a tar are passed over. Owners, permissions and times are not kept.
    A hidden file in it says how much was unpacked, for `check_whole`. What a killed process left of the same folder is
    removed: no other may be unpacking it. The archive is kept.

    Raises:
        InputError: the archive is damaged or of another kind, an entry would land outside the folder, it holds more
            than `MOST_ENTRIES` or `MOST_GROWTH` allow, or the disk is full. Nothing is left behind.
    """
    for leftover in folder.parent.glob(f".{folder.name}-*.unpacking"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}.unpacking")
    try:
        temporary.mkdir()
        content = _extract(archive, temporary)
        if _content_of(temporary) != content:
            raise InputError(f"{archive}: another process removes what is unpacked of it; fetch again")
        write_json(temporary / _RECORD, asdict(content))
        temporary.rename(folder)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, RuntimeError) as error:
        raise InputError(f"{archive}: the archive is damaged ({error}); remove it and download it again") from error
    except OSError as error:
        raise InputError(f"{archive}: cannot be unpacked to {folder} ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_whole(folder: Path) -> None:
    """Refuse a folder that lacks some of what `unpack_archive` made; one that was made by other means is not judged.

    Raises:
        InputError: there are fewer files, or bytes, than were unpacked.
    """
    if (folder / _RECORD).exists():
        unpacked, content = read_json(folder / _RECORD, Content), _content_of(folder)
        if content.files < unpacked.files or content.bytes < unpacked.bytes:
            raise InputError(
                f"{folder}: is not whole: it holds {content.files:,} of {unpacked.files:,} files, {content.bytes:,} of "
                f"{unpacked.bytes:,} bytes; remove the folder and fetch again"
            )


def _content_of(folder: Path) -> Content:
    files = total = 0
    for place, _, names in os.walk(folder):
        for name in set(names) - {_RECORD}:
            files += 1
            total += os.lstat(os.path.join(place, name)).st_size
    return Content(files, total)


def _extract(archive: Path, folder: Path) -> Content:
    sizes: dict[tuple[str, ...], int] = {}  # a later entry of the same name replaces the earlier one
    most = max(MOST_GROWTH * archive.stat().st_size, _LEAST_BOUND)
    written = 0
    for number, (name, data) in enumerate(_entries(archive)):
        if number >= MOST_ENTRIES:
            raise InputError(f"{archive}: holds more than {MOST_ENTRIES:,} entries; nothing was unpacked")
        parts = _safe_parts(archive, name)
        place = folder.joinpath(*parts)
        if data is None:
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        sizes[parts] = 0
        with data, place.open("wb") as file:
            while block := data.read(_BLOCK_BYTES):
                written += len(block)
                if written > most:
                    raise InputError(f"{archive}: holds more than {most >> 20} MiB; nothing was unpacked")
                file.write(block)
                sizes[parts] += len(block)
    return Content(len(sizes), sum(sizes.values()))


def _entries(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Name and content of each entry, None for a folder's content."""
    # The tar is tried first: one that holds a zip as its last file looks like that zip.
    if tarfile.is_tarfile(archive):
        # As a stream: looking for a member in a compressed archive would unpack it from the start for each one.
        with tarfile.open(archive, "r|*") as opened:
            for member in opened:
                if member.isdir() or member.isfile():
                    yield member.name, None if member.isdir() else opened.extractfile(member)
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for entry in opened.infolist():
                yield entry.filename, None if entry.is_dir() else opened.open(entry)
    else:
        raise InputError(f"{archive}: is neither a zip nor a tar archive")


def _safe_parts(archive: Path, name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise InputError(f"{archive}: the entry {name!r} would be written outside the folder; nothing was unpacked")
    if len(path.parts) > MOST_LEVELS:
        raise InputError(f"{archive}: holds folders nested deeper than {MOST_LEVELS} levels; nothing was unpacked")
    return path.parts
