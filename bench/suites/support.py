"""Shared by the suites: inputs that live only while a case is measured, tolerances, torch.compile, and the reasons why
a peer cannot run here."""

import functools
import importlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from cdt_fast.bench.case import Implementation, Step, Unavailable

Made = TypeVar("Made")

# Relative root mean square: a few roundings of at most 2^-9 in bfloat16 and 2^-24 in float32, of terms that partly
# cancel. Measured at toy size on a CPU, the worst is 9e-3 in bfloat16 and 5e-7 in float32.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
# Every shape of a suite compiles the same functions anew; beyond its limit torch would go on in eager without a word.
LIMITS: dict[str, Any] = {"recompile_limit": 100_000, "accumulated_recompile_limit": 100_000}


@dataclass
class Inputs:
    """The inputs of an op."""

    leaves: list[Tensor]  # with gradients, in the order in which the op takes them
    upstream: list[Tensor]  # gradients of the outputs
    others: list[Tensor]  # without a gradient
    step: float = 0.0  # 1/c of the dictionary among the leaves

    def to(self, dtype: torch.dtype) -> Self:
        """The same numbers as leaves of another dtype."""
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves]
        others = [other.to(dtype) if other.is_floating_point() else other for other in self.others]
        return replace(self, leaves=leaves, upstream=[gradient.to(dtype) for gradient in self.upstream], others=others)


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
    """The generator that every case draws its inputs from."""
    return torch.Generator(device).manual_seed(0)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float32 on the generator's device."""
    return torch.randn(*shape, generator=generator, device=generator.device)


def weights_of_depths(count: int, device: torch.device) -> Tensor:
    """Weights of either sign; none is zero: a depth that is switched off would be skipped by some implementations."""
    return torch.linspace(-0.5, 1.5, 2 * count, device=device)[1::2].contiguous()


def formula_dtype(size: str) -> torch.dtype:
    """The precision of what the implementations are compared with: float64, but where a card could not hold it."""
    return torch.float32 if size == "gpu" else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def imported(name: str, device: torch.device) -> Any:
    """The module `name`, a peer for NVIDIA GPUs; `Unavailable` without such a GPU or the package."""
    require_gpu(name, device)
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package that was built for another torch fails in many ways
        raise Unavailable(f"{name} cannot be imported: {_one_line(error)}") from error


def require_gpu(what: str, device: torch.device) -> None:
    """Raise `Unavailable` unless `device` is an NVIDIA GPU."""
    if device.type != "cuda":
        raise Unavailable(f"{what} needs an NVIDIA GPU")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def peer(name: str, prepare: Callable[[], Step]) -> Implementation:
    """A peer, which is unavailable also if its first run fails; that run compiles what torch.compile has to compile."""

    def first_run() -> Step:
        step = prepare()

        def marked() -> list[Tensor]:
            # Without the mark, a CUDA graph would keep the outputs of the steps before alive.
            torch.compiler.cudagraph_mark_step_begin()
            return step()

        try:
            with torch._dynamo.config.patch(**LIMITS, fail_on_recompile_limit_hit=True):
                marked()
        except Exception as error:
            raise Unavailable(_one_line(error)) from error
        return marked if name.startswith("torch.compile") else step

    return Implementation(name, "peer", first_run)


def compilers(function: Callable[..., Any], device: torch.device, size: str, autotune: bool = True) -> dict[str, Any]:
    """Return compilers of `function` for static shapes, by the names of the timed modes; none at toy size."""
    tuned = "max-autotune" if device.type == "cuda" else "max-autotune-no-cudagraphs"
    modes = {"torch.compile": "default", **({f"torch.compile, {tuned}": tuned} if autotune else {})}
    options = {"dynamic": False, "fullgraph": True}
    found = {name: functools.partial(torch.compile, function, mode=mode, **options) for name, mode in modes.items()}
    return {} if size == "toy" else found
