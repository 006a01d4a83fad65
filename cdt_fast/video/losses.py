"""The losses of a network that denoises, as the training step takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cdt_fast.models import DUST, DenoisingViT


class ReconstructionLosses(nn.Module):
    """The losses of a model that denoises as a forward, so that the hooks of a distributed wrapper fire.

    Args:
        model: the network.
        autocast: the dtype of the matrix products; None: that of the weights.
    """

    def __init__(self, model: DUST | DenoisingViT, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self._autocast = model, autocast

    def forward(self, noisy: Tensor, clean: Tensor, weights: Tensor | Sequence[float] | None) -> tuple[Tensor, Tensor]:
        """`(total, per_depth)` as `DUST.layer_losses`."""
        if self._autocast is None:
            return self.model.layer_losses(noisy, clean, weights)
        # Without autocast's cache: a copy of the weights that outlives a capture would be read at the next one.
        with torch.autocast(noisy.device.type, self._autocast, cache_enabled=False):
            return self.model.layer_losses(noisy, clean, weights)
