"""A linear map, added to a residual and put through a nonlinearity: `φ(residual + α x W)` (docs/maths.md §6)."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from cdt_fast.checks import check_choice
from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import Nonlinearity, ResidualLinearArguments
from cdt_fast.ops.residual_linear.operator import residual_linear_forward
from cdt_fast.ops.residual_linear.reference import residual_linear_reference
from cdt_fast.ops.shared.backend import choose_backend
from cdt_fast.ops.shared.checks import check_factor, check_shape, check_tensor, check_together, compute_dtype
from cdt_fast.ops.shared.products import rows_of
from cdt_fast.ops.soft_threshold.plain import effective_nonlinearity

__all__ = ["residual_linear", "residual_linear_reference"]


def residual_linear(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    alpha: float = 1.0,
    nonlinearity: Nonlinearity = "relu",
    threshold: float = 0.0,
) -> Tensor:
    """A linear map whose result is added to a residual, then a nonlinearity: `φ(residual + α x W)`.

    The second half of a text UT layer is one, `ReLU(R + Y⁺ W_f)`, and so is that of a LISTA step,
    `S_θ(H + (1/c)(X − H Dᵀ) D)`. The products sum in at least float32.

    Args:
        x: `[..., n]`.
        weight: W, `[n, m]`; any strides, so that a transposed weight costs no copy.
        residual: `[..., m]` with the leading dimensions of `x`, or `[m]`: a learned bias.
        alpha: α, the factor of the product.
        nonlinearity: "relu" for `max(v, 0)`, "soft_threshold" for `S_θ`, "hard_threshold" for `v [|v| > θ]`,
            "identity" for none.
        threshold: θ ≥ 0 of the thresholds; the others do not use it.

    Returns:
        `[..., m]` in the dtype of the arguments (under autocast: autocast's dtype; the gradients of `weight` and of a
        bias are still summed over the tokens in their own dtype).

    Raises:
        InputError: an argument has the wrong rank, shape, dtype, device or value, or a second derivative is asked for.

    Source: "A Constrained Optimization Perspective of Unrolled Transformers", the feed-forward half-step.
    """
    check_tensor("x", x, 1, "[..., n]")
    check_tensor("weight", weight, 2, "[n, m]")
    check_tensor("residual", residual, 1, "[..., m] or [m]")
    check_shape("weight", weight, (x.shape[-1], weight.shape[-1]), "width of x by any width")
    shapes = (weight.shape[1],), (*x.shape[:-1], weight.shape[1])
    if tuple(residual.shape) not in shapes:
        raise InputError(f"residual must have shape {shapes[0]} or {shapes[1]}, got {tuple(residual.shape)}")
    check_together(x=x, weight=weight, residual=residual)
    check_choice("nonlinearity", nonlinearity, get_args(Nonlinearity))
    dtype = compute_dtype(x)
    threshold = check_factor("threshold", threshold, non_negative=True, dtype=dtype)
    rows = rows_of(x).to(dtype)
    linear = ResidualLinearArguments(
        x=rows,
        weight=weight,
        residual=residual if residual.dim() == 1 else rows_of(residual),
        alpha=check_factor("alpha", alpha, dtype=dtype),
        threshold=threshold,
        nonlinearity=effective_nonlinearity(nonlinearity, threshold),
        backend=choose_backend("residual_linear", rows, multiplies=True),
    )
    return residual_linear_forward(linear).view(*x.shape[:-1], weight.shape[1])
