"""Numbers, and gradients that may not arrive."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal float64 on the CPU, the same for the same seed on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients_of(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Zeros where nothing arrives."""
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]
