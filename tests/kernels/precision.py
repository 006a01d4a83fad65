"""What tests of kernels share: a bound on the error, no looser than plain torch's own, and hard places in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdt_fast.ops.common import dot_precision

TF32_EPSILON = 2.0**-10


def assert_as_precise(name: str, given: Tensor, plain: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """The error of `given` against float64 is at most 1.5 times that of `plain`, plus a floor of eps times the size.

    `given` and `plain` have one dtype; both the root mean square and the maximum of the errors have to hold. Where the
    result is a difference of larger `terms`, eps times their size is allowed beside it.
    """
    assert given.dtype == plain.dtype
    assert given.shape == plain.shape == exact.shape, f"{name}: {tuple(given.shape)} for {tuple(exact.shape)}"
    if not given.numel():
        return
    assert torch.isfinite(given).all(), f"{name} is not finite"
    epsilon = epsilon_of(given.dtype)
    mine, torchs = (tensor.cpu().double() - exact for tensor in (given, plain))
    for measure in (lambda error: error.square().mean().sqrt().item(), lambda error: error.abs().max().item()):
        bound = 1.5 * measure(torchs) + epsilon * (measure(exact) + (0.0 if terms is None else measure(terms)))
        assert measure(mine) <= bound, f"{name}: error {measure(mine):.3g}, torch's {measure(torchs):.3g}"


def epsilon_of(dtype: torch.dtype) -> float:
    """Of the numbers that are multiplied: TF32 has ten bits behind the first."""
    return TF32_EPSILON if dot_precision(dtype) == "tf32" else torch.finfo(dtype).eps


class TF32Products(TorchDispatchMode):
    """Plain torch's products of float32 as tensor cores make them: of factors without the bits that TF32 has not."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            args = [_cut(factor) for factor in args]
        elif function.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.baddbmm):
            args = [args[0], *(_cut(factor) for factor in args[1:])]
        return function(*args, **(kwargs or {}))


def _cut(factor: Tensor) -> Tensor:
    if factor.dtype != torch.float32:
        return factor
    return (factor.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


def poisoned(tensor: Tensor) -> Tensor:
    """The same values, each row and each column next to NaN: a read outside of the tensor shows."""
    buffer = tensor.new_full((tensor.shape[0] + 2, 2 * tensor.shape[1] + 1), float("nan"))
    inside = buffer[1:-1, 1::2]
    inside.copy_(tensor)
    return inside


def far_apart(tensor: Tensor, dimension: int) -> Tensor:
    """The same values of a `[3, …]` or `[…, 3]`, 2³⁰ numbers apart in one dimension, so that the last lies 2³¹ away.

    The 2³¹ numbers before the first are there too, and zero: an offset that wraps around reads those, and does not
    crash. On a CPU nearly all of the memory is never touched.
    """
    size = 2**32 + tensor.numel()
    if tensor.is_cuda:
        buffer = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
    else:
        buffer = torch.from_numpy(np.zeros(size * tensor.element_size(), np.uint8)).view(tensor.dtype)
    strides = [1, 1]
    strides[dimension] = 2**30
    inside = buffer.as_strided(tensor.shape, strides, 2**31)
    inside.copy_(tensor)
    return inside
