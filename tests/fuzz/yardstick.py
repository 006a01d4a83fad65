"""How far from the truth a result may lie: the criterion of the package, in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fuzz.cases import Case, Function
from tests.fuzz.wide import difference, nearest, widen

TIMES_TORCH = 1.5
DRAWS = 3
aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.bmm, aten.dot)
SUMS = (aten.sum, aten.mean)
OF_ROWS = (aten._softmax, aten._log_softmax)


def largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def root_mean_square(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item() if tensor.numel() else 0.0


MEASURES: tuple[Callable[[Tensor], float], ...] = (largest, root_mean_square)


def run(function: Function, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Results, then gradients; the results' own gradients are eighths."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    outputs = list(function(**leaves))
    source = torch.Generator().manual_seed(7)
    upstream = [(torch.randint(-8, 9, one.shape, generator=source) / 8).to(one.dtype) for one in outputs]
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    gradients = [
        torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves.values(), strict=True)
    ]
    return [one.detach() for one in (*outputs, *gradients)]


class Rounding(TorchDispatchMode):
    """Every step of torch off by one rounding: what it computes times 1 ± epsilon, with signs drawn for each number.

    A softmax is exp(x − log Σ exp x), and the sum's logarithm a step: the number a row that a kernel keeps. What
    the backward of its logarithm subtracts is one too, so that a difference of zero has the rounding of its terms.

    Attributes:
        longest: the most terms that a step has summed.
    """

    def __init__(self, epsilon: float, seed: int) -> None:
        super().__init__()
        self.longest = 1
        self._epsilon, self._source = epsilon, torch.Generator().manual_seed(seed)

    def moved(self, tensor: Tensor) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=self._source).double() * 2 - 1
        return tensor * (1 + self._epsilon * signs)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        step = function.overloadpacket
        if function.is_view or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if step in PRODUCTS:
            self.longest = max(self.longest, args[0].shape[-1])
        elif step in SUMS:
            self.longest = max(self.longest, args[0].numel() // max(1, result.numel()))
        elif step in OF_ROWS:
            self.longest = max(self.longest, args[0].shape[args[1]])
        if step in OF_ROWS:
            log_sums = args[0].logsumexp(args[1], keepdim=True).nan_to_num()  # of a row that is masked: −inf
            off = log_sums - self.moved(log_sums)
            result = result + off if step is aten._log_softmax else result * off.exp()
        elif step is aten._log_softmax_backward_data:  # upstream − exp(output) Σ upstream
            subtracted = args[1].exp() * args[0].sum(args[2], keepdim=True)
            result = result + (subtracted - self.moved(subtracted))
        return self.moved(result)


class Yardstick:
    """The truth about a case, and what may be missed of it.

    Attributes:
        truth: the formula's results and gradients: in float64, of float64 arguments in extended precision.
    """

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self._formula, self._dtype, self._epsilon = case.formula, dtype, torch.finfo(dtype).eps
        self._arguments = dict(case.tensors)
        if case.padding is not None:
            padding = case.padding.unsqueeze(-1)
            self._arguments |= {name: case.tensors[name].masked_fill(padding, 0.0) for name in case.padded}
        make = widen if dtype == torch.float64 else Tensor.double
        self.truth = run(case.formula, {name: make(tensor) for name, tensor in self._arguments.items()})

    def out_of_range(self) -> bool:
        """Whether the truth is not finite, or near the end of the dtype's numbers."""
        limit = torch.finfo(self._dtype).max / 64
        return not all(bool((nearest(one).abs() <= limit).all()) for one in self.truth)

    @cached_property
    def torchs(self) -> list[Tensor]:
        """The formula in the dtype of the case."""
        return run(self._formula, self._arguments)

    @cached_property
    def _rounded(self) -> tuple[list[list[Tensor]], float]:
        """The formula in float64 with steps that round as the dtype does, and √n of the longest sum."""
        found, longest = [], 1
        for number in range(DRAWS):
            with Rounding(self._epsilon, number) as rounding:
                moved = {name: rounding.moved(tensor.double()) for name, tensor in self._arguments.items()}
                found.append(run(self._formula, moved))
            longest = max(longest, rounding.longest)
        return found, math.sqrt(longest)

    def at_kink(self, first_result: Tensor) -> bool:
        """Whether rounding decides which numbers of the first result are zero."""
        zeros = nearest(self.truth[0]) == 0
        if not torch.equal(first_result == 0, zeros):
            return True
        return any(not torch.equal(one[0] == 0, zeros) for one in self._rounded[0])

    def excess(self, number: int, given: Tensor) -> str | None:
        """What is wrong with a result or gradient; None: nothing."""
        truth = self.truth[number]
        error = difference(given, truth)
        bounds = self._torchs(number)
        if all(measure(error) <= bound for measure, bound in zip(MEASURES, bounds, strict=True)):
            return None
        rounded, root = self._rounded
        changes = [difference(one[number], truth) for one in rounded]
        for measure, bound in zip(MEASURES, bounds, strict=True):
            bound += root * max(map(measure, changes))
            if not measure(error) <= bound:
                return f"off by {measure(error):.3g}, bound {bound:.3g}, of {measure(nearest(truth)):.3g}"
        return None

    def _torchs(self, number: int) -> list[float]:
        """By each measure 1.5 times torch's own error, and a rounding of the result."""
        own = difference(self.torchs[number], self.truth[number])
        if not own.isfinite().all():
            # In 16 bits a step may overflow where the truth does not: then in units of rounding, of float32.
            single = run(self._formula, {name: tensor.float() for name, tensor in self._arguments.items()})
            own = difference(single[number], self.truth[number]) * (self._epsilon / torch.finfo(torch.float32).eps)
        tiny = torch.finfo(self._dtype).tiny * self._epsilon  # below the normal numbers rounding is absolute
        size = nearest(self.truth[number])
        return [TIMES_TORCH * measure(own) + self._epsilon * measure(size) + tiny for measure in MEASURES]
