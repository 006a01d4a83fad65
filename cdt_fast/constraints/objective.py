"""What is minimized: F of `DescentConstraints`, as weights that are known before the forward.

The gradient of log ℓ_l is that of ℓ_l over ℓ_l. In the place of the ℓ_l of the step, which is not known before its
forward, stands ā_l, the average over the last measurements. The common factor ā_L leaves the minimum where it is and
gives the last depth the weight c_L, so that multipliers mean what they mean beside ℓ_L. Before the first measurement
all depths weigh c_l.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from cdt_fast.checks import check_choice, check_non_negative
from cdt_fast.constraints.measurement import AverageLosses
from cdt_fast.constraints.presets import ObjectiveName
from cdt_fast.errors import InputError


class Objective:
    """F of the losses of L+1 depths; see the module.

    Attributes:
        average: the average losses of "log", else None.

    Raises:
        InputError: an argument is outside what is said above.
    """

    def __init__(self, name: ObjectiveName, coefficients: Any, layers: int, dtype: torch.dtype) -> None:
        self.name = check_choice("objective", name, get_args(ObjectiveName))
        numbers = _coefficients(coefficients, layers, name)
        self.settings = {
            "objective": name,
            "coefficients": "none" if coefficients is None else ", ".join(map(repr, numbers)),
        }
        self.constants = {"coefficients": torch.tensor(numbers, dtype=dtype)}
        self.average = AverageLosses("average", layers, dtype) if name == "log" else None
        self._numbers = tuple(numbers)

    def weights(self) -> Tensor:
        """The weights of the depths, `[L+1]`, a new tensor."""
        coefficients = self.constants["coefficients"]
        if self.average is None:
            return coefficients.clone()
        average = self.average.losses
        ratio = average[-1] / average
        # A loss of zero, or none yet: no finite weight does justice to it.
        return coefficients * torch.where(ratio.isfinite() & self.average.known, ratio, 1.0)

    def value(self, losses: Tensor) -> Tensor:
        """F of losses `[L+1]`, `[]`; that of "log" times ā_L (1 before the first measurement), as its weights are."""
        coefficients = self.constants["coefficients"]
        if self.average is None:
            return (coefficients * losses).sum()
        factor = torch.where(self.average.known, self.average.losses[-1], 1.0)
        return factor * torch.where(coefficients > 0, coefficients * losses.log(), 0.0).sum()

    def known_weights(self) -> tuple[float, ...] | None:
        """The weights as numbers; None where they depend on losses."""
        return self._numbers if self.average is None else None


def _coefficients(given: Any, layers: int, name: str) -> list[float]:
    if name == "last":
        if given is not None:
            raise InputError(
                'coefficients weigh the depths of objective="depths" and "log"; objective="last" has none, '
                f"got {given!r}"
            )
        return [0.0] * layers + [1.0]
    if given is None:
        return [1.0] * (layers + 1)
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != layers + 1:
        raise InputError(f"coefficients must be {layers + 1} numbers >= 0, one a depth, got {given!r}")
    numbers = [check_non_negative(f"coefficients[{depth}]", number) for depth, number in enumerate(given)]
    if not any(numbers):
        raise InputError("coefficients must not all be zero: nothing would be minimized")
    return numbers
