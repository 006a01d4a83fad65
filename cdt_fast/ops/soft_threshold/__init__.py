"""Shrinkage, and the nonlinearities that the ops put behind a product, with their gradients (docs/maths.md §7)."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.ops.shared.checks import check_factor, check_tensor

NONLINEARITIES = ("soft_threshold", "relu")


def soft_threshold(x: Tensor, threshold: float | Tensor) -> Tensor:
    """Shrinkage `S_θ(x) = sign(x) · max(|x| − θ, 0)`, the proximal operator of `θ‖x‖₁`.

    Args:
        x: a floating-point tensor of any shape and strides.
        threshold: θ ≥ 0, a number, or a tensor that broadcasts against `x` (its gradient is computed too; its sign is
            not checked, which would wait for the device).

    Returns:
        A tensor of the shape and dtype of `x`. NaN stays NaN. The gradient is 1 where |x| > θ and 0 elsewhere, but 1
        everywhere for θ = 0, where S_θ is the identity.

    Raises:
        InputError: `x` is not floating point, or `threshold` is negative, not finite or does not broadcast.
    """
    check_tensor("x", x, 0, "of any shape")
    if not isinstance(threshold, Tensor):
        threshold = check_factor("threshold", threshold, non_negative=True)
        # torch's own kernel reads x once and writes once, in each direction: there is nothing that one of ours could
        # fuse. It has gradient 0 at x = 0 for a threshold of 0 too, hence the copy.
        return torch.nn.functional.softshrink(x, threshold) if threshold else x.clone()
    check_tensor("threshold", threshold, 0, "or a number")
    if x.dim() < threshold.dim() or any(
        given not in (1, expected) for given, expected in zip(threshold.shape[::-1], x.shape[::-1], strict=False)
    ):
        raise InputError(f"threshold must broadcast against x {tuple(x.shape)}, got {tuple(threshold.shape)}")
    return soft_threshold_reference(x, threshold.to(x.dtype))


def soft_threshold_reference(x: Tensor, threshold: float | Tensor) -> Tensor:
    """The formula of `soft_threshold`, differentiated by torch."""
    shrunk = torch.sign(x) * torch.relu(torch.abs(x) - threshold)
    # torch differentiates sign and |x| at 0 to 0: of an identity, which θ = 0 is, the gradient is 1 there too.
    return torch.where((x == 0) & (threshold == 0), x, shrunk)


def shrink_reference(x: Tensor, threshold: float, nonlinearity: str) -> Tensor:
    """The nonlinearity of a layer: `S_θ`, ReLU in its place, or nothing at all."""
    if nonlinearity == "soft_threshold":
        return soft_threshold_reference(x, threshold)
    return torch.relu(x) if nonlinearity == "relu" else x


def effective_nonlinearity(nonlinearity: str, threshold: float) -> str:
    """What the implementations are told: "identity" for `S_0`, whose gradient an output of zero says nothing about."""
    return "identity" if nonlinearity == "soft_threshold" and threshold == 0.0 else nonlinearity


def shrink_(x: Tensor, threshold: float, nonlinearity: str) -> Tensor:
    """The nonlinearity of a layer, in place."""
    if nonlinearity == "relu":
        return x.relu_()
    return x if nonlinearity == "identity" else torch.ops.aten.softshrink.out(x, threshold, out=x)


def shrink_backward_(grad_output: Tensor, output: Tensor, threshold: float, nonlinearity: str) -> Tensor:
    """The gradient through `shrink_`, in place of `grad_output`, from the output alone: it passes where output ≠ 0."""
    if effective_nonlinearity(nonlinearity, threshold) == "identity":
        return grad_output
    return torch.ops.aten.softshrink_backward.grad_input(grad_output, output, 0.0, grad_input=grad_output)


def shrink_backward(grad_output: Tensor, output: Tensor, nonlinearity: str) -> Tensor:
    """As `shrink_backward_` into new, contiguous memory; `nonlinearity` is an effective one, `output` contiguous."""
    if nonlinearity == "identity":
        return grad_output.clone(memory_format=torch.contiguous_format)
    # One kernel of torch's: the output is of a nonlinearity that is zero exactly where its gradient is.
    grad_input = torch.empty_like(output)
    return torch.ops.aten.softshrink_backward.grad_input(grad_output, output, 0.0, grad_input=grad_input)
