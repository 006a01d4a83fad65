"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError


@contextmanager
def replaced_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path beside `path`; move it there once the block has ended without an error.

    The temporary file keeps the suffix of `path` (writers of video and pictures choose the format by it). The data
    is on the disk before the move, so that a power cut leaves the old file or the new one. After an error, or a full
    disk, nothing is left behind and an existing `path` is as it was.

    Raises:
        OSError: the file cannot be written; it names `path`, not the temporary file.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=f".tmp{target.suffix}", dir=target.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except Exception as error:
        number = _system_error(error, temporary)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(target)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _system_error(error: Exception, temporary: Path) -> int | None:
    """The number of the system's error if `error` comes from writing `temporary`, else None."""
    if isinstance(error, OSError):
        # Writing through an open file names no file; an error that names another file is not ours to rename.
        return error.errno if error.filename is None or str(error.filename) == str(temporary) else None
    # safetensors reports a full disk as an error of its own, with the number in its text.
    found = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__module__.startswith("safetensors") else None
    return int(found[1]) if found else None


def _umask() -> int:
    # mkstemp makes files that only the owner can read; os.umask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinities are refused (they are not JSON)."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raises:
        InputError: the file is missing, cannot be read or is not whole.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Remove the temporary files that a killed process left in `folder`."""
    for leftover in Path(folder).glob(".*.tmp*"):
        if leftover.is_file():
            leftover.unlink(missing_ok=True)
