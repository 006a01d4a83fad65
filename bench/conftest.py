"""Options of the pytest-benchmark suites."""

from __future__ import annotations

import pytest
import torch

from cdt_fast.bench.case import Case
from cdt_fast.bench.suites import SIZES, SUITES


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cdt_fast bench")
    group.addoption("--bench-suite", nargs="+", choices=list(SUITES), default=list(SUITES), help="suites (all)")
    group.addoption("--bench-device", choices=("cpu", "cuda"), default="cpu", help="where to measure (cpu)")
    group.addoption("--bench-size", choices=SIZES, default="toy", help="shapes (toy)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test a case and way, known by their names: what the cases compute on is made when a test asks for it."""
    if "named" not in metafunc.fixturenames:
        return
    options = metafunc.config.option
    names = [
        (suite, case.name, way.name)
        for suite in options.bench_suite
        for case in SUITES[suite](torch.device(options.bench_device), options.bench_size)
        for way in case.ways
    ]
    metafunc.parametrize("named", names, ids=[" - ".join(name) for name in names])


@pytest.fixture
def device(pytestconfig: pytest.Config) -> torch.device:
    return torch.device(pytestconfig.option.bench_device)


@pytest.fixture
def case(named: tuple[str, str, str], device: torch.device, pytestconfig: pytest.Config) -> Case:
    suite, name, _ = named
    return next(case for case in SUITES[suite](device, pytestconfig.option.bench_size) if case.name == name)
