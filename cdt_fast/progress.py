"""How long things still take: a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0


def progress_bar(iterable: Iterable[Any] | None = None, *, shown: bool = True, **options: Any) -> Any:
    """tqdm's bar (desc, unit, total … are its options); where stderr is no terminal, drawn every 30 seconds."""
    seconds = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    waits = {"mininterval": seconds, "maxinterval": max(10.0, seconds), "delay": 0.0 if seconds < 1 else seconds}
    return tqdm(iterable, disable=not shown, **waits, **options)
