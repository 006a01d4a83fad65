"""For `layerwise_cross_entropy` alone, until it is two files as the other ops are."""

import warnings

from cdt_fast.kernels.launch import KernelError
from cdt_fast.ops import common
from cdt_fast.ops.common import choose_backend

__all__ = ["choose_backend", "give_up"]


def give_up(op: str, error: KernelError) -> bool:
    """Whether plain torch takes the place of the kernels of `op`, one of which does not run on the card."""
    if common._setting == "triton":
        return False
    if op not in common._disabled:
        common._disabled.add(op)
        warnings.warn(f"{op} is computed by plain torch from now on: {error}", RuntimeWarning, stacklevel=2)
    return True
