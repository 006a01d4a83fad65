"""The cross-entropy behind a linear head in eager torch: all logits at once, the softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def loss(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """`hidden` `[N, d]`, `head` `[V, d]`, `targets` `[N]` → their mean, or with reduction "none" `[N]`."""
    return torch.nn.functional.cross_entropy((hidden @ head.mT).float(), targets, reduction=reduction)
