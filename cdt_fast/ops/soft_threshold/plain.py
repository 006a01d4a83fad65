"""Shrinkage in plain torch, and the nonlinearities of a layer in place, with their gradients.

torch's own kernel reads x once and writes once, in each direction: there is nothing that one of ours could fuse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import Nonlinearity


def shrink(x: Tensor, threshold: float) -> Tensor:
    """`S_θ(x)`."""
    # torch's kernel has gradient 0 at x = 0 for a threshold of 0 too, where it is 1.
    return torch.nn.functional.softshrink(x, _held(threshold, x.dtype)) if threshold else x.clone()


def effective_nonlinearity(nonlinearity: Nonlinearity, threshold: float) -> Nonlinearity:
    """What the implementations are told: "identity" for `S_0` and `T_0`, of whose gradient a zero says nothing."""
    return "identity" if nonlinearity in ("soft_threshold", "hard_threshold") and threshold == 0.0 else nonlinearity


def shrink_(x: Tensor, threshold: float, nonlinearity: Nonlinearity) -> Tensor:
    """An effective nonlinearity, in place."""
    if nonlinearity == "relu":
        return x.relu_()
    if nonlinearity == "hard_threshold":
        return x.masked_fill_(x.abs() <= threshold, 0.0)
    return x if nonlinearity == "identity" else torch.ops.aten.softshrink.out(x, _held(threshold, x.dtype), out=x)


def shrink_backward(
    grad_output: Tensor, output: Tensor, nonlinearity: Nonlinearity, out: Tensor | None = None
) -> Tensor:
    """The gradient through `shrink_`, from the output alone: it passes where output ≠ 0.

    In new memory, contiguous as the output is, or in `out`, which may be `grad_output` itself.
    """
    grad_input = torch.empty_like(output) if out is None else out
    if nonlinearity == "identity":
        return grad_input.copy_(grad_output)
    # One kernel of torch's: the output is of a nonlinearity that is zero exactly where its gradient is.
    return torch.ops.aten.softshrink_backward.grad_input(grad_output, output, 0.0, grad_input=grad_input)


def _held(threshold: float, dtype: torch.dtype) -> float:
    """The threshold, or the largest number of the dtype, which shrinks every other to zero as well: torch takes no
    threshold beyond it."""
    return min(threshold, torch.finfo(dtype).max)
