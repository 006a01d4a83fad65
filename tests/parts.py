"""What `make test` runs of all the tests (`--part quick`), and what is left to `make test-all` (`--part rest`).

One rule: everything is quick but

- what is marked `slow`: it takes more than five seconds of a processor;
- of the tests of the kernels, where a product of many parameters is long, all cases but a few in which every value of
  every parameter occurs; of the emulated ones all but these few of those that are marked `emulated`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence, Set

import pytest

KERNELS = ("tests/kernels/", "tests/kernels_aot/")


def quick(items: Sequence[pytest.Item], emulated: bool) -> set[pytest.Item]:
    """The tests of `make test`; the same, whatever else of their file was asked for."""
    chosen, products = set(), defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        if not item.nodeid.startswith(KERNELS):
            chosen.add(item)
        elif not emulated or item.get_closest_marker("emulated"):
            products[item.nodeid.partition("[")[0]].append((item, values_of(item)))
    for cases in products.values():
        kept = covering([values for _, values in cases])
        chosen |= {item for number, (item, _) in enumerate(cases) if number in kept}
    return chosen


def values_of(item: pytest.Item) -> frozenset[object]:
    """What its parameters are, by name; what cannot be compared is itself alone."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return frozenset(
        (name, type(value), value if isinstance(value, Hashable) else id(value)) for name, value in parameters.items()
    )


def covering(cases: Sequence[Set[object]]) -> set[int]:
    """The numbers of some cases that together have every value: each time the first of those that add the most."""
    kept, missing = {0}, set().union(*cases) - cases[0]
    while missing:
        best = max(range(len(cases)), key=lambda number: len(cases[number] & missing))
        kept.add(best)
        missing -= cases[best]
    return kept
