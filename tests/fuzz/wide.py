"""Torch's formulas in extended precision: tensors of float64 that carry eleven more bits, through autograd too.

Every number is the sum of two in float64. What moves numbers (views, indexing, masks) moves both parts by itself;
arithmetic is numpy's in `longdouble`, of 64 bits. An operator that is in neither of the two lists raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Wide(Tensor):
    """A tensor of float64 with its remainder."""

    high: Tensor
    low: Tensor

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor) -> Wide:
        made = Tensor._make_wrapper_subclass(cls, high.shape, dtype=torch.float64)  # pyright: ignore[reportAttributeAccessIssue]
        made.high, made.low = high, low
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in ("view", "_unsafe_view"):  # the parts may lie otherwise than they say
            function, name = torch.ops.aten.reshape, "reshape"
        if name in MOVES:
            return cls(function(*tree_map(_high, args), **kwargs), function(*tree_map(_low, args), **kwargs))
        with np.errstate(all="ignore"):
            result = ARITHMETIC[name](*tree_map(_array, args), **kwargs)
        return _in_two_parts(result) if result.dtype == np.longdouble else torch.from_numpy(np.asarray(result))


def widen(tensor: Tensor) -> Wide:
    """The numbers of a float64 tensor."""
    tensor = tensor.detach().contiguous()
    return Wide(tensor, torch.zeros_like(tensor))


def nearest(tensor: Tensor) -> Tensor:
    """In float64, rounded."""
    return tensor.high if isinstance(tensor, Wide) else tensor.double()


def difference(one: Tensor, other: Tensor) -> Tensor:
    """One minus the other, in float64."""
    low = [tensor.low if isinstance(tensor, Wide) else torch.zeros(()) for tensor in (one, other)]
    return (nearest(one) - nearest(other)) + (low[0] - low[1])


def _high(one: Any) -> Any:
    return one.high if isinstance(one, Wide) else one


def _low(one: Any) -> Any:
    if isinstance(one, Wide):
        return one.low
    return torch.zeros_like(one) if isinstance(one, Tensor) and one.is_floating_point() else one


def _array(one: Any) -> Any:
    if isinstance(one, Wide):
        return one.high.numpy().astype(np.longdouble) + one.low.numpy()
    if isinstance(one, Tensor):
        return one.numpy().astype(np.longdouble) if one.is_floating_point() else one.numpy()
    return np.longdouble(one) if isinstance(one, float) else one


def _in_two_parts(array: Any) -> Wide:
    high = np.array(array, np.float64)
    low = np.where(np.isfinite(high), array - high, 0).astype(np.float64)
    return Wide(torch.from_numpy(high), torch.from_numpy(low))


def _sum(x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    return x.sum(axis=None if dim is None else tuple(np.atleast_1d(dim)), keepdims=keepdim)


def _mean(x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    total = _sum(x, dim, keepdim)
    return total / (x.size // max(1, total.size))


def _softmax(x: Any, dim: int, half: bool) -> Any:
    powers = np.exp(x - x.max(axis=dim, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=dim, keepdims=True)


def _log_softmax(x: Any, dim: int, half: bool) -> Any:
    below = x - x.max(axis=dim, keepdims=True, initial=-np.inf)
    return below - np.log(np.exp(below).sum(axis=dim, keepdims=True))


def _softmax_backward(upstream: Any, output: Any, dim: int, dtype: Any) -> Any:
    return output * (upstream - (upstream * output).sum(axis=dim, keepdims=True))


def _log_softmax_backward(upstream: Any, output: Any, dim: int, dtype: Any) -> Any:
    return upstream - np.exp(output) * upstream.sum(axis=dim, keepdims=True)


MOVES = {
    *("detach", "expand", "gather", "index", "index_put", "masked_fill", "masked_scatter", "masked_scatter_backward"),
    *("neg", "new_zeros", "reshape", "scatter_add", "select", "squeeze", "stack", "t", "transpose", "unsqueeze"),
    *("where", "zeros_like"),
}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _log_softmax_backward,
    "_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "abs": np.abs,
    "add": np.add,
    "bmm": np.matmul,
    "div": np.true_divide,
    "dot": np.dot,
    "eq": np.equal,
    "exp": np.exp,
    "mean": _mean,
    "mm": np.matmul,
    "mul": np.multiply,
    "pow": np.power,
    "relu": lambda x: np.where(x > 0, x, np.longdouble(0)),
    "sgn": np.sign,
    "sign": np.sign,
    "sub": np.subtract,
    "sum": _sum,
    "tanh": np.tanh,
    "tanh_backward": lambda upstream, output: upstream * (1 - output * output),
    "threshold_backward": lambda upstream, x, threshold: np.where(x > threshold, upstream, np.longdouble(0)),
}
