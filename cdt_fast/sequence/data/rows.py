"""Rows with named columns, from TSV, CSV, JSON and JSONL files and from the Hugging Face hub, and where each stands."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cdt_fast.checks import InputError, require
from cdt_fast.files import parsed_json, shown

FORMATS = ("tsv", "csv", "json", "jsonl")

HIDDEN = "-"
"""The class of rows whose class the makers keep to themselves, as those of benchmarks' test parts."""

Row = tuple[str, Mapping[Any, Any]]  # "reviews.csv, row 3", and its values by column

_QUOTES = "do double quotes enclose fields there? --quoting, --no-quoting"


def read_rows(path: Path, format: str | None = None, *, quoting: bool = True, header: bool = True) -> Iterator[Row]:
    """The rows of a file one by one.

    Args:
        path: the file, in UTF-8, with or without a byte order mark.
        format: "tsv", "csv", "json" (a list of objects) or "jsonl" (an object a line); None: as the suffix says.
        quoting: TSV and CSV: fields may be in double quotes, which then may hold separators and line breaks. Without,
            a quote is a character like others, and a line is a row.
        header: TSV and CSV: the first line names the columns; without, columns are "0", "1" and so on.

    Raises:
        InputError: the file cannot be read or holds no rows, its format is unknown, or a row of it is broken.
    """
    format = format or path.suffix.lower().removeprefix(".").replace("ndjson", "jsonl")
    if format not in FORMATS:
        raise InputError(f"{path}: is of an unknown format; give one of {', '.join(FORMATS)} (--format)")
    place = None
    try:
        # Without quotes only line feeds end a line: texts hold other characters that Python too takes for line ends.
        with path.open(encoding="utf-8-sig", newline="" if quoting else "\n") as file:
            if format == "json":
                rows = _numbered("entry", parsed_json(file.read(), str(path), list[Any]))
            elif format == "jsonl":
                rows = _from_json_lines(path, file)
            else:
                rows = _from_table(file, "\t" if format == "tsv" else ",", quoting, header)
            for place, row in rows:
                if not isinstance(row, dict):
                    raise InputError(f"{path}, {place}: must be an object, got a {type(row).__name__}")
                yield f"{path}, {place}", row
    except csv.Error as error:
        raise InputError(f"{path}, after {place or 'the start'}: {error}; {_QUOTES}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if place is None:
        raise InputError(f"{path}: holds no rows")


def hub_parts(source: str) -> dict[str, Any]:
    """The parts of a data set of the hub, "owner/name" or "owner/name:subset", by name, each a `datasets.Dataset`.

    Raises:
        InputError: the data set cannot be fetched, or has no part "train".
        MissingExtra: datasets is not installed.
    """
    datasets = require("datasets", "hub", "a data set of the hub")
    repository, _, subset = source.partition(":")
    try:
        parts = dict(datasets.load_dataset(repository, subset or None))
    except Exception as error:  # of whichever library does the fetching, the unpacking or the reading
        raise InputError(f"{source}: cannot be fetched from the hub ({shown(str(error))})") from error
    if "train" not in parts:
        raise InputError(f"{source}: has no part 'train'; there are {', '.join(parts)}")
    return parts


def hub_rows(source: str, part: Any) -> Iterator[Row]:
    """The rows of a part, classes by their names; `HIDDEN` where there is none."""
    classes = {name: feature.names for name, feature in part.features.items() if hasattr(feature, "names")}
    for place, row in _numbered(f"{source}, row", part):
        named = {
            name: names[row[name]] if row[name] is not None and row[name] >= 0 else HIDDEN
            for name, names in classes.items()
        }
        yield place, {**row, **named}


def text_of(row: Row, column: str, advice: str = "") -> str:
    """The text in a column, or the number there in digits, without blanks around it.

    Raises:
        InputError: there is no such column (the message lists those there are, and ends with `advice`), or no text.
    """
    place, values = row
    if column not in values:
        raise InputError(f"{place}: no column {column!r}; there are {', '.join(map(repr, values)) or 'none'}{advice}")
    value = values[column]
    if isinstance(value, int):  # bool too
        return str(value).lower()
    if not isinstance(value, str):
        raise InputError(f"{place}: {column!r} must be a text, got {shown(value)}")
    return value.strip()


def _numbered(word: str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{word} {number}", value) for number, value in enumerate(values, 1))


def _from_json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for place, line in _numbered("line", lines):
        if line.strip():
            yield place, parsed_json(line, f"{path}, {place}")


def _from_table(lines: Iterable[str], separator: str, quoting: bool, header: bool) -> Iterator[tuple[str, Any]]:
    if quoting:
        csv.field_size_limit(2**31 - 1)  # 131072 characters by default; there are longer texts
        # Strict: a quote that is a mere character ends in an error and not in rows that swallow the next ones.
        rows: Iterable[list[str]] = csv.reader(lines, delimiter=separator, strict=True)
    else:
        rows = (line.rstrip("\r\n").split(separator) for line in lines)
    names: list[str] | None = None
    for place, fields in _numbered("row", rows):
        if fields in ([], [""]):
            continue
        if names is None:
            names = [name.strip() for name in fields] if header else list(map(str, range(len(fields))))
            if len(set(names)) < len(names):
                raise csv.Error(f"two columns have the same name: {', '.join(names)}")
            if header:
                continue
        if len(fields) != len(names):
            raise csv.Error(f"{len(fields)} fields, expected {len(names)}")
        yield place, dict(zip(names, fields, strict=True))
