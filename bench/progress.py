"""How far a run is, and how long it will still take."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

Name = tuple[str, str]


class Progress:
    """A line on stderr for each case that is done.

    Args:
        names: suite and case of everything that is to be measured.
        earlier: seconds that some of them took in an earlier run.
    """

    def __init__(self, names: Sequence[Name], earlier: Mapping[Name, float]) -> None:
        self._names, self._earlier = list(names), earlier
        self._taken: dict[Name, float] = {}

    def begin(self) -> None:
        """Say how much there is to do."""
        left = self.seconds_left()
        about = "" if left is None else f", {in_words(left)} as far as earlier runs tell"
        count = len(self._names)
        print(f"{count} case{'' if count == 1 else 's'}{about}", file=sys.stderr, flush=True)

    def done(self, name: Name, seconds: float) -> None:
        """Say that a case is measured and took so long."""
        self._taken[name] = seconds
        line = f"{name[0]}: {name[1]}: {seconds:.1f} s; {len(self._taken)} of {len(self._names)}"
        left = self.seconds_left()
        if left:
            line += f", {in_words(left)} left"
        print(line, file=sys.stderr, flush=True)

    def seconds_left(self) -> float | None:
        """What the other cases will take: as long as earlier, at the pace of this run; one that is new as long as those
        of this run, or of earlier ones, on average. None where nothing is known."""
        both = [name for name in self._taken if name in self._earlier]
        pace = sum(self._taken[name] for name in both) / sum(self._earlier[name] for name in both) if both else 1.0
        known = list(self._taken.values()) or [self._earlier[name] for name in self._names if name in self._earlier]
        others = [name for name in self._names if name not in self._taken]
        if not known:
            return None
        mean = sum(known) / len(known)
        return sum(self._earlier[name] * pace if name in self._earlier else mean for name in others)


def in_words(seconds: float) -> str:
    """A time to wait for: "about 40 s", "about 12 min"."""
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
