"""What the machine at hand reaches at most: FLOP/s in a matrix product, bytes/s in a copy.

The floor of a piece of work is the larger of its counted FLOP over the first and its counted bytes over the second. No
implementation can be faster, however it is written, unless it saves work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cdt_fast.bench.clock import calls_a_reading, seconds

# Rows of the reference's products (tokens of a step), the side of a square product, bytes of a copy.
_SIZES = {"toy": (320, 128, 2**20), "cpu": (8000, 2048, 2**28), "gpu": (64000, 8192, 2**30)}
_TRIES = 5


class Probe(NamedTuple):
    """A piece of work that nothing but one ceiling bounds."""

    name: str
    step: Callable[[], object]
    work: float  # its FLOP or bytes
    rate: float  # the best FLOP/s or bytes/s at the start of the run
    calls: int  # how often it is done for one reading


def floor_seconds(flop: float, moved: float, flop_rate: float, byte_rate: float) -> float:
    """The least time that `flop` operations and `moved` bytes can take at these rates a second."""
    return max(flop / flop_rate, moved / byte_rate)


class Ceilings:
    """The probes of one device at one of the suites' sizes, each chosen and measured when it is first asked for."""

    def __init__(self, device: torch.device, size: str) -> None:
        self._device, (self._rows, self._square, self._copied) = device, _SIZES[size]
        self._products: dict[str, dict[str, float]] = {}
        self._copies: dict[str, float] = {}
        self.product, self.copy = functools.cache(self._fastest_product), functools.cache(self._copy)

    def _fastest_product(self, dtype: str) -> Probe:
        """Of `dtype`: of the reference's three shapes (256 by 1024, forward and both gradients) and a square one."""
        rows, square = self._rows, self._square
        shapes = [(rows, 256, 1024), (rows, 1024, 256), (256, rows, 1024), (square, square, square)]
        probes = [self._product(getattr(torch, dtype), *shape) for shape in shapes]
        self._products[dtype] = {probe.name: probe.rate for probe in probes}
        return max(probes, key=lambda probe: probe.rate)

    def _copy(self) -> Probe:
        """Of a block larger than the caches; every byte is read and written."""
        # Not zeros, which are moved and multiplied faster than numbers are.
        source = torch.randint(256, (self._copied,), dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        name = f"copy of {self._copied / 2**20:g} MiB"
        probe = self._measured(name, lambda: target.copy_(source), 2.0 * self._copied)
        self._copies[probe.name] = probe.rate
        return probe

    def as_dict(self) -> dict[str, Any]:
        """What was measured so far: every product by dtype, and the copy."""
        return {"flop_per_second": self._products, "bytes_per_second": self._copies}

    def _product(self, dtype: torch.dtype, rows: int, inner: int, columns: int) -> Probe:
        left = torch.randn(rows, inner, device=self._device).to(dtype)
        right = torch.randn(inner, columns, device=self._device).to(dtype)
        out = torch.empty(rows, columns, dtype=dtype, device=self._device)  # a fresh one a call would be page faults
        name = f"{rows}x{inner} by {inner}x{columns}"
        return self._measured(name, lambda: torch.mm(left, right, out=out), 2.0 * rows * inner * columns)

    def _measured(self, name: str, step: Callable[[], object], work: float) -> Probe:
        seconds(step, self._device)
        calls = calls_a_reading(seconds(step, self._device), self._device)
        rate = work / min(seconds(step, self._device, calls) for _ in range(_TRIES))
        return Probe(name, step, work, rate, calls)
