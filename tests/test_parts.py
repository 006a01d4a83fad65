"""The rule of what `make test` runs, on made-up tests."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.parts import covering, quick, rest

BLOCKS = "tests/kernels/test_some.py::test_blocks"
SIZES = "tests/kernels/test_some.py::test_sizes"
PRODUCT = [*itertools.product(("packed", "wide"), ([1], [2], [3]), (True, False, None, 1))]


class Item:
    """What the rule asks of a test."""

    def __init__(self, nodeid: str, parameters: dict[str, Any], mark: str) -> None:
        self.nodeid, self.callspec, self.mark = nodeid, SimpleNamespace(params=parameters), mark

    def get_closest_marker(self, name: str) -> object:
        return True if name == self.mark else None


def made_up(name: str, *values: Any, mark: str = "") -> Any:
    parameters: dict[str, Any] = dict(zip(("kernel", "shape", "flag"), values, strict=False))
    return Item(f"{name}[{values}]", parameters, mark)


def test_every_value_of_every_parameter_is_among_the_quick_ones() -> None:
    items = [made_up(SIZES, *values) for values in PRODUCT]
    chosen = [item for item in items if item in quick(items, emulated=False)]
    assert len(chosen) == 4  # as many as the parameter with most values has
    for name in ("kernel", "shape", "flag"):
        values = [item.callspec.params[name] for item in items]
        kept = [item.callspec.params[name] for item in chosen]
        # True is not 1.
        assert {(type(value), str(value)) for value in kept} == {(type(value), str(value)) for value in values}


def test_a_test_is_chosen_whatever_else_runs() -> None:
    items = [made_up(name, *values) for name in (SIZES, BLOCKS) for values in PRODUCT]
    assert quick(items[: len(PRODUCT)], emulated=False) == quick(items, emulated=False) & {*items[: len(PRODUCT)]}


@pytest.mark.parametrize("emulated", [False, True])
def test_slow_and_emulated_ones_are_left(emulated: bool) -> None:
    plain = [made_up("tests/ops/test_some.py::test_sizes", *values) for values in PRODUCT]
    slow = [made_up(name, "packed", mark="slow") for name in (BLOCKS, "tests/ops/test_some.py::test_it")]
    sizes, blocks = made_up(SIZES, "packed"), made_up(BLOCKS, "packed", mark="emulated")
    chosen = quick([*plain, *slow, sizes, blocks], emulated)
    assert chosen == {*plain, blocks, *([] if emulated else [sizes])}


def test_one_case_covers_itself() -> None:
    assert covering([frozenset()]) == {0}
    assert covering([frozenset("ab"), frozenset("b")]) == {0}


def test_together_the_parts_are_everything_and_nothing_twice() -> None:
    marks = ("", "slow", "emulated")
    items = [made_up(f"{SIZES}{mark}", *values, mark=mark) for mark in marks for values in PRODUCT]
    assert quick(items, False) | rest(items, False) == {*items}
    assert not quick(items, False) & rest(items, False)
    found = quick(items, True) | rest(items, True)
    assert not quick(items, True) & rest(items, True)
    # Emulated: all of what is marked, and a few of the others.
    assert [sum(item.nodeid.startswith(f"{SIZES}{mark}[") for item in found) for mark in marks] == [4, 4, len(PRODUCT)]
