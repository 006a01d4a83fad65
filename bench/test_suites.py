"""Every case and way as a pytest-benchmark, for its statistics and for comparing two checkouts.

    pytest bench/test_suites.py --benchmark-enable --benchmark-only [--bench-suite step] [--bench-size cpu]
        [--bench-device cuda] [--benchmark-autosave]

`cdt-fast bench` takes the ways in turns and is what ratios are read from; here each is timed on its own, one after the
other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cdt_fast.bench.case import Case, Unavailable
from cdt_fast.bench.measure import Gate
from cdt_fast.training.allocator import disable_malloc_trim


def test_way(named: tuple[str, str, str], case: Case, device: torch.device, benchmark: Any) -> None:
    suite, name, way_name = named
    disable_malloc_trim()
    way = next(way for way in case.ways if way.name == way_name)
    try:
        step, difference, _ = Gate(case).open(way)
    except Unavailable as reason:
        pytest.skip(str(reason))
    benchmark.group = f"{suite}: {name}"
    benchmark.extra_info.update(difference=difference, role=way.role, dtype=case.dtype, **case.shape)

    def finished() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    benchmark(finished)
