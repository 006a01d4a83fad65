"""Arguments and a driver that stand in for those of a launch, so that Triton specializes and files a kernel as for one.

Only the launch itself knows the key under which it looks for a compiled kernel in Triton's cache; so what is compiled
ahead of time goes the launch's way, up to where the driver would be called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from cdt_fast.kernels.cards import GpuSpec

Path = tuple[int, ...]  # the position of an argument; of a tuple's element: that and the position inside
DIVISOR = 16
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_DTYPES = {kind: dtype for dtype, kind in POINTERS.items()}


class Driver:
    """What Triton asks a driver for before it compiles for a card.

    Args:
        card: it answers as if this were there.
        device: the number of the device, under which Triton also keeps what it has compiled.
    """

    def __init__(self, card: GpuSpec, device: int = 0) -> None:
        self.card, self._device = card, device

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card.capability, 32)


@contextlib.contextmanager
def compiling_for(card: GpuSpec) -> Iterator[None]:
    """Let Triton believe that `card` is there."""
    before = dict(vars(driver))
    # No device has so high a number: what is compiled here must not be taken for what the first device can run.
    driver.set_active(Driver(card, device=card.capability))  # type: ignore[arg-type]
    try:
        yield
    finally:
        vars(driver).update(before)


class _Pointer:
    """A tensor of which Triton asks no more than the dtype and the address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self._address = dtype, address

    def data_ptr(self) -> int:
        return self._address


def stand_in(kind: Any, path: Path, constants: Mapping[Path, Any], divisible: Collection[Path]) -> Any:
    """An argument of a kind in Triton's spelling that Triton specializes as the one that was described.

    Args:
        kind: "*bf16", "i32", "constexpr", …; a tuple of them for a tuple.
        path: where the argument is.
        constants: the values of the constants, by their paths.
        divisible: the paths of the pointers and integers that sixteen divides.
    """
    if isinstance(kind, tuple):
        return tuple(stand_in(one, (*path, place), constants, divisible) for place, one in enumerate(kind))
    if kind == "constexpr":
        return constants[path]
    if kind.startswith("*"):
        return _Pointer(_DTYPES[kind], 0 if path in divisible else DIVISOR // 2)
    if kind in ("u1", "fp32"):
        return kind == "u1" or 0.5
    least = {"i32": 0, "i64": 2**32, "u64": 2**63}[kind]
    return least + (DIVISOR if path in divisible else 3)
