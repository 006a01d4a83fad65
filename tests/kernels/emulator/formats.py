"""What the bits of a register stand for: the types in the names of PTX instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
SMALLEST_NORMAL = np.float32(2.0**-126)
# Of a TF32 number on the tensor cores: the lower bits of a float32 are not looked at.
TF32_MASK = np.uint32(0xFFFFE000)


@dataclass(frozen=True)
class Format:
    """How unsigned integers of `size` bytes become numbers, and numbers become such integers.

    A packed format has two numbers in a register: `[threads]` becomes `[threads, 2]`.
    """

    size: int
    read: Callable[[Array], Array]
    write: Callable[[Array], Array]
    packed: bool = False


def bfloat_to_float(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bfloat(numbers: Array) -> Array:
    """Rounded to the nearest, ties to even, as `cvt.rn` does; every NaN becomes the one that the hardware gives."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FFF), rounded).astype(np.uint16)


def half_to_float(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def float_to_half(numbers: Array) -> Array:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).view(np.uint16)


def _unchanged(bits: Array) -> Array:
    return bits


def _viewed(size: int, kind: Any) -> Format:
    return Format(
        size, lambda bits: bits.view(kind), lambda numbers: np.ascontiguousarray(numbers, kind).view(UNSIGNED[size])
    )


def _pair(half: Format) -> Format:
    size = 2 * half.size

    def read(bits: Array) -> Array:
        return half.read(np.ascontiguousarray(bits).view(UNSIGNED[half.size])).reshape(-1, 2)

    def write(numbers: Array) -> Array:
        return half.write(np.ascontiguousarray(numbers).reshape(-1)).view(UNSIGNED[size])

    return Format(size, read, write, packed=True)


FORMATS: dict[str, Format] = {
    "pred": Format(0, _unchanged, _unchanged),
    "f16": Format(2, half_to_float, float_to_half),
    "bf16": Format(2, bfloat_to_float, float_to_bfloat),
    "f32": _viewed(4, np.float32),
    "f64": _viewed(8, np.float64),
}
for _size in UNSIGNED:
    for _name in (f"b{8 * _size}", f"u{8 * _size}"):
        FORMATS[_name] = Format(_size, _unchanged, _unchanged)
    FORMATS[f"s{8 * _size}"] = _viewed(_size, SIGNED[_size])
for _name in ("f16", "bf16", "f32"):
    FORMATS[f"{_name}x2"] = _pair(FORMATS[_name])


def flushed(numbers: Array) -> Array:
    """`.ftz`: numbers too small to be normal become zero."""
    return np.where(np.abs(numbers) < SMALLEST_NORMAL, np.copysign(np.float32(0), numbers), numbers)


def fused(x: Array, y: Array, z: Array) -> Array:
    """x·y + z, rounded once, to float32, or of float64 to float64: the product of two float32 is exact in float64.

    The sum is rounded to float64 before (of float64 product and sum to the 64 bits of a long double), which changes the
    result in one of some 10⁸ cases (one of some 10³) by half an eps.
    """
    result = x.dtype if x.dtype == np.float64 else np.dtype(np.float32)
    return (x.astype(np.longdouble if x.dtype == np.float64 else np.float64) * y + z).astype(result)


def truncated_division(x: Array, y: Array) -> Array:
    """Towards zero, as in C; what PTX leaves undefined, the division by zero, is a division by one here."""
    y = np.where(y == 0, np.ones_like(y), y)
    quotient = np.floor_divide(x, y)
    return quotient + ((x - quotient * y != 0) & ((x < 0) != (y < 0))).astype(quotient.dtype)


def truncated_remainder(x: Array, y: Array) -> Array:
    return np.fmod(x, np.where(y == 0, np.ones_like(y), y))
