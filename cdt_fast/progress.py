"""A bar on stderr that says how long things still take."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(iterable: Iterable[Any] | None = None, *, shown: bool = True, **options: Any) -> Any:
    """Return tqdm's bar (desc, unit, total … are its options); where stderr is no terminal, drawn every 30 seconds."""
    rarely = {} if sys.stderr.isatty() else {"mininterval": 30.0, "maxinterval": 30.0, "delay": 30.0}
    return tqdm(iterable, disable=not shown, **rarely, **options)
