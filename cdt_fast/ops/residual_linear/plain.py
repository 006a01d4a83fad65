"""`φ(residual + α x W)` in plain torch, and its gradient, which has no kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import ResidualLinearArguments, ResidualLinearBackwardArguments
from cdt_fast.ops.shared.products import product_over_rows
from cdt_fast.ops.soft_threshold.plain import shrink_, shrink_backward


def forward_in_torch(linear: ResidualLinearArguments) -> Tensor:
    """`[rows, m]`, contiguous; all of one dtype."""
    return shrink_(
        torch.addmm(linear.residual, linear.x, linear.weight, alpha=linear.alpha), linear.threshold, linear.nonlinearity
    )


def backward_in_torch(linear: ResidualLinearBackwardArguments) -> list[Tensor]:
    """The gradients of x (where `weight` is there), of the weight (where `x` is) and of the residual's rows."""
    grad_output, output, alpha = linear.grad_output, linear.output, linear.alpha
    gradients = []
    grad_update = grad_output if output is None else shrink_backward(grad_output, output, linear.nonlinearity)
    if linear.weight is not None:
        gradients.append(torch.mm(grad_update, linear.weight.to(grad_update.dtype).mT).mul_(alpha))
    if linear.x is not None:
        gradients.append(product_over_rows(linear.x, grad_update, linear.weight_dtype).mul_(alpha))
    if linear.needs_residual:
        gradients.append(grad_output.clone(memory_format=torch.contiguous_format) if output is None else grad_update)
    return gradients
