"""Layer dropout: in training a layer passes a sample on as it came, the more often the deeper it is.

    p_l = p (e^(l ln 2 / (L − 1)) − 1),    l = 0..L−1: the first layer always runs, the last with 1 − p

Source: LayerSkip (Elhoushi et al., 2024), §3.1.1, without its schedule over time, which it has for pretraining alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def dropout_rates(largest: float, layers: int) -> list[float]:
    """p_l of each of `layers` layers; `largest` is p, that of the last."""
    return [largest * (2 ** (layer / max(layers - 1, 1)) - 1) for layer in range(layers)]


def add_layer_dropout(layers: Sequence[nn.Module], largest: float) -> None:
    """Let `layers` drop samples in training mode, each sample of a batch by itself, by torch's own random numbers.

    What a dropped layer would have computed is computed and not used: the batch keeps its shape, and no time is saved.
    """
    for layer, rate in zip(layers, dropout_rates(largest, len(layers)), strict=True):
        if rate:
            layer.register_forward_hook(functools.partial(_answer, rate), with_kwargs=True)


def _answer(rate: float, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if not layer.training:
        return output
    state: Tensor = args[0] if args else kwargs["hidden_states"]
    dropped = torch.rand(len(state), *[1] * (state.dim() - 1), device=state.device) < rate
    if isinstance(output, tuple):
        return torch.where(dropped, state, output[0]), *output[1:]
    return torch.where(dropped, state, output)
