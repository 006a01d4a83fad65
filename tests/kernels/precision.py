"""What tests of kernels share: a bound on the error, no looser than plain torch's own, and hard places in memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


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
    epsilon = torch.finfo(given.dtype).eps
    mine, torchs = (tensor.cpu().double() - exact for tensor in (given, plain))
    for measure in (lambda error: error.square().mean().sqrt().item(), lambda error: error.abs().max().item()):
        bound = 1.5 * measure(torchs) + epsilon * (measure(exact) + (0.0 if terms is None else measure(terms)))
        assert measure(mine) <= bound, f"{name}: error {measure(mine):.3g}, torch's {measure(torchs):.3g}"


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
