"""Options of the pytest-benchmark suites."""

from __future__ import annotations

import pytest
import torch

from cdt_fast.bench.suites import SIZES, SUITES


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cdt_fast bench")
    group.addoption("--bench-suite", nargs="+", choices=list(SUITES), default=list(SUITES), help="suites (all)")
    group.addoption("--bench-device", choices=("cpu", "cuda"), default="cpu", help="where to measure (cpu)")
    group.addoption("--bench-size", choices=SIZES, default="toy", help="shapes (toy)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test an implementation of a case; what the cases compute on is made when a test asks for it."""
    if "implementation" in metafunc.fixturenames:
        options = metafunc.config.option
        device = torch.device(options.bench_device)
        cases = [case for suite in options.bench_suite for case in SUITES[suite](device, options.bench_size)]
        both = [(case, one) for case in cases for one in case.implementations]
        ids = [f"{case.suite} - {case.name} - {one.name}" for case, one in both]
        metafunc.parametrize(("case", "implementation"), both, ids=ids)
