"""How often inner depths of a language model name the token that its last depth names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cdt_fast.models.layer_losses.targets import IGNORED

_TOKENS = 512  # a share of so many is known to ±.04


@torch.no_grad()
def shares_of_agreement(
    features: Sequence[Tensor], asked: Sequence[bool], weight: Tensor, bias: Tensor | None, targets: Tensor
) -> Tensor:
    """The share of tokens at which the head names the same for a depth as for the last; never waits for the device.

    Args:
        features: what the head is given at each depth, `[B, T, d]` each, the last depth's last.
        asked: which depths are measured; the others have a share of 1. As many as there are to answer for: the last
            depth need not be among them.
        weight, bias: of the head, `[V, d]` and `[V]`.
        targets: `[B, T]`; tokens of −100 do not count. At most 512 of the others are read, at even distances.

    Returns:
        `[len(asked)]`, in float32.
    """
    counted = targets.flatten() != IGNORED
    read = min(_TOKENS, counted.numel())
    places = counted.to(torch.int8).argsort(descending=True, stable=True)  # those that count first, in their order
    # At even distances over those that count; where they are fewer, they and some that do not count.
    chosen = places[torch.arange(read, device=counted.device) * counted.sum().clamp(min=read) // read]
    counted = counted[chosen]

    def named(rows: Tensor) -> Tensor:
        return F.linear(rows.flatten(0, -2)[chosen], weight, bias).argmax(-1)

    last = named(features[-1])
    shares = torch.ones(len(asked), device=last.device)
    for number, wanted in enumerate(asked):
        if wanted:
            agreed = (named(features[number]) == last) & counted
            shares[number] = agreed.sum() / counted.sum().clamp(min=1)
    return shares
