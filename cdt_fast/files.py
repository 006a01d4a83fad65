"""Atomic writes, and reads whose errors name the file."""

import errno
import fcntl
import glob
import json
import os
import secrets
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from cdt_fast.checks import InputError


@contextmanager
def replaced_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`, of the same suffix; move it there once the block ends without an error.

    The data is on the disk before the move, so that a power cut leaves the old file or the new one. After an error, or
    a full disk, nothing is left behind and an existing `path` is as it was; what a killed process left, the next one
    removes. Folders above `path` are made. OSError: the file cannot be written; it names `path`, not the temporary
    file.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    temporary = target.with_name(f".{target.stem}-{secrets.token_hex(4)}.tmp{target.suffix}")
    try:
        with temporary.open("xb") as file:
            try_lock(file)
            yield temporary
            os.fsync(file.fileno())
            temporary.replace(target)
    except OSError as error:
        # Writing through an open file names no file; an error that names another file is not ours to rename.
        if error.filename is not None and str(error.filename) != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove_leftovers(target: Path) -> None:
    """Remove what killed processes left of the same target; the file that a running one writes is locked."""
    for leftover in target.parent.glob(f".{glob.escape(target.stem)}-????????.tmp{target.suffix}"):
        with suppress(OSError), leftover.open("rb+") as file:  # NFS locks only what can be written
            if try_lock(file):
                leftover.unlink()


def try_lock(file: IO[Any] | int) -> bool:
    """Lock an open file, or descriptor, until it is closed, or this process ends; False if another process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # else it is a file system without locks
    return True


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinities are refused (they are not JSON)."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str], kind: Any = Any) -> Any:
    """Read a JSON file that holds a `kind`, as `parsed_json`; InputError: it cannot be read, or does not hold one."""
    return parsed_json(_content(path, "JSON"), str(path), kind)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file; InputError: it is missing, unreadable or no TOML."""
    content = _content(path, "TOML")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as TOML ({error})") from error


def parsed_json(text: str | bytes, where: str, kind: Any = Any) -> Any:
    """Parse a JSON text from outside; `where` is what a message calls it: a file, or a line of one. `kind` is a type
    that pydantic checks and converts to, such as `list[str]`, a dataclass or a model. Its parser also refuses what
    would fail later: deep nesting, numbers of thousands of digits, halves of surrogate pairs."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
    if first["type"] == "json_invalid":
        raise InputError(f"{where}: cannot be read as JSON ({first['msg'].removeprefix('Invalid JSON: ')})")
    place = f"{where}: {'.'.join(map(str, first['loc']))}" if first["loc"] else where
    more = f"; and {len(others)} more" if others else ""
    raise InputError(f"{place}: {first['msg']}, got {shown(first['input'])}{more}")


def _content(path: str | os.PathLike[str], form: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read as {form} ({error.strerror})") from error


def shown(value: Any) -> str:
    """Return a value for a message, no longer than a part of a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
