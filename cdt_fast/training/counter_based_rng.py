"""Random numbers that are a function of their place: the same ones however a batch is cut, padded or sharded.

A generator hands out its numbers in an order, and that of a GPU even depends on how many are asked for: a text that is
padded to another length would get other noise. Here each number is a hash of (seed, sample, token, component), by the
output function of SplitMix64 (Steele, Lea, Flood 2014). The same on every device, up to the rounding of `erfinv` and
`log`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DISTRIBUTIONS = ("gaussian", "laplace", "uniform")

# The constants of SplitMix64 as signed 64-bit integers, in which torch's products wrap around.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def hashed(key: Tensor, index: Tensor) -> Tensor:
    """64 random bits for each `index` ≥ 0 of the stream `key`, both int64 and broadcast against each other."""
    bits = key + (index + 1) * _STEP
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def unit_interval(bits: Tensor) -> Tensor:
    """float32 in [0, 1), from the upper 24 of 64 random bits."""
    return _shifted(bits, 40).to(torch.float32) * 2.0**-24


def unit_noise(bits: Tensor, distribution: str) -> Tensor:
    """float32 of mean 0 and variance 1, "gaussian", "laplace" or "uniform", from 64 random bits each."""
    centered = _centered(bits)
    if distribution == "gaussian":
        return torch.erfinv(centered) * math.sqrt(2.0)
    if distribution == "laplace":
        return centered.sign() * torch.log1p(-centered.abs()) * -math.sqrt(0.5)
    return centered * math.sqrt(3.0)


def _shifted(bits: Tensor, count: int) -> Tensor:
    # The sign bit of an arithmetic shift is taken off again.
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _centered(bits: Tensor) -> Tensor:
    """float32 in (−1, 1), odd multiples of 2⁻²⁴: never zero nor an end, and exact."""
    return (_shifted(bits, 40) * 2 - (2**24 - 1)).to(torch.float32) * 2.0**-24
