"""The formulas of shrinkage and of the nonlinearities of a layer, in any dtype, differentiated by torch."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_threshold_reference(x: Tensor, threshold: float | Tensor) -> Tensor:
    """The formula of `soft_threshold`."""
    shrunk = torch.sign(x) * torch.relu(torch.abs(x) - threshold)
    # torch differentiates sign and |x| at 0 to 0: of an identity, which θ = 0 is, the gradient is 1 there too.
    return torch.where((x == 0) & (threshold == 0), x, shrunk)


def shrink_reference(x: Tensor, threshold: float, nonlinearity: str) -> Tensor:
    """The nonlinearity of a layer: `S_θ`, `T_θ(x) = x [|x| > θ]` or ReLU in its place, or nothing at all."""
    if nonlinearity == "soft_threshold":
        return soft_threshold_reference(x, threshold)
    if nonlinearity == "hard_threshold":
        return torch.where(torch.abs(x) <= threshold, 0.0, x) if threshold else x
    return torch.relu(x) if nonlinearity == "relu" else x
