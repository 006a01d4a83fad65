"""The formula of `residual_linear`."""

from __future__ import annotations

from torch import Tensor

from cdt_fast.ops.soft_threshold.reference import shrink_reference


def residual_linear_reference(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    alpha: float = 1.0,
    nonlinearity: str = "relu",
    threshold: float = 0.0,
) -> Tensor:
    """`φ(residual + α x W)`, in any dtype, differentiated by torch."""
    return shrink_reference(residual + alpha * (x @ weight), threshold, nonlinearity)
