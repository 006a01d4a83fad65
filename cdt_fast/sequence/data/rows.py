"""Rows with named columns from TSV, CSV, JSON and JSONL files, each with where it stands in its file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.files import parsed_json

FORMATS = ("tsv", "csv", "json", "jsonl")

# csv refuses fields beyond 131072 characters by default; there are longer texts.
_LONGEST_FIELD = 2**31 - 1

_UNQUOTED = "; if quotes are plain characters there, read it with quoting=False (--no-quoting)"

Row = tuple[str, Mapping[Any, Any]]  # "line 3" or "entry 3", and its values by column


def read_rows(path: Path, format: str | None = None, *, quoting: bool = True, header: bool = True) -> Iterator[Row]:
    """The rows of a file one by one.

    Args:
        path: the file, in UTF-8, with or without a byte order mark.
        format: "tsv", "csv", "json" (a list of objects) or "jsonl" (an object a line); None: as the suffix says.
        quoting: TSV and CSV: fields may be in double quotes, which then may hold separators and line breaks. Without,
            a quote is a character like others, and a line is a row.
        header: TSV and CSV: the first line names the columns; without, columns go by their numbers from 0.

    Raises:
        InputError: the file cannot be read, is empty, has an unknown suffix, or a row of it is broken; the message
            names the line.
    """
    if format is None:
        format = path.suffix.lower().removeprefix(".").replace("ndjson", "jsonl")
        if format not in FORMATS:
            known = ", ".join(f".{name}" for name in FORMATS)
            raise InputError(
                f"{path}: unknown suffix {path.suffix!r}, expected one of {known}; or give the format (--format)"
            )
    elif format not in FORMATS:
        raise InputError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")
    try:
        if format == "json":
            yield from _from_json(path)
        elif format == "jsonl":
            yield from _from_json_lines(path)
        else:
            yield from _from_table(path, "\t" if format == "tsv" else ",", quoting, header)
    except UnicodeDecodeError as error:
        place = f"{path}{_first_undecodable(path)}"
        raise InputError(f"{place}: is not UTF-8 ({error.reason}); convert the file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def column(path: Path, where: str, row: Mapping[Any, Any], name: str | int) -> Any:
    """The value of a column of a row.

    Raises:
        InputError: there is no such column; the message lists those there are.
    """
    if name in row:
        return row[name]
    raise InputError(f"{path}, {where}: no column {name!r}; there are {', '.join(map(repr, row)) or 'none'}")


def _from_table(path: Path, separator: str, quoting: bool, header: bool) -> Iterator[Row]:
    rows = _quoted(path, separator) if quoting else _unquoted(path, separator)
    names: Sequence[str | int] | None = None
    for line, fields in rows:
        if names is None and header:
            names = [name.strip() for name in fields]
            if len(set(names)) < len(names):
                raise InputError(f"{path}, line {line}: two columns have the same name: {', '.join(fields)}")
            continue
        names = range(len(fields)) if names is None else names
        if len(fields) != len(names):
            advice = ""
            if quoting:
                advice = _UNQUOTED
            elif any('"' in field for field in fields):
                advice = "; if quotes enclose fields there, read it with quoting=True (--quoting)"
            raise InputError(f"{path}, line {line}: {len(fields)} fields, expected {len(names)}{advice}")
        yield f"line {line}", dict(zip(names, fields, strict=True))
    if names is None:
        raise InputError(f"{path}: is empty")


def _quoted(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # Strict: a quote that is a mere character ends in an error and not in rows that swallow the next ones.
            reader = csv.reader(file, delimiter=separator, strict=True)
            start = 1
            try:
                for fields in reader:
                    if fields:
                        yield start, fields
                    start = reader.line_num + 1
            except csv.Error as error:
                raise InputError(f"{path}, line {start}: {error}{_UNQUOTED}") from error
    finally:
        csv.field_size_limit(limit)


def _unquoted(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    # Only line feeds end a line: texts hold other characters that Python too takes for line ends.
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for line, text in enumerate(file, 1):
            text = text.rstrip("\r\n")
            if text:
                yield line, text.split(separator)


def _from_json(path: Path) -> Iterator[Row]:
    entries = parsed_json(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: must hold a list of objects, got {_kind(entries)}")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise InputError(f"{path}, entry {number}: must be an object, got {_kind(entry)}")
        yield f"entry {number}", entry


def _from_json_lines(path: Path) -> Iterator[Row]:
    empty = True
    for line, fields in _unquoted(path, "\n"):
        if not fields[0].strip():
            continue
        entry = parsed_json(fields[0], f"{path}, line {line}")
        if not isinstance(entry, dict):
            raise InputError(f"{path}, line {line}: must be an object, got {_kind(entry)}")
        empty = False
        yield f"line {line}", entry
    if empty:
        raise InputError(f"{path}: is empty")


def _first_undecodable(path: Path) -> str:
    """Where the first line is that is not UTF-8: the error itself counts from where its block of the file began."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f", line {number}"
    return ""


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else f"a {type(value).__name__}"
