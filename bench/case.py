"""A case of the bench: a piece of work, and its implementations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

# Returns losses or outputs, then every gradient; of a step that trains on, only the first call is as the formula.
Step = Callable[[], list[Tensor]]


class Unavailable(Exception):
    """An implementation cannot run here; the message is the reason, in one line."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of a piece of work."""

    name: str  # as it is printed: "eager", "SDPA", "cdt_fast"
    role: str  # "eager" (the baseline of the ratios), "peer" (another library or compiler) or "ours"
    prepare: Callable[[], Step]  # imports, compiles, allocates; raises `Unavailable` if something is missing


@dataclass(frozen=True)
class Case:
    """One piece of work at one shape."""

    suite: str
    name: str  # unique within the suite; says work, dtype and shape
    shape: Mapping[str, int]  # the sizes by name, such as {"B": 400, "T": 20}
    dtype: str  # "float32", "bfloat16", …
    implementations: tuple[Implementation, ...]  # the first of role "eager" is what the others are compared with
    expected: Step  # the formula in the best precision that fits; what every implementation must agree with
    tolerance: float  # the largest relative root mean square difference from `expected` that is rounding at this dtype
    note: str = ""  # shown with the table, such as "scaled down from V 128,256"
