"""Rows of the data sets of the Hugging Face hub, read by the package datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cdt_fast.errors import InputError, require
from cdt_fast.files import shown
from cdt_fast.sequence.data.rows import Row

HIDDEN = "-"
"""The class of rows whose class the makers keep to themselves, as those of benchmarks' test parts."""

_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def is_hub_name(source: str) -> bool:
    """Whether `source` has the form of a data set's name, "owner/name" or "owner/name:subset"."""
    return _NAME.fullmatch(source) is not None


def load_hub(source: str, download: bool) -> dict[str, Any]:
    """The parts of a data set by their names, each a `datasets.Dataset`.

    Args:
        source: its name; see `is_hub_name`.
        download: whether the network may be used. What was fetched stays in the cache of datasets.

    Raises:
        InputError: `download` is false, or the data set cannot be fetched.
        MissingExtra: datasets is not installed.
    """
    if not download:
        raise InputError(f"{source}: no such file or folder; a data set of the hub is fetched with --download")
    datasets = require("datasets", "hub", "a data set of the hub")
    repository, _, subset = source.partition(":")
    try:
        return dict(datasets.load_dataset(repository, subset or None))
    except Exception as error:  # of whichever library does the fetching, the unpacking or the reading
        raise InputError(f"{source}: cannot be fetched from the hub ({shown(str(error))})") from error


def hub_rows(part: Any) -> Iterator[Row]:
    """The rows of a part, classes by their names; `HIDDEN` where there is none."""
    classes = {name: feature.names for name, feature in part.features.items() if hasattr(feature, "names")}
    for number, row in enumerate(part, 1):
        named = {
            name: names[row[name]] if row[name] is not None and row[name] >= 0 else HIDDEN
            for name, names in classes.items()
        }
        yield f"row {number}", {**row, **named}
