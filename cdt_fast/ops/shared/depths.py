"""What the layerwise losses share: the list of tensors with one a depth, and the weights of the depths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.ops.common import check_shape, check_tensor, describe


def check_depths(name: str, tensors: Any, shape: tuple[int, ...] | None, layout: str) -> None:
    """Require a list of at least one floating-point tensor, all of `shape` or, with None, of that of the first."""
    if not isinstance(tensors, Sequence) or not tensors:
        raise InputError(f"{name} must be a list of one tensor a depth, got {describe(tensors)}")
    for depth, tensor in enumerate(tensors):
        # The usual case first: to write the names takes as long as a small product.
        if (
            isinstance(tensor, Tensor)
            and tensor.is_floating_point()
            and tensor.dim()
            and tensor.shape == (tensors[0].shape if shape is None else shape)
        ):
            continue
        check_tensor(f"{name}[{depth}]", tensor, 1, "[..., n]" if shape is not None else "[..., d]")
        check_shape(f"{name}[{depth}]", tensor, tuple(tensors[0].shape) if shape is None else shape, layout)


def weights_of_depths(depth_weights: Tensor | Sequence[float] | None, depths: int) -> Tensor | None:
    """`[depths]`; None without weights."""
    if depth_weights is None:
        return None
    try:
        # Numbers in float64: `as_tensor` would round a list of them to float32.
        dtype = depth_weights.dtype if isinstance(depth_weights, Tensor) else torch.float64
        weights = torch.as_tensor(depth_weights, dtype=dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"depth_weights must be {depths} numbers, got {describe(depth_weights)}") from error
    check_shape("depth_weights", weights, (depths,), "one weight a depth")
    return weights


def zero_weight_mask(factors: Tensor) -> list[bool]:
    """Which of the factors are known to be zero; on a GPU none is, as to look at them would mean to wait for it."""
    if factors.device.type != "cpu":
        return [False] * len(factors)
    return [factor == 0 for factor in factors.tolist()]


def detach_zero_weighted(tensors: Sequence[Tensor], weights: Tensor | None) -> list[Tensor]:
    """The same list with the depths whose weight is known to be zero detached, so that they get no gradient at all.

    Under torch.compile the weights have no values yet; there such a depth gets a gradient of zeros.
    """
    if weights is None or torch.compiler.is_compiling():
        return list(tensors)
    return [
        tensor.detach() if zero else tensor for tensor, zero in zip(tensors, zero_weight_mask(weights), strict=True)
    ]
