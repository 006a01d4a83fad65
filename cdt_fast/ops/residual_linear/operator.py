"""`residual_linear` as an operator with a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from cdt_fast.kernels.arguments import ResidualLinearArguments, ResidualLinearBackwardArguments
from cdt_fast.ops.residual_linear.plain import backward_in_torch, forward_in_torch
from cdt_fast.ops.residual_linear.reference import residual_linear_reference
from cdt_fast.ops.shared.registration import Operator, by_formula, save, saved


def _forward(linear: ResidualLinearArguments) -> Tensor:
    """`[rows, m]`, contiguous, in the dtype of x; weight and residual may have wider ones."""
    dtype = linear.x.dtype
    linear = replace(linear, weight=linear.weight.to(dtype))
    if linear.backend == "triton":
        from cdt_fast.kernels.residual_linear import residual_linear_forward

        return residual_linear_forward(linear)
    return forward_in_torch(replace(linear, residual=linear.residual.to(dtype)))


def _forward_fake(linear: ResidualLinearArguments) -> Tensor:
    return linear.x.new_empty((linear.x.shape[0], linear.weight.shape[1]))


def _backward_fake(linear: ResidualLinearBackwardArguments) -> list[Tensor]:
    grad_output = linear.grad_output
    rows, columns = grad_output.shape
    gradients = []
    if linear.weight is not None:
        gradients.append(grad_output.new_empty((rows, linear.weight.shape[0])))
    if linear.x is not None:
        gradients.append(grad_output.new_empty((linear.x.shape[1], columns), dtype=linear.weight_dtype))
    if linear.needs_residual:
        gradients.append(grad_output.new_empty((rows, columns)))
    return gradients


def _setup_context(ctx: Any, linear: ResidualLinearArguments, output: Tensor) -> None:
    # What no needed gradient reads is not kept: it may be the largest tensor of the layer.
    save(
        ctx,
        output=None if linear.nonlinearity == "identity" else output,
        x=linear.x if ctx.needs["weight"] else None,
        weight=linear.weight if ctx.needs["x"] else None,
        weight_dtype=linear.weight.dtype,
        alpha=linear.alpha,
        nonlinearity=linear.nonlinearity,
        needs_residual=ctx.needs["residual"],
    )
    ctx.residual_dtype, ctx.residual_is_bias = linear.residual.dtype, linear.residual.dim() == 1


def _autograd(ctx: Any, grad_output: Tensor) -> list[Tensor]:
    linear = ResidualLinearBackwardArguments(grad_output=grad_output, **saved(ctx))
    gradients = residual_linear_backward(linear)
    if linear.needs_residual:
        rows, dtype = gradients[-1], ctx.residual_dtype
        gradients[-1] = rows.sum(0, dtype=dtype) if ctx.residual_is_bias else rows.to(dtype)
    return gradients


def _formula(linear: ResidualLinearArguments) -> Tensor:
    options = {"alpha": linear.alpha, "nonlinearity": linear.nonlinearity, "threshold": linear.threshold}
    return by_formula(residual_linear_reference, linear.x, linear.weight, linear.residual, **options)


residual_linear_forward = Operator(
    "residual_linear", ResidualLinearArguments, "Tensor", _forward, _forward_fake, _setup_context, _autograd, _formula
)
residual_linear_backward = Operator(
    "residual_linear_backward", ResidualLinearBackwardArguments, "Tensor[]", backward_in_torch, _backward_fake
)
