"""Baselines of robustness without constraints: noise on the codes between layers, and layers passed over."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.sequence.counter_based_rng import hashed, unit_interval, unit_noise

_NOISE, _DROPOUT = 0, 1  # streams of a window


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
