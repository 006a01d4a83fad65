"""The formula of `layerwise_reconstruction_loss`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def layerwise_reconstruction_loss_reference(reconstructions: Sequence[Tensor], target: Tensor) -> Tensor:
    """The losses `[L+1]`, in any dtype, differentiated by torch."""
    return torch.stack([(target - reconstruction).square().sum(-1).mean() for reconstruction in reconstructions])
