"""Unpack a downloaded archive without letting it write anywhere else."""

from __future__ import annotations

import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from cdt_fast.errors import InputError

_BLOCK_BYTES = 1 << 20


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip or a .tar (also compressed) into a new folder, which appears only when it is whole.

    Files and folders are made; links and devices in a tar are passed over. Owners, permissions and times are not kept.

    Args:
        archive: the file to unpack; it is kept.
        folder: the folder to make; its parent exists, it does not.

    Raises:
        InputError: the archive is damaged or of another kind, an entry would land outside the folder, or the disk is
            full. Nothing is left behind.
    """
    # The name is fixed, so that what a killed process left is cleared by the next one.
    temporary = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for name, data in _entries(archive):
            place = temporary.joinpath(*_safe_parts(archive, name))
            if data is None:
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with data, place.open("wb") as file:
                shutil.copyfileobj(data, file, _BLOCK_BYTES)
        temporary.rename(folder)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, RuntimeError) as error:
        raise InputError(f"{archive}: the archive is damaged ({error}); remove it and download it again") from error
    except OSError as error:
        raise InputError(f"{archive}: cannot be unpacked to {folder} ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
    return path.parts
