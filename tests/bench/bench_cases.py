"""Made-up implementations and results for the tests of the bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cdt_fast.bench.case import Case, Implementation, Step, Unavailable


def steady(value: float) -> Callable[[], Step]:
    """Prepares a step that always returns one tensor of this value."""
    return lambda: lambda: [torch.full((3,), value)]


def unavailable() -> Step:
    raise Unavailable("no such package")


def fails() -> Step:
    def step() -> list[torch.Tensor]:
        raise RuntimeError("no such kernel\nand a second line")

    return step


def case_of(*candidates: Implementation, **changes: Any) -> Case:
    """A case whose formula gives ones."""
    settings: dict[str, Any] = {
        "suite": "made up",
        "name": "three ones",
        "shape": {"n": 3},
        "dtype": "float32",
        "expected": lambda: [torch.ones(3, dtype=torch.float64)],
        "tolerance": 1e-3,
        **changes,
    }
    return Case(implementations=candidates, **settings)
