"""The losses of a network that denoises, as the training step takes them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from cdt_fast.video.networks import Denoiser, is_adaptive
from cdt_fast.video.noise import known_deviation


class ReconstructionLosses(nn.Module):
    """The losses of a model that denoises as a forward, so that the hooks of a distributed wrapper fire.

    Args:
        model: the network.
        autocast: the dtype of the matrix products; None: that of the weights.
    """

    def __init__(self, model: Denoiser, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self._autocast = model, autocast

    def forward(
        self, noisy: Tensor, clean: Tensor, deviation: Tensor, weights: Tensor | Sequence[float] | None
    ) -> tuple[Tensor, Tensor]:
        """`(total, per_depth)` as `DUST.layer_losses`; `deviation` is the noise's, one a window."""
        known = known_deviation(is_adaptive(self.model), deviation, len(noisy))
        # Without autocast's cache: a copy of the weights that outlives a capture would be read at the next one.
        narrow = torch.autocast(noisy.device.type, self._autocast, cache_enabled=False) if self._autocast else None
        with narrow or nullcontext():
            return self.model.layer_losses(noisy, clean, weights, **known)
