"""Results as bounds: what chosen depths are to reach, whatever the other depths do.

    ℓ_k ≤ b_k            b_k a number, or a factor of a reference run's loss or of the warm-up's at depth k

A bound adds its multiplier μ_k ≥ 0 to the weight of ℓ_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import check_number, check_positive
from cdt_fast.constraints.measurement import AverageLosses
from cdt_fast.constraints.presets import DescentOptions
from cdt_fast.errors import InputError

_EXPECTED = 'a finite number > 0, or a factor such as "1.01x"'


class ResultBounds:
    """ℓ_k ≤ b_k for chosen depths.

    Attributes:
        average: the average losses of the warm-up, where a bound is a factor of those, else None.
        any: whether there is a bound.

    Raises:
        InputError: an argument is outside what is said above.
    """

    def __init__(self, options: DescentOptions, layers: int, dtype: torch.dtype) -> None:
        bounds = _depths("bounds", options.bounds, layers)
        parsed = {depth: parsed_bound(f"bounds[{depth}]", bound) for depth, bound in bounds.items()}
        reference = _reference_losses(options.reference_losses, layers)
        factors = [depth for depth, (_, is_factor) in parsed.items() if is_factor]
        if reference is not None and not factors:
            raise InputError('reference_losses is what factors such as "1.01x" are taken of; bounds holds no factor')
        of_warmup = bool(factors) and reference is None
        if of_warmup and not options.warmup_steps:
            raise InputError(
                f"bounds[{factors[0]}] is a factor of the loss at the end of the warm-up, but warmup_steps is 0: give "
                "reference_losses (those of a run without constraints), or a warm-up"
            )
        exists = torch.zeros(layers + 1, dtype=torch.bool)
        levels, scales = torch.zeros(layers + 1, dtype=dtype), torch.zeros(layers + 1, dtype=dtype)
        for depth, (number, is_factor) in parsed.items():
            exists[depth] = True
            if is_factor and reference is None:
                scales[depth] = number
            else:
                levels[depth] = number * reference[depth] if is_factor and reference is not None else number
        self.settings = {
            "bounds": ", ".join(f"{depth}: {bounds[depth]}" for depth in sorted(parsed)) or "none",
            "reference_losses": "none" if reference is None else ", ".join(map(repr, reference)),
        }
        self.constants = {"bound_exists": exists, "bound_levels": levels, "bound_factors": scales}
        self.average = AverageLosses("warmup", layers, dtype) if of_warmup else None
        self.any = bool(parsed)

    @property
    def levels(self) -> Tensor:
        """b, `[L+1]`; without meaning where there is no bound."""
        levels = self.constants["bound_levels"]
        return levels if self.average is None else levels + self.constants["bound_factors"] * self.average.losses

    @property
    def active(self) -> Tensor:
        """Which bounds are in force, `[L+1]` bool; one that is a factor of the warm-up's loss once that is known."""
        exists = self.constants["bound_exists"]
        if self.average is None:
            return exists
        return exists & (self.average.known | (self.constants["bound_factors"] == 0))

    def violation(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """ℓ − b and the scale |b| that makes it relative, both `[L+1]`; without meaning where not active."""
        levels = self.levels
        return losses - levels, levels.abs()


def parsed_bound(name: str, bound: Any) -> tuple[float, bool]:
    """The number of a bound, and whether it is a factor: `0.9` or `"1.01x"`.

    Raises:
        InputError: it is neither.
    """
    if isinstance(bound, str):
        text = bound.strip().lower()
        try:
            number = float(text.removesuffix("x"))
        except ValueError:
            raise InputError(f"{name} must be {_EXPECTED}, got {bound!r}") from None
        return check_number(name, number, _EXPECTED, lambda value: value > 0), text.endswith("x")
    return check_number(name, bound, _EXPECTED, lambda value: value > 0), False


def _depths(name: str, given: Any, layers: int) -> dict[int, Any]:
    """`given`, a dictionary whose keys are depths that are read, or nothing."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not given:
        raise InputError(f"{name} must be a dictionary of depths, such as {{{layers}: 0.9}}, or None, got {given!r}")
    for depth in given:
        if not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= layers:
            raise InputError(f"{name} holds depth {depth!r}, which is not read: the depths are 0 to {layers}")
    return dict(given)


def _reference_losses(given: Any, layers: int) -> list[float] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != layers + 1:
        raise InputError(f"reference_losses must be {layers + 1} losses, one a depth, or None, got {given!r}")
    return [check_positive(f"reference_losses[{depth}]", loss) for depth, loss in enumerate(given)]
