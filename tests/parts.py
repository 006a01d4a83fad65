"""What `make test` runs of all the tests (`--part quick`), and what is left to `make test-all` (`--part rest`).

One rule: everything is quick but

- what is marked `slow`: it takes more than five seconds of a processor, or more than two and is a quick test with other
  values, or one of several that prove the same of processes that share a folder or a group;
- of the tests of the kernels, where a product of many parameters is long, all cases but a few in which every value of
  every parameter occurs; of the emulated ones all but these few of those that are marked `emulated`.

Emulating every combination for two cards takes longer than all the rest together: of what is not marked `emulated`
`make test-all` emulates the few as well, and `make emulate` everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence, Set

import pytest

KERNELS = ("tests/kernels/", "tests/kernels_aot/")


def quick(items: Sequence[pytest.Item], emulated: bool) -> set[pytest.Item]:
    """The tests of `make test`; the same, whatever else of their file was asked for."""
    few = covering_items(items)
    return {
        item
        for item in items
        if not item.get_closest_marker("slow")
        and (not is_of_kernels(item) or (item in few and (not emulated or item.get_closest_marker("emulated"))))
    }


def rest(items: Sequence[pytest.Item], emulated: bool) -> set[pytest.Item]:
    """The tests of `make test-all`."""
    left = set(items) - quick(items, emulated)
    if not emulated:
        return left
    few = covering_items(items)
    return {item for item in left if item in few or item.get_closest_marker("emulated")}


def is_of_kernels(item: pytest.Item) -> bool:
    return item.nodeid.startswith(KERNELS)


def covering_items(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Of each test of the kernels the cases that `covering` keeps; those that are slow by themselves do not count."""
    products = defaultdict(list)
    for item in items:
        if is_of_kernels(item):
            name = item.nodeid.partition("[")[0], item.get_closest_marker("slow") is not None
            products[name].append((item, values_of(item)))
    chosen = set()
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
