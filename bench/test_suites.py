"""Every case and implementation as a pytest-benchmark, for its statistics and for comparing two checkouts.

    pytest bench/test_suites.py --benchmark-enable --benchmark-only [-k step] [--bench-size cpu] [--bench-device cuda]

`cdt-fast bench` times the implementations in round robin and is what ratios are read from; here each is timed on its
own, one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cdt_fast.bench.case import Case, Implementation, Unavailable
from cdt_fast.bench.clock import seconds
from cdt_fast.bench.measure import Gate
from cdt_fast.bench.suites import SUITES
from cdt_fast.training.allocator import disable_malloc_trim


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test an implementation of a case; what the cases compute on is made when a test asks for it."""
    device = torch.device(metafunc.config.option.bench_device)
    cases = [case for suite in SUITES.values() for case in suite(device, metafunc.config.option.bench_size)]
    both = [(case, one) for case in cases for one in case.implementations]
    ids = [f"{case.suite} - {case.name} - {one.name}" for case, one in both]
    metafunc.parametrize(("case", "implementation"), both, ids=ids)


def test_implementation(
    case: Case, implementation: Implementation, pytestconfig: pytest.Config, benchmark: Any
) -> None:
    disable_malloc_trim()
    try:
        step, difference, _ = Gate(case).open(implementation)
    except Unavailable as reason:
        pytest.skip(str(reason))
    benchmark.group = f"{case.suite}: {case.name}"
    benchmark.extra_info.update(difference=difference, role=implementation.role, dtype=case.dtype, **case.shape)
    benchmark(seconds, step, torch.device(pytestconfig.option.bench_device))  # which waits for a GPU
