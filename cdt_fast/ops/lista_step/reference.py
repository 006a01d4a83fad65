"""The formula of `lista_step`."""

from __future__ import annotations

from torch import Tensor

from cdt_fast.ops.soft_threshold.reference import shrink_reference


def lista_step_reference(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    nonlinearity: str = "soft_threshold",
) -> Tensor:
    """`S_θ(H + (1/c)(X − H Dᵀ) D)`, in any dtype, differentiated by torch."""
    return shrink_reference(codes + step * (signal - codes @ dictionary.mT) @ dictionary, threshold, nonlinearity)
