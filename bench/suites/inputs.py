"""What the suites of ops share: inputs that live only while a case is measured, and what counts as rounding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cdt_fast.bench.baselines import compiled
from cdt_fast.bench.baselines.support import tried
from cdt_fast.bench.case import Implementation, Step

Inputs = TypeVar("Inputs")

# Relative root mean square. A result is rounded once, and before that attention weights, gradients of scores or logits
# are, and sums over tokens; each rounding adds at most half a unit, 2^-9 in bfloat16 and 2^-24 in float32, relative to
# terms that partly cancel. Measured at toy size on a CPU, the worst is 9e-3 in bfloat16 and 5e-7 in float32.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


class Shared(Generic[Inputs]):
    """Inputs of a case: made when the first step is prepared, and freed with the last one that reads them."""

    def __init__(self, make: Callable[[], Inputs]) -> None:
        self._make = make
        self._made: weakref.ref[Inputs] | None = None

    def __call__(self) -> Inputs:
        made = None if self._made is None else self._made()
        if made is None:
            made = self._make()
            self._made = weakref.ref(made)
        return made


def seeded(device: torch.device) -> torch.Generator:
    """The generator that every case draws its inputs from: the same ones in every process."""
    return torch.Generator(device).manual_seed(0)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float32 on the generator's device."""
    return torch.randn(*shape, generator=generator, device=generator.device)


def formula_dtype(size: str) -> torch.dtype:
    """The precision of what the implementations are compared with: float64, but where a card could not hold it."""
    return torch.float32 if size == "gpu" else torch.float64


def name_of(dtype: torch.dtype) -> str:
    """As a case has it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def peer(name: str, prepare: Callable[[], Step], late: bool = False) -> Implementation:
    """A peer that is unavailable, with the reason, also where its first run fails; late: as `Implementation` has it."""
    return Implementation(name, "peer", lambda: tried(prepare()), late=late)


def compilers(modes: tuple[str, ...], prepare: Callable[[str], Step]) -> Iterator[Implementation]:
    """torch.compile in these modes; `prepare` gives the step in one."""
    for mode in modes:
        yield Implementation(
            compiled.name_of(mode), "peer", lambda mode=mode: compiled.first_run(prepare(mode)), late=True
        )
