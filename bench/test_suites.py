"""Every case and implementation as a pytest-benchmark, for its statistics and for comparing two checkouts.

    pytest bench/test_suites.py --benchmark-enable --benchmark-only [--bench-suite step] [--bench-size cpu]
        [--bench-device cuda] [--benchmark-autosave]

`cdt-fast bench` times the implementations in round robin and is what ratios are read from; here each is timed on its
own, one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cdt_fast.bench.case import Case, Implementation, Unavailable
from cdt_fast.bench.measure import Gate
from cdt_fast.training.allocator import disable_malloc_trim


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
    on_gpu = pytestconfig.option.bench_device == "cuda"

    def finished() -> None:
        step()
        if on_gpu:
            torch.cuda.synchronize()

    benchmark(finished)
