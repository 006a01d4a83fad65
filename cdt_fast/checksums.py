"""Checksums of a folder's files, beside them, for files that other tools write; ours hold their own (`tensor_file`)."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cdt_fast.checks import InputError
from cdt_fast.files import file_state, read_json, write_json

CHECKSUMS = "checksums.json"
"""Of each file the SHA-256 sums that it may have: its content's, and while it is replaced that of the one before."""


def checksums_of(folder: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Return what `CHECKSUMS` holds of files in `folder`, by name."""
    return {name: [sha256_of(folder / name)] for name in sorted(names)}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 sum of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def written_with_checksums(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Write the sums of the files of `folder` that the block has written; of others nothing is said."""
    folder = Path(folder)

    def states() -> dict[str, tuple[int, int, int] | None]:
        return {path.name: file_state(path) for path in folder.glob("*") if path.is_file() and path.name != CHECKSUMS}

    before = states()
    yield
    written = [name for name, state in states().items() if before.get(name) != state]
    write_json(folder / CHECKSUMS, checksums_of(folder, written))


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Require the files of a folder to be as they were written; where it has no sums a warning says so.

    Raises:
        InputError: a file that has a sum is missing or has changed, or the sums themselves are damaged.
    """
    path, wrong = Path(folder) / CHECKSUMS, []
    if not path.exists():
        warnings.warn(f"{folder}: has no {CHECKSUMS}, as another tool wrote it: damage would not be seen", stacklevel=3)
        return
    checksums: dict[str, list[str]] = read_json(path, dict[str, list[str]])
    for name, known in checksums.items():
        try:
            is_whole = Path(name).name == name and sha256_of(Path(folder) / name) in known
        except (OSError, ValueError):  # ValueError: a name with a zero byte
            is_whole = False
        wrong += [] if is_whole else [name]
    if wrong and read_json(path) == checksums:
        raise InputError(
            f"{folder}: is damaged: {len(wrong)} of its files are not what was written, the first is {wrong[0]} "
            f"(where the change is meant, remove {CHECKSUMS})"
        )
    if wrong:
        check_folder(folder)  # another process has written the folder anew meanwhile
