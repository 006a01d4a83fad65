"""A linear map, added to a residual and put through a nonlinearity: `φ(residual + α x W)` (docs/ops.md §3)."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from cdt_fast.checks import InputError, check_choice
from cdt_fast.ops import common, operators, products


def residual_linear(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    alpha: float = 1.0,
    nonlinearity: common.Nonlinearity = "relu",
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
        threshold: θ ≥ 0; the others do not use it.

    Returns:
        `[..., m]` in the dtype of the arguments (under autocast: autocast's dtype; the gradients of `weight` and of a
        bias are still summed over the tokens in their own dtype).

    InputError: an argument has the wrong rank, shape, dtype, device or value, or a second derivative is asked for.

    Source: "A Constrained Optimization Perspective of Unrolled Transformers", the feed-forward half-step.
    """
    common.check_tensor("x", x, 1, "[..., n]")
    common.check_tensor("weight", weight, 2, "[n, m]", (x.shape[-1], None), "width of x by any width")
    common.check_tensor("residual", residual, 1, "[..., m] or [m]")
    shapes = (weight.shape[1],), (*x.shape[:-1], weight.shape[1])
    if tuple(residual.shape) != shapes[residual.dim() > 1]:  # tuples of two ranks would compare a batch with m
        raise InputError(f"residual must have shape {shapes[0]} or {shapes[1]}, got {tuple(residual.shape)}")
    common.check_together(x=x, weight=weight, residual=residual)
    check_choice("nonlinearity", nonlinearity, get_args(common.Nonlinearity))
    common.refuse_transforms("residual_linear", x, weight, residual)
    dtype = common.compute_dtype(x)
    alpha = common.check_factor("alpha", alpha, dtype=dtype)
    threshold = common.check_factor("threshold", threshold, non_negative=True, dtype=dtype)
    rows = common.rows_of(x).to(dtype)
    name = common.effective_nonlinearity(nonlinearity, threshold)
    backend = common.choose_backend("residual_linear", rows, multiplies=True)
    added = residual if residual.dim() == 1 else common.rows_of(residual)
    output = _linear(rows, weight, added, alpha, threshold, name, backend)
    return output.view(*x.shape[:-1], weight.shape[1])


def residual_linear_reference(
    x: Tensor, weight: Tensor, residual: Tensor, *, alpha: float = 1, nonlinearity: str = "relu", threshold: float = 0.0
) -> Tensor:
    """Return `φ(residual + α x W)`, in any dtype, differentiated by torch."""
    return common.shrink_reference(residual + alpha * (x @ weight), threshold, nonlinearity)


@common.outside_autocast
def _forward(
    x: Tensor,  # [rows, n]
    weight: Tensor,  # [n, m], maybe of a wider dtype
    residual: Tensor,  # [rows, m] or [m], likewise
    alpha: float,
    threshold: float,
    nonlinearity: common.Nonlinearity,
    backend: str,
) -> Tensor:
    """Return `[rows, m]`, contiguous, in the dtype of x."""
    weight = weight.to(x.dtype)
    if backend == "triton":
        with common.or_plain_torch("residual_linear", x) as kernels:
            blocks = common.blocks_for(kernels.BLOCKS, x)
            return kernels.forward(x, weight, residual, alpha, threshold, nonlinearity, blocks)
    update = products.product_of_rows(x, weight, residual.to(x.dtype), alpha)
    return common.shrink_(update, threshold, nonlinearity)


def _forward_fake(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _like(grad: Tensor, _: Any, x: Tensor | None, weight: Tensor | None, dtype: torch.dtype, *others: Any) -> list[Any]:
    of_x = None if weight is None else grad.new_empty(grad.shape[0], weight.shape[0])
    of_weight = None if x is None else grad.new_empty(x.shape[1], grad.shape[1], dtype=dtype)
    return [of_x, of_weight, grad]


@operators.gradients_of("residual_linear", _like)
@common.outside_autocast
def _gradients(
    grad_output: Tensor,  # [rows, m]
    output: Tensor | None,  # [rows, m]; None for "identity"
    x: Tensor | None,  # [rows, n], for the gradient of the weight
    weight: Tensor | None,  # [n, m], for the gradient of x
    weight_dtype: torch.dtype,
    alpha: float,
    nonlinearity: common.Nonlinearity,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of x (given `weight`), of the weight (given `x`) and of the residual's rows."""
    grad_update = grad_output if output is None else common.shrink_backward(grad_output, output, nonlinearity)
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = products.product_of_rows(grad_update, weight.to(grad_update.dtype).mT).mul_(alpha)
    if x is not None:
        grad_weight = products.product_over_rows(x, grad_update, weight_dtype).mul_(alpha)
    if output is None and needs[2]:
        grad_update = grad_output.clone(memory_format=torch.contiguous_format)
    return [grad_x, grad_weight, grad_update]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, residual, ctx.alpha, _, ctx.nonlinearity, _ = inputs
    needs_x, needs_weight, _ = ctx.needs_input_grad[:3]
    # What no needed gradient reads is not kept: it may be the largest tensor of the layer.
    result = None if ctx.nonlinearity == "identity" else output
    ctx.save_for_backward(result, x if needs_weight else None, weight if needs_x else None)
    ctx.weight_dtype, ctx.residual_dtype, ctx.residual_is_bias = weight.dtype, residual.dtype, residual.dim() == 1


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    options = ctx.weight_dtype, ctx.alpha, ctx.nonlinearity, list(ctx.needs_input_grad[:3])
    grad_x, grad_weight, rows = _gradients(grad_output, *ctx.saved_tensors, *options)
    if rows is not None:
        rows = rows.sum(0, dtype=ctx.residual_dtype) if ctx.residual_is_bias else rows.to(ctx.residual_dtype)
    return grad_x, grad_weight, rows


_linear = operators.differentiable("residual_linear", _forward, _forward_fake, _setup_context, _backward)
