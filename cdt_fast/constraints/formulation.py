"""The objective and the constraints, as functions of the losses of L+1 depths (docs/constraints.md §1 and §2).

Running averages are buffers; constants of the options are buffers that are not saved, so that both follow `.to()`. No
function here waits for the device.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError, check_choice, check_fraction, check_non_negative, check_number
from cdt_fast.constraints import presets
from cdt_fast.constraints.presets import REFERENCE_MEASUREMENTS, DescentOptions

_AVERAGED = 10  # measurements that an average is about


class Violations(NamedTuple):
    """Constraints of one kind, one entry per depth, `[L+1]` each."""

    violation: Tensor  # positive where violated; meaningless where not active
    scale: Tensor  # divides the violation to make it relative
    active: Tensor  # which constraints are in force, bool


def _constant(values: Any) -> nn.Buffer:
    return nn.Buffer(torch.as_tensor(values), persistent=False)


class RunningMean(nn.Module):
    """An exponential average of measurements, ā ← ā + (ℓ − ā) / min(n, window) at the n-th; with `fixes` the mean of
    the first `window`."""

    def __init__(self, shape: tuple[int, ...], window: int, fixes: bool = False) -> None:
        super().__init__()
        self.window, self.fixes = window, fixes
        self.mean = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def update(self, value: Tensor, finite: Tensor) -> None:
        """Take in one measurement, unless it is not finite."""
        taken = finite & (self.count < self.window) if self.fixes else finite
        self.count.add_(taken)
        change = (value - self.mean) / self.count.clamp(1, self.window)
        # Viewed: torch 2.13 compiles away what is written in place to a float64 number without dimensions.
        self.mean.view(-1).add_(torch.where(taken, change, 0.0).view(-1))


class MeanOfLast(nn.Module):
    """The mean of the last measurements, of at most `window` of them."""

    def __init__(self, size: int, window: int) -> None:
        super().__init__()
        self.last = nn.Buffer(torch.zeros(window, size, dtype=torch.float64))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.int64))

    @property
    def mean(self) -> Tensor:
        """Return the mean, zero before the first measurement."""
        return self.last.sum(0) / self.count.clamp(1, len(self.last))

    def update(self, value: Tensor, finite: Tensor) -> None:
        """Take in one measurement, in the place of the oldest, unless it is not finite."""
        place = (self.count % len(self.last)).view(1)
        self.last.index_copy_(0, place, torch.where(finite, value, self.last.index_select(0, place)))
        self.count.add_(finite)


class Objective(nn.Module):
    """F, as weights that are known before the forward. The gradient of log ℓ_l is that of ℓ_l over ℓ_l, for which the
    average ā_l stands. The common factor ā_L gives the last depth the weight c_L, so that multipliers mean what they
    mean beside ℓ_L."""

    def __init__(self, layers: int, options: DescentOptions) -> None:
        super().__init__()
        name, given = options.objective, options.coefficients
        check_choice("objective", name, get_args(presets.ObjectiveName))
        self.numbers = (*[0.0 if name == "last" else 1.0] * layers, 1.0)
        if given is not None:
            if name == "last":
                raise InputError(f'coefficients are for objective="depths" and "log"; "last" has none, got {given!r}')
            if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != layers + 1:
                expected = f"{layers + 1} numbers >= 0, one a depth, or None"
                raise InputError(f"coefficients must be {expected}, got {given!r}")
            self.numbers = tuple(check_non_negative(f"coefficients[{depth}]", c) for depth, c in enumerate(given))
            if not any(self.numbers):
                raise InputError("coefficients must not all be zero: nothing would be minimized")
        self.average = RunningMean((layers + 1,), _AVERAGED) if name == "log" else None
        self.coefficients = _constant(torch.tensor(self.numbers, dtype=torch.float64))

    def weights(self) -> Tensor:
        """Return the weights of the depths, `[L+1]`."""
        if self.average is None:
            return self.coefficients
        ratio = self.average.mean[-1] / self.average.mean
        # A loss of zero, or none yet, has no finite weight.
        return self.coefficients * torch.where(ratio.isfinite(), ratio, 1.0)

    def value(self, losses: Tensor) -> Tensor:
        """Return F of losses `[L+1]`; that of "log" times ā_L (1 before the first measurement), as in the weights."""
        if self.average is None:
            return (self.coefficients * losses).sum()
        factor = torch.where(self.average.count > 0, self.average.mean[-1], 1.0)
        return factor * torch.where(self.coefficients > 0, self.coefficients * losses.log(), 0.0).sum()


class Descent(nn.Module):
    """g_0..g_L, and the weights that their multipliers give the depths; see `DescentConstraints`. `exists` and
    `uses_reference` (not the previous loss), `[L+1]` bool, are of the constraints, of which the first is that of the
    reference; `measured` is the mean that becomes an automatic one, else None."""

    def __init__(self, layers: int, options: DescentOptions) -> None:
        super().__init__()
        reference = options.reference
        if reference not in (None, "auto"):
            expected = 'a finite number > 0, "auto" or None'
            reference = check_number("reference", reference, expected, lambda number: number > 0)
        self.reference = reference
        coupling = check_choice("coupling", options.coupling, get_args(presets.Coupling))
        anchored = check_choice("reference_mode", options.reference_mode, get_args(presets.ReferenceMode)) == "anchor"
        margin = check_fraction("margin", options.margin)
        self.absolute, self.rates = coupling == "absolute", _rates(options.rate, layers)
        if reference is None and self.rates is not None and (self.absolute or anchored):
            needs = 'coupling="absolute"' if self.absolute else 'reference_mode="anchor"'
            raise InputError(f'reference is None; {needs} needs one: a number > 0 or "auto"')
        if coupling == "input" and anchored:
            raise InputError('coupling="input" needs reference_mode="constraint", got "anchor": it is about depth 0')
        self.exists = _constant([reference is not None and not anchored, *[self.rates is not None] * layers])
        self.uses_reference = _constant([True, self.absolute or anchored, *[self.absolute] * (layers - 1)])
        rates = torch.tensor([0.0, *(self.rates or [0.0] * layers)], dtype=torch.float64)
        self.kept = _constant(1 - rates)
        # The share of λ_l that depth l−1 carries: none where the bound of layer l is a constant in the gradient.
        pushed = {"chain": layers, "input": 1}.get(coupling, 0)
        pushes = ~self.uses_reference[1:] & (torch.arange(layers) < pushed)
        self.upstream = _constant(torch.where(pushes, (1 - margin) * self.kept[1:], 0.0))
        self.measured = RunningMean((), REFERENCE_MEASUREMENTS, fixes=True) if reference == "auto" else None
        level = reference if isinstance(reference, float) else math.nan
        self.level = _constant(torch.tensor(level, dtype=torch.float64))

    @property
    def reference_level(self) -> Tensor:
        """ε₀, a scalar: NaN without a reference, the running mean so far while an automatic one is not fixed."""
        return self.level if self.measured is None else self.measured.mean

    def weights(self, multipliers: Tensor) -> Tensor:
        """Return what multipliers λ `[L+1]` add to the weights of the depths, `[L+1]`."""
        weights = multipliers.clone()
        weights[:-1].sub_(self.upstream * multipliers[1:])
        return weights

    def violations(self, losses: Tensor, margin: float) -> Violations:
        """Return g of losses `[L+1]` with bounds lowered by the share `margin`; inactive where ε₀ is not fixed."""
        reference, active = self.reference_level, self.exists
        if self.measured is not None:
            active = active & ((self.measured.count >= REFERENCE_MEASUREMENTS) | ~self.uses_reference)
        if self.absolute:
            bound = reference * self.kept.cumprod(0)
            return Violations(losses - (1 - margin) * bound, bound.abs(), active)
        before = torch.where(self.uses_reference, reference, losses.roll(1))
        return Violations(losses - (1 - margin) * self.kept * before, before.abs(), active)


class ResultBounds(nn.Module):
    """ℓ_k ≤ b_k for the depths that `exists`, `[L+1]` bool, names; some b are factors of the warm-up's `average`."""

    def __init__(self, layers: int, bounds: Mapping[int, float | str]) -> None:
        super().__init__()
        if not isinstance(bounds, Mapping) or not bounds:
            expected = f"a dictionary of depths, such as {{{layers}: 0.9}}, or None"
            raise InputError(f"bounds must be {expected}, got {bounds!r}")
        self.exists = _constant(torch.zeros(layers + 1, dtype=torch.bool))
        levels, factors = torch.zeros(2, layers + 1, dtype=torch.float64)
        for depth, bound in bounds.items():
            if not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= layers:
                raise InputError(f"bounds holds depth {depth!r}, which is not read: the depths are 0 to {layers}")
            number, is_factor = _parsed(f"bounds[{depth}]", bound)
            self.exists[depth] = True
            (factors if is_factor else levels)[depth] = number
        self.average = MeanOfLast(layers + 1, _AVERAGED) if factors.any() else None
        self.levels, self.factors = _constant(levels), _constant(factors)

    def violations(self, losses: Tensor) -> Violations:
        """Return ℓ − b of losses `[L+1]`; a factor of the warm-up's loss is inactive until that is known."""
        levels, active = self.levels, self.exists
        if self.average is not None:
            levels = levels + self.factors * self.average.mean
            active = active & ((self.average.count > 0) | (self.factors == 0))
        return Violations(losses - levels, levels.abs(), active)


def _rates(rate: Any, layers: int) -> list[float] | None:
    if rate is None:
        return None
    if not isinstance(rate, Sequence) or isinstance(rate, str):
        expected = f"a number in [0, 1), or a sequence of {layers} of them, one a layer"
        return [check_number("rate", rate, expected, lambda number: 0 <= number < 1)] * layers
    if len(rate) != layers:
        raise InputError(f"rate has {len(rate)} entries; expected a number, or a sequence of {layers}, one a layer")
    return [check_fraction(f"rate[{index}]", entry) for index, entry in enumerate(rate)]


def _parsed(name: str, bound: Any) -> tuple[float, bool]:
    """Return the number of a bound, and whether it is a factor: `0.9` or `"1.01x"`."""
    number, is_factor, expected = bound, False, 'a finite number > 0, or a factor such as "1.01x"'
    if isinstance(bound, str):
        text = bound.strip().lower()
        is_factor = text.endswith("x")
        try:
            number = float(text.removesuffix("x"))
        except ValueError:
            raise InputError(f"{name} must be {expected}, got {bound!r}") from None
    return check_number(name, number, expected, lambda value: value > 0), is_factor
