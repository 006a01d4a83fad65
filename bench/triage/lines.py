"""The file of a triage: one JSON object a line, to which every process of a run adds as soon as it knows something."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Lines:
    """A file of lines.

    Args:
        path: where it is, or will be.
        run: what tells the lines of a run from those of others in the same file.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run

    def add(self, stage: str, part: str, fields: Mapping[str, Any]) -> None:
        """Write one line; when this returns it is on the disk. Processes may do so at the same time."""
        line = json.dumps(_plain({"run": self.run, "stage": stage, "part": part, **fields}), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:  # one write: no other line comes in between
            file.write(line.encode())
            os.fsync(file.fileno())

    def read(self, stage: str | None = None) -> list[dict[str, Any]]:
        """The lines of this run that are whole, all or those of a stage."""
        found = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    fields = json.loads(line)
                except json.JSONDecodeError:  # the end of an earlier run that was cut off
                    continue
                if isinstance(fields, dict) and fields.get("run") == self.run and stage in (None, fields.get("stage")):
                    found.append(fields)
        return found


def _plain(value: Any) -> Any:
    """`value` with words in place of the numbers that are not JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
