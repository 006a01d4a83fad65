"""The descent constraints: what bounds a layer's loss, and what that means for the weights of the depths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from cdt_fast.checks import check_choice, check_fraction, check_number
from cdt_fast.constraints.presets import REFERENCE_MEASUREMENTS, Coupling, DescentOptions, ReferenceMode
from cdt_fast.errors import InputError


class DescentCoupling:
    """g_0..g_L of the losses, and the weights that their multipliers give the depths; see `DescentConstraints`.

    Attributes:
        reference, margin: as given.
        tensors: of an automatic reference its level and the number of its measurements.

    Raises:
        InputError: an argument is outside of its range, or they do not go together.
    """

    def __init__(self, layers: int, options: DescentOptions, dtype: torch.dtype) -> None:
        self._layers = layers
        self.reference = _reference(options.reference)
        self._coupling = coupling = check_choice("coupling", options.coupling, get_args(Coupling))
        reference_mode = check_choice("reference_mode", options.reference_mode, get_args(ReferenceMode))
        self.margin = check_fraction("margin", options.margin)
        rates = _rates(options.rate, layers)
        if self.reference is None and rates is not None and (coupling == "absolute" or reference_mode == "anchor"):
            needs = 'coupling="absolute"' if coupling == "absolute" else 'reference_mode="anchor"'
            raise InputError(f'reference is None; {needs} needs one: a number > 0 or "auto"')
        self.settings: dict[str, Any] = {
            "rate": "none" if rates is None else ", ".join(map(repr, rates)),
            "reference": "none" if self.reference is None else self.reference,
            "coupling": coupling,
            "reference_mode": reference_mode,
            "margin": self.margin,
        }
        alpha = torch.tensor([math.nan] * layers if rates is None else rates, dtype=dtype)
        anchored = reference_mode == "anchor"
        exists = torch.full((layers + 1,), rates is not None)
        exists[0] = self.reference is not None and not anchored
        uses_reference = torch.full((layers + 1,), coupling == "absolute")
        uses_reference[0] = True
        uses_reference[1] |= anchored
        self.constants = {
            "rates": alpha,
            "shares": torch.cat([torch.zeros(1, dtype=dtype), alpha.nan_to_num(0.0)]),  # α of each depth
            "exists": exists,
            "uses_reference": uses_reference,
            # Whether λ_l pushes depth l−1 up: not where the bound of layer l is a constant in the gradient.
            "pushes": torch.full((layers,), coupling == "chain") & ~uses_reference[1:],
        }
        self.tensors: dict[str, Tensor] = {}
        if self.reference == "auto":
            self.tensors["reference_level"] = torch.zeros((), dtype=dtype)
            self.tensors["reference_measurements"] = torch.zeros((), dtype=torch.int64)
        else:
            level = math.nan if self.reference is None else float(self.reference)
            self.constants["reference_level"] = torch.tensor(level, dtype=dtype)
        # The bounds in training over the losses that they are taken from, and the share of λ_l that depth l−1 carries.
        factors = self._factors(self.margin)
        self.constants |= {"factors": factors, "upstream": torch.where(self.constants["pushes"], factors[1:], 0.0)}

    @property
    def rates(self) -> Tensor:
        """α, `[L]`; NaN without descent constraints."""
        return self.constants["rates"]

    @property
    def reference_level(self) -> Tensor:
        """ε₀, `[]`: NaN without a reference, the running mean so far while an automatic one is not fixed."""
        return (self.tensors if self.reference == "auto" else self.constants)["reference_level"]

    @property
    def active(self) -> Tensor:
        """Which constraints are in force, `[L+1]` bool: those that exist and whose reference, if any, is fixed."""
        if self.reference != "auto":
            return self.constants["exists"]
        fixed = self.tensors["reference_measurements"] >= REFERENCE_MEASUREMENTS
        return self.constants["exists"] & (fixed | ~self.constants["uses_reference"])

    @property
    def referring(self) -> Tensor:
        """Which constraints take their bound from the reference, `[L+1]` bool."""
        return self.constants["exists"] & self.constants["uses_reference"]

    @property
    def chained(self) -> list[bool]:
        """Of each depth 0..L, whether its bound is taken from the loss of the depth before."""
        return (~self.constants["uses_reference"]).tolist()

    def weights(self, multipliers: Tensor) -> Tensor:
        """What multipliers λ `[L+1]` add to the weights of the depths, `[L+1]`."""
        weights = multipliers.clone()
        weights[:-1].sub_(self.constants["upstream"] * multipliers[1:])
        return weights

    def violation(self, losses: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
        """g and the scale that makes it relative, both `[L+1]`; without meaning where not active.

        Args:
            losses: `[L+1]`.
            training: with the margin; else with the bounds as they are.
        """
        reference = self.reference_level
        margin = self.margin if training else 0.0
        if self._coupling == "absolute":
            bound = reference * (1 - self.constants["shares"]).cumprod(0)
            return losses - (1 - margin) * bound, bound.abs()
        uses_reference = self.constants["uses_reference"]
        before = torch.where(uses_reference, reference, losses.roll(1))
        factors = self.constants["factors"] if training else self._factors(0.0)
        return losses - factors * before, before.abs()

    @torch.no_grad()
    def measure_reference(self, loss: Tensor, finite: Tensor) -> None:
        """Take the loss of depth 0, `[]`, into an automatic reference, unless that is fixed."""
        if self.reference != "auto":
            return
        level, measurements = self.tensors["reference_level"], self.tensors["reference_measurements"]
        taken = finite & (measurements < REFERENCE_MEASUREMENTS)
        level.copy_(torch.where(taken, level + (loss - level) / (measurements + 1), level))
        measurements += taken

    def _factors(self, margin: float) -> Tensor:
        """The bounds over the losses that they are taken from, `[L+1]`."""
        return (1 - margin) * (1 - self.constants["shares"])


def _reference(value: Any) -> float | str | None:
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    return check_number("reference", value, 'a finite number > 0, "auto" or None', lambda number: number > 0)


def _rates(rate: Any, layers: int) -> list[float] | None:
    if rate is None:
        return None
    if not isinstance(rate, Sequence) or isinstance(rate, str):
        expected = f"a number in [0, 1), or a sequence of {layers} of them, one a layer"
        return [check_number("rate", rate, expected, lambda number: 0 <= number < 1)] * layers
    if len(rate) != layers:
        raise InputError(f"rate has {len(rate)} entries; expected a number, or a sequence of {layers}, one a layer")
    return [check_fraction(f"rate[{index}]", entry) for index, entry in enumerate(rate)]
