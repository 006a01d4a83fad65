"""What a step launches, on tensors that have shapes and no memory: ours, those of the libraries, torch's small ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdt_fast.kernels.cards import GpuSpec
from cdt_fast.kernels.launch import Launch, recording, stored_bytes
from cdt_fast.ops.shared.registration import OPERATORS

META = torch.device("meta")
# They allocate, or look at memory that is there.
_NO_LAUNCH = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh", "detach")
# They write over their first argument without reading it.
_OVERWRITE = ("copy_", "fill_", "zero_")
# Nor do these: they take its shape.
_LIKE = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "mv": 0, "_addmm_activation": 1}
_CAST = {
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.nn.functional.linear),
    *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__),
}


@dataclass(frozen=True)
class Entry:
    """One launch.

    Attributes:
        name: of the kernel, or of torch's operation.
        traffic: bytes that it reads and writes.
        flop: of its products, whole tiles.
        dtype: of their factors.
        blocks, warps: of the grid of ours; 0 blocks: a library's, which is taken to fill the card.
    """

    name: str
    traffic: int
    flop: float = 0.0
    dtype: torch.dtype = torch.float32
    blocks: int = 0
    warps: int = 4

    @classmethod
    def of(cls, launch: Launch) -> Entry:
        """A launch of ours."""
        tensors = [leaf for leaf in tree_leaves(dict(launch.arguments)) if isinstance(leaf, Tensor)]
        name, blocks = launch.kernel.__name__, math.prod(launch.grid)
        return cls(name, launch.traffic, launch.flop, tensors[0].dtype, blocks, launch.blocks.warps)


def record(prepare: Callable[[], Callable[[], object]], card: GpuSpec) -> list[Entry]:
    """The launches of what `prepare` makes of meta tensors, in order; what it takes to make it is not among them."""
    autocast = _Autocast()
    casts = {"autocast": autocast.region, "is_autocast_enabled": autocast.enabled, "get_autocast_dtype": autocast.dtype}
    with (
        mock.patch.multiple(torch, **casts),
        mock.patch.object(torch.amp, "is_autocast_available", return_value=True),
        mock.patch.multiple("torch.optim.adam", _device_dtype_check_for_fused=_accept),
        recording(card) as launches,
        autocast,
        _Recorder(launches) as recorder,
    ):
        step = prepare()
        recorder.take()
        recorder.entries.clear()
        step()
        recorder.take()
    return recorder.entries


def _accept(parameter: Tensor, cuda_unsupported: bool = False) -> None:
    """torch's fused optimizer is there for meta tensors, too."""


class _Autocast(TorchFunctionMode):
    """torch's autocast, which has no meta device: products in bfloat16, the casts of parameters kept for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self._cached, self._depth = False, True, 0
        self._casts: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def region(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> Iterator[None]:
        """In the place of `torch.autocast(…)`."""
        before, self.on = self.on, enabled
        cached, self._cached = self._cached, cache_enabled is not False
        self._depth += 1
        try:
            yield
        finally:
            self.on, self._cached, self._depth = before, cached, self._depth - 1
            if not self._depth:
                self._casts.clear()

    def enabled(self, device_type: str | None = None) -> bool:
        """In the place of `torch.is_autocast_enabled`."""
        return self.on

    def dtype(self, device_type: str) -> torch.dtype:
        """In the place of `torch.get_autocast_dtype`."""
        return torch.bfloat16

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and function in _CAST:
            args = [self._narrow(value) if isinstance(value, Tensor) else value for value in args]
        return function(*args, **(kwargs or {}))

    def _narrow(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (self._cached and tensor.is_leaf and tensor.requires_grad):
            return tensor.bfloat16()
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor.bfloat16()
        return self._casts[id(tensor)]


class _Recorder(TorchDispatchMode):
    """Notes every operation on meta tensors; an operator of ours is entered, and what it launches is noted."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self._launches = launches

    def take(self) -> None:
        """Note what our launchers have launched since."""
        self.entries += map(Entry.of, self._launches)
        self._launches.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function._schema.name.split("::")[1]
        if function.namespace == "cdt_fast" and name in OPERATORS:
            operator = OPERATORS[name]
            with self:
                return operator.forward(operator.whole(args))
        self.take()
        result = _result(function, name, args, kwargs)
        returns = function._schema.returns
        given = _on_the_card((args, kwargs))
        view = bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        # A schema says so also of `to`, which copies where the dtype is another one.
        held = {tensor.untyped_storage()._cdata for tensor in given}
        view = view and all(tensor.untyped_storage()._cdata in held for tensor in _on_the_card(result))
        if (given or _on_the_card(result)) and not view and name not in _NO_LAUNCH:
            self.entries.append(_entry(function, name, args, kwargs, result))
        return result


def _result(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name.startswith("_fused_adam"):
        return None
    place = _PRODUCTS.get(name)
    if place is not None and function._overloadname.startswith("dtype"):  # torch 2.11 has none for meta tensors
        (left, right), dtype = args[place : place + 2], next(kind for kind in args if isinstance(kind, torch.dtype))
        out = kwargs.get("out")
        return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=dtype) if out is None else out
    return function(*args, **kwargs)


def _entry(function: Any, name: str, args: Any, kwargs: Any, result: Any) -> Entry:
    written, read = list(_on_the_card(result)), []
    values = [*zip(function._schema.arguments, args, strict=False)]
    values += [(one, kwargs[one.name]) for one in function._schema.arguments if one.name in kwargs]
    for argument, value in values:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes:
            written += _on_the_card(value)
        if name not in _LIKE and not (writes and (argument.kwarg_only or name in _OVERWRITE)):
            read += _on_the_card(value)
    traffic = sum(sum(map(stored_bytes, {id(one): one for one in some}.values())) for some in (read, written))
    place = _PRODUCTS.get(name.removesuffix("_"))
    if place is None:
        return Entry(name, traffic)
    left = args[place]
    return Entry(name, traffic, 2.0 * written[0].numel() * left.shape[-1], left.dtype)


def _on_the_card(values: Any) -> Iterable[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_meta]
