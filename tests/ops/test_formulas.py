"""The formulas are called as their ops are."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from cdt_fast import ops

OPS = sorted(path.parent.name for path in (Path(ops.__file__).parent).glob("*/reference.py"))


@pytest.mark.parametrize("op", OPS)
def test_a_formula_has_the_defaults_of_its_op(op: str) -> None:
    formula = getattr(importlib.import_module(f"cdt_fast.ops.{op}.reference"), f"{op}_reference")
    of_op = inspect.signature(getattr(ops, op)).parameters
    for name, parameter in inspect.signature(formula).parameters.items():
        assert parameter.default == of_op[name].default, name
