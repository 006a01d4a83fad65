"""The losses of a network that denoises, as the training step takes them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.video.networks import Denoiser, is_adaptive, known_deviation
from cdt_fast.video.noise import LEAST_DEVIATION
from cdt_fast.video.overlap import reconstructed
from cdt_fast.video.settings import VideoSettings


class ReconstructionLosses(nn.Module):
    """The losses of a model that denoises as a forward, so that the hooks of a distributed wrapper fire.

    Args:
        model: the network.
        autocast: the dtype of the matrix products; None: that of the weights.
        overlapping: the settings of a run whose losses are those of the mean over shifted grids of patches; None: of
            the patches of one grid.
    """

    def __init__(
        self,
        model: Denoiser,
        autocast: torch.dtype | None,
        overlapping: VideoSettings | None = None,
    ) -> None:
        super().__init__()
        self.model, self._autocast, self._overlapping = model, autocast, overlapping

    def forward(
        self, noisy: Tensor, clean: Tensor, deviation: Tensor, weights: Tensor | Sequence[float] | None
    ) -> tuple[Tensor, Tensor]:
        """`(total, per_depth)` as `DUST.layer_losses`.

        Args:
            noisy, clean: tokens, or frames `[b, T, h, w]` where grids overlap.
            deviation: of the noise, `[b]`.
            weights: of the depths.
        """
        # Without autocast's cache: a copy of the weights that outlives a capture would be read at the next one.
        narrow = torch.autocast(noisy.device.type, self._autocast, cache_enabled=False) if self._autocast else None
        with narrow or nullcontext():
            if self._overlapping is not None:
                data = self._overlapping.data
                depths = reconstructed(self.model, self._overlapping, noisy, deviation, data.overlap)
                # A row of pixels is a token to the loss: scaled, its mean over rows is the sum over a patch's pixels.
                scale = torch.full_like(deviation, (data.patch_frames * data.patch**2 / clean.shape[-1]) ** 0.5)
                if is_adaptive(self.model):
                    scale = scale / deviation.clamp(min=LEAST_DEVIATION)
                scale = scale.to(clean)[:, None, None, None]
                scaled = [depth * scale for depth in depths]
                return ops.layerwise_reconstruction_loss(scaled, clean * scale, depth_weights=weights)
            return self.model.layer_losses(noisy, clean, weights, **known_deviation(self.model, deviation, len(noisy)))
