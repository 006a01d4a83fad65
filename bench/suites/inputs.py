"""What the suites of ops share: inputs that live only while a case is measured, and what counts as rounding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from cdt_fast.bench.baselines.support import first_run, name_of_mode, tried
from cdt_fast.bench.case import Implementation, Step

Made = TypeVar("Made")

# Relative root mean square. A result is rounded once, and before that attention weights, gradients of scores or logits
# are, and sums over tokens; each rounding adds at most half a unit, 2^-9 in bfloat16 and 2^-24 in float32, relative to
# terms that partly cancel. Measured at toy size on a CPU, the worst is 9e-3 in bfloat16 and 5e-7 in float32.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass
class Inputs:
    """What an op reads."""

    leaves: list[Tensor]  # with gradients, in the order in which the op takes them
    others: list[Tensor]  # without a gradient
    upstream: list[Tensor]  # gradients of the outputs
    step: float = 0.0  # 1/c of the dictionary among the leaves

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers as leaves of another dtype."""
        return Inputs(
            [leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves],
            [other.to(dtype) if other.is_floating_point() else other for other in self.others],
            [gradient.to(dtype) for gradient in self.upstream],
            self.step,
        )


Apply = Callable[[Inputs], Sequence[Tensor]]


def step_of(apply: Apply, inputs: Inputs) -> Step:
    """Outputs and gradients of an op."""

    def step() -> list[Tensor]:
        outputs = apply(inputs)
        gradients = torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
        return [*(output.detach() for output in outputs), *gradients]

    return step


def shared(make: Callable[[], Made]) -> Callable[[], Made]:
    """Inputs of a case: made when the first step is prepared, and freed with the last one that reads them."""
    made: weakref.WeakValueDictionary[str, Made] = weakref.WeakValueDictionary()
    return lambda: made.get("inputs") or made.setdefault("inputs", make())


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


def peer(name: str, prepare: Callable[[], Step]) -> Implementation:
    """A peer that is unavailable, with the reason, also where its first run fails."""
    return Implementation(name, "peer", lambda: tried(prepare()))


def compilers(modes: tuple[str, ...], prepare: Callable[[str], Step], suffix: str = "") -> Iterator[Implementation]:
    """torch.compile in these modes; `prepare` gives the step in one."""
    for mode in modes:
        yield Implementation(name_of_mode(mode) + suffix, "peer", lambda mode=mode: first_run(prepare(mode)), late=True)
