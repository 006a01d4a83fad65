"""How long things still take: a bar on a terminal; a line now and then where stderr goes to a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0


class _Lines:
    """A stderr that takes what tqdm draws over and over in one place as lines of their own."""

    def write(self, text: str) -> None:
        shown = text.strip("\r\n ")
        if shown:
            print(shown, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(iterable: Iterable[Any] | None = None, *, shown: bool = True, **options: Any) -> Any:
    """tqdm's bar on stderr; where that is no terminal, a line every 30 seconds, and none for what takes less.

    Args:
        iterable: what to go through, or None where the bar is updated by hand.
        shown: whether to say anything at all.
        options: those of tqdm: desc, unit, total …
    """
    if not shown or sys.stderr.isatty():
        return tqdm(iterable, disable=not shown, **options)
    known = options.get("total") is not None or hasattr(iterable, "__len__")
    return tqdm(
        iterable,
        file=_Lines(),
        mininterval=SECONDS_BETWEEN_LINES,
        maxinterval=SECONDS_BETWEEN_LINES,
        delay=SECONDS_BETWEEN_LINES,
        leave=False,
        bar_format="{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} so far, {remaining} to go"
        if known
        else "{desc}: {n_fmt} {unit}s, {elapsed} so far",
        **options,
    )
