"""What a bench measures: a piece of work, and the implementations of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

# Computes and differentiates once; returns losses or outputs first, then every gradient, for the correctness gate. A
# step that trains on keeps its state: the gate looks at its first call.
Step = Callable[[], list[Tensor]]

ROLES = ("eager", "peer", "ours")


class Unavailable(Exception):
    """An implementation that cannot run here; the message is the reason, in one line."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of a piece of work."""

    name: str  # as it is printed: "eager", "SDPA", "cdt_fast"
    role: str  # "eager" (the baseline of the ratios), "peer" (another library or compiler) or "ours"
    # imports, compiles and allocates, and returns the step; raises `Unavailable` with the reason where a package, a GPU
    # or an instruction set is missing
    prepare: Callable[[], Step]
    # what it must agree with, where it computes something else than the case's formula on purpose: the unconstrained
    # step beside the constrained one
    expected: Step | None = None
    # whether it takes so long to prepare that on a GPU the case is measured, and saved, without it first
    late: bool = False


@dataclass(frozen=True)
class Case:
    """One piece of work at one shape."""

    suite: str  # the suite it belongs to
    name: str  # unique within the suite; says work and shape
    shape: Mapping[str, int]  # the sizes by name, such as {"B": 400, "T": 20}
    dtype: str  # "float32", "bfloat16", …
    implementations: tuple[Implementation, ...]  # the first of role "eager" is what the others are compared with
    expected: Step  # the step of the formula in the best precision that fits; what every implementation must agree with
    tolerance: float  # the largest relative root mean square difference from `expected` that is rounding at this dtype
    flop: float = 0.0  # of the cheapest known implementation, forward and backward; 0 where no floor is given
    moved: float = 0.0  # bytes of every input and output, once
    note: str = ""  # shown with the table, such as "scaled down from V 128,256"
    with_memory: bool = True  # whether peak memory is measured
