"""The losses of a network that denoises, as the training step takes them, and baselines of robustness: noise on the
codes between layers, layers passed over, a price for the Jacobian, a bound on the spectral norm of dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.models import DUST
from cdt_fast.training.counter_based_rng import hashed, unit_interval, unit_noise
from cdt_fast.video.networks import Denoiser, is_adaptive, known_deviation
from cdt_fast.video.noise import LEAST_DEVIATION
from cdt_fast.video.overlap import reconstructed
from cdt_fast.video.settings import VideoSettings

_NOISE, _DROPOUT, _DIRECTION = 0, 1, 2  # streams of a window
_SMALL = 0.1  # of the noise's deviation, by which the input moves for a difference quotient
_SQUARINGS = 8  # of a Gram matrix of n rows: its norm from above, by at most n^(1 / 2^9), 1 % for n = 256


class ReconstructionLosses(nn.Module):
    """The losses of a model that denoises as a forward, so that the hooks of a distributed wrapper fire.

    Args:
        model: the network.
        autocast: the dtype of the matrix products; None: that of the weights.
        overlapping: the settings of a run whose losses are those of the mean over shifted grids of patches; None: of
            the patches of one grid.
        regularizers: η and p of `BetweenLayers` and μ of `jacobian_penalty`, with a seed for each window; None: none.
    """

    def __init__(
        self,
        model: Denoiser,
        autocast: torch.dtype | None,
        overlapping: VideoSettings | None = None,
        regularizers: tuple[float, float, float] | None = None,
    ) -> None:
        super().__init__()
        self.model, self._autocast, self._overlapping, self._added = model, autocast, overlapping, regularizers

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """`(total, per_depth)` as `DUST.layer_losses`.

        Args:
            arguments: noisy and clean tokens, or frames `[b, T, h, w]` where grids overlap; the noise's deviation
                `[b]`; with `regularizers` the windows' seeds `[b]`; the weights of the depths or None.
        """
        noisy, clean, deviation, *seeds, weights = arguments
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
            options: dict[str, Any] = {**known_deviation(self.model, deviation, len(noisy))}
            if self._added is None:
                return self.model.layer_losses(noisy, clean, weights, **options)
            noise, dropout, price = self._added
            between = {"between": BetweenLayers(noise, dropout, *seeds)}
            total, per_depth = self.model.layer_losses(noisy, clean, weights, **between, **options)
            if price:
                penalty = jacobian_penalty(lambda tokens: self.model(tokens, **options), noisy, deviation, *seeds)
                # Losses of a noise-adaptive model are in units of the noise's variance.
                total = total + price * (penalty / deviation.square().mean() if options else penalty)
            return total, per_depth


class BetweenLayers:
    """What the codes of a depth go through before the next layer takes them, see `DUST.layer_losses`.

        H_l ← H_{l−1}                    with probability p, for a whole window (l > 1)
        H_l ← H_l + η std(H_l) ξ         ξ ~ N(0, 1), std over a sequence and constant in the gradient

    Every draw is a function of the window's seed, the depth and the place alone: the same however windows are put into
    micro-batches and over ranks, and also where a step is captured.

    Args:
        noise: η.
        dropout: p.
        seeds: int64 `[windows]`, one a window.
    """

    def __init__(self, noise: float, dropout: float, seeds: Tensor) -> None:
        self._noise, self._dropout, self._seeds = noise, dropout, seeds
        self._before: Tensor | None = None

    def __call__(self, depth: int, codes: Tensor) -> Tensor:
        """The codes `[sequences, T, m]` of the windows, one window's sequences after the other's."""
        keys = hashed(self._seeds, torch.full_like(self._seeds, depth))
        before, self._before = self._before, codes
        if self._dropout and before is not None:
            drawn = unit_interval(hashed(keys, torch.full_like(keys, _DROPOUT)))
            passed = (drawn < self._dropout).repeat_interleave(len(codes) // len(keys))
            codes = self._before = torch.where(passed[:, None, None], before, codes)
        if self._noise:
            stream = hashed(keys, torch.full_like(keys, _NOISE))
            places = torch.arange(codes.numel() // len(keys), device=codes.device)
            drawn = unit_noise(hashed(stream[:, None], places), "gaussian").view(codes.shape)
            spread = codes.detach().float().std((-2, -1), correction=0, keepdim=True)
            codes = codes + (self._noise * spread * drawn).to(codes.dtype)
        return codes


def jacobian_penalty(network: Callable[[Tensor], Tensor], noisy: Tensor, deviation: Tensor, seeds: Tensor) -> Tensor:
    """The squared Frobenius norm of the Jacobian J of `network` a token, times the noise's variance; differentiable.

        σ² ‖J‖_F² = E ‖J σξ‖² ≈ ‖f(y + h σξ) − f(y)‖² / h²      ξ ~ N(0, 1), one draw, h = 0.1

    which is what the noise in the input adds to the squared error (Hutchinson's estimate; a difference quotient, as ops
    have no second derivative).

    Args:
        network: f, of tokens.
        noisy: y, tokens `[sequences, T, n]` of windows, one window's sequences after the other's.
        deviation: σ, one a window.
        seeds: int64, one a window.
    """
    keys = hashed(seeds, torch.full_like(seeds, _DIRECTION))
    places = torch.arange(noisy.numel() // len(keys), device=noisy.device)
    drawn = unit_noise(hashed(keys[:, None], places), "gaussian").view(noisy.shape).to(noisy)
    spread = deviation.to(noisy).repeat_interleave(len(noisy) // len(keys))[:, None, None]
    moved = network(noisy + _SMALL * spread * drawn) - network(noisy)
    return (moved.float() / _SMALL).square().sum(-1).mean()


@torch.no_grad()
def bound_spectral_norms(model: DUST, largest: float) -> None:
    """Scale each dictionary down to `‖D‖₂² / c ≤ largest`, in place and without waiting for the device.

    The norm is read from above: ‖G‖ ≤ ‖G^k‖_F^(1/k) for the smaller Gram matrix G, k = 2⁸.
    """
    dictionary = model.dictionary
    rows = dictionary.float() if dictionary.shape[-2] <= dictionary.shape[-1] else dictionary.float().mT
    power = rows @ rows.mT
    log_norm = torch.zeros_like(power[..., :1, :1])
    for number in range(_SQUARINGS + 1):
        norm = torch.linalg.matrix_norm(power, keepdim=True).clamp(min=torch.finfo(power.dtype).tiny)
        log_norm += norm.log() / 2**number
        power = (power / norm) @ (power / norm)
    step = max(model.steps) if model.tied else dictionary.new_tensor(model.steps)[:, None, None]
    dictionary.mul_((largest / (log_norm.exp() * step)).sqrt().clamp(max=1).view_as(log_norm).to(dictionary.dtype))
