"""Options of the pytest-benchmark suites."""

from __future__ import annotations

import pytest

from cdt_fast.bench.suites import SIZES


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to measure, and which shapes."""
    parser.addoption("--bench-device", choices=("cpu", "cuda"), default="cpu", help="where to measure (cpu)")
    parser.addoption("--bench-size", choices=SIZES, default="toy", help="shapes (toy)")
