"""A linear map, added to a residual and put through a nonlinearity: `φ(residual + α x W)` (docs/maths.md §6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import check_choice
from cdt_fast.errors import InputError
from cdt_fast.ops.shared.backend import runs_on_triton
from cdt_fast.ops.shared.checks import check_factor, check_shape, check_tensor, check_together, compute_dtype
from cdt_fast.ops.shared.products import product, product_over_rows, rows_of
from cdt_fast.ops.shared.registration import once_differentiable
from cdt_fast.ops.soft_threshold import (
    NONLINEARITIES,
    effective_nonlinearity,
    shrink_,
    shrink_backward,
    shrink_reference,
)


def residual_linear(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    alpha: float = 1.0,
    nonlinearity: str = "relu",
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
        nonlinearity: "relu" for `max(v, 0)`, "soft_threshold" for `S_θ`, "identity" for none.
        threshold: θ ≥ 0 of "soft_threshold"; the others do not use it.

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
    alpha = check_factor("alpha", alpha)
    threshold = check_factor("threshold", threshold, non_negative=True)
    check_choice("nonlinearity", nonlinearity, (*NONLINEARITIES, "identity"))
    output = _residual_linear(
        rows_of(x).to(compute_dtype(x)),
        weight,
        residual if residual.dim() == 1 else rows_of(residual),
        alpha,
        effective_nonlinearity(nonlinearity, threshold),
        threshold,
    )
    return output.view(*x.shape[:-1], weight.shape[1])


def residual_linear_reference(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    alpha: float = 1.0,
    nonlinearity: str = "relu",
    threshold: float = 0.0,
) -> Tensor:
    """The formula of `residual_linear`, in any dtype, differentiated by torch."""
    return shrink_reference(residual + alpha * (x @ weight), threshold, nonlinearity)


@torch.library.custom_op("cdt_fast::residual_linear", mutates_args=())
def _residual_linear(
    x: Tensor, weight: Tensor, residual: Tensor, alpha: float, nonlinearity: str, threshold: float
) -> Tensor:
    """`[rows, m]`, contiguous, in the dtype of x; weight and residual may have wider ones."""
    weight = weight.to(x.dtype)
    if runs_on_triton("residual_linear", x, multiplies=True):
        from cdt_fast.kernels import residual_linear as kernels

        return kernels.residual_linear(x, weight, residual, alpha=alpha, nonlinearity=nonlinearity, threshold=threshold)
    with torch.autocast(x.device.type, enabled=False):
        output = torch.addmm(residual.to(x.dtype), x, weight, alpha=alpha)
        return shrink_(output, threshold, nonlinearity)


@_residual_linear.register_fake
def _(x: Tensor, weight: Tensor, residual: Tensor, alpha: float, nonlinearity: str, threshold: float) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.custom_op("cdt_fast::residual_linear_backward", mutates_args=())
def _residual_linear_backward(
    grad_output: Tensor,
    output: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    alpha: float,
    nonlinearity: str,
    weight_dtype: torch.dtype,
    wants_residual: bool,
) -> list[Tensor]:
    """The gradients of x (where `weight` is given), of the weight (where `x` is given) and of the residual's rows."""
    gradients = []
    # A backward that is called inside autocast would have some of its products cast, and sums of two dtypes fail.
    with torch.autocast(grad_output.device.type, enabled=False):
        grad_update = grad_output if output is None else shrink_backward(grad_output, output, nonlinearity)
        if weight is not None:
            gradients.append(product(grad_update, weight.to(grad_update.dtype).mT).mul_(alpha))
        if x is not None:
            gradients.append(product_over_rows(x, grad_update, weight_dtype).mul_(alpha))
        if wants_residual:
            gradients.append(
                grad_output.clone(memory_format=torch.contiguous_format) if output is None else grad_update
            )
    return gradients


@_residual_linear_backward.register_fake
def _(
    grad_output: Tensor,
    output: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    alpha: float,
    nonlinearity: str,
    weight_dtype: torch.dtype,
    wants_residual: bool,
) -> list[Tensor]:
    rows, columns = grad_output.shape
    gradients = []
    if weight is not None:
        gradients.append(grad_output.new_empty((rows, weight.shape[0])))
    if x is not None:
        gradients.append(grad_output.new_empty((x.shape[1], columns), dtype=weight_dtype))
    if wants_residual:
        gradients.append(grad_output.new_empty((rows, columns)))
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, residual, alpha, nonlinearity, _ = inputs
    wants_x, wants_weight, *_ = ctx.needs_input_grad
    ctx.set_materialize_grads(False)
    # What no wanted gradient reads is not kept: it may be the largest tensor of the layer.
    ctx.save_for_backward(
        None if nonlinearity == "identity" else output, x if wants_weight else None, weight if wants_x else None
    )
    ctx.alpha, ctx.nonlinearity = alpha, nonlinearity
    ctx.weight_dtype, ctx.residual_dtype, ctx.residual_is_bias = weight.dtype, residual.dtype, residual.dim() == 1


def _backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 6
    output, x, weight = ctx.saved_tensors
    wants_residual = ctx.needs_input_grad[2]
    gradients = iter(
        _residual_linear_backward(
            grad_output, output, x, weight, ctx.alpha, ctx.nonlinearity, ctx.weight_dtype, wants_residual
        )
    )
    grad_x = None if weight is None else next(gradients)
    grad_weight = None if x is None else next(gradients)
    grad_residual = next(gradients) if wants_residual else None
    if grad_residual is not None:
        if ctx.residual_is_bias:
            grad_residual = grad_residual.sum(0, dtype=ctx.residual_dtype)
        else:
            grad_residual = grad_residual.to(ctx.residual_dtype)
    return grad_x, grad_weight, grad_residual, None, None, None


_residual_linear.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_residual_linear_backward, "residual_linear")
