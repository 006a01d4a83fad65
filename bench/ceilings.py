"""What the machine at hand reaches at most: FLOP/s in a matrix product, bytes/s in a copy.

The floor of a piece of work is the larger of its counted FLOP over the first and its counted bytes over the second. No
implementation can be faster, however it is written, unless it saves work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cdt_fast.bench.clock import calls_a_reading, seconds

# Rows of the reference's products (tokens of a step), the side of a square product, bytes of a copy.
_ROWS = {"toy": 320, "cpu": 8000, "gpu": 64000}
_SQUARE = {"toy": 128, "cpu": 2048, "gpu": 8192}
_COPIED = {"toy": 2**20, "cpu": 2**28, "gpu": 2**30}
_TRIES = 5


@dataclass(frozen=True)
class Probe:
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
        self._device, self._size = device, size
        self._products: dict[str, list[Probe]] = {}
        self._copy: Probe | None = None

    def product(self, dtype: str) -> Probe:
        """The fastest product of `dtype`: of the reference's three shapes (256 by 1024, forward and both gradients)
        and a square one."""
        if dtype not in self._products:
            rows, square = _ROWS[self._size], _SQUARE[self._size]
            shapes = [(rows, 256, 1024), (rows, 1024, 256), (256, rows, 1024), (square, square, square)]
            self._products[dtype] = [self._product(getattr(torch, dtype), *shape) for shape in shapes]
        return max(self._products[dtype], key=lambda probe: probe.rate)

    def copy(self) -> Probe:
        """A copy of a block larger than the caches; every byte is read and written."""
        if self._copy is None:
            # Not zeros, which are moved and multiplied faster than numbers are.
            source = torch.randint(256, (_COPIED[self._size],), dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            self._copy = self._measured(
                f"copy of {_COPIED[self._size] / 2**20:g} MiB", lambda: target.copy_(source), 2.0 * source.numel()
            )
        return self._copy

    def as_dict(self) -> dict[str, Any]:
        """What was measured so far: every product by dtype, and the copy."""
        return {
            "flop_per_second": {
                dtype: {probe.name: probe.rate for probe in probes} for dtype, probes in self._products.items()
            },
            "bytes_per_second": {} if self._copy is None else {self._copy.name: self._copy.rate},
        }

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


# A probe in the rounds of a case: its FLOP or bytes, and its seconds, one a round.
Probed = tuple[float, Sequence[float]]


def shares_of_floor(taken: Sequence[float], flop: float, moved: float, product: Probed, copy: Probed) -> list[float]:
    """Floor over time, a round at a time: a drift of the machine slows the probes of a round as it slows the work.

    Args:
        taken: seconds of the work, one a round.
        flop, moved: what it has to compute and to move.
        product, copy: the probes that took turns with it.
    """
    shares = []
    for spent, product_seconds, copy_seconds in zip(taken, product[1], copy[1], strict=True):
        shares.append(floor_seconds(flop, moved, product[0] / product_seconds, copy[0] / copy_seconds) / spent)
    return shares
