"""torch's own `linear_cross_entropy`, chunked as its `LinearCrossEntropyOptions()` decides for device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.bench.baselines.depths import Loss
from cdt_fast.bench.case import Unavailable


def prepare() -> Loss:
    """`(hidden [N, d], head [V, d], targets [N], reduction)` → the loss.

    With "mean" gradients are computed in the forward and scaled in the backward; with "none" the backward computes the
    logits again.

    Raises:
        Unavailable: this torch has no such function.
    """
    # Looked up by name: the package supports versions of torch that lack both.
    chunked = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if chunked is None or options is None:
        raise Unavailable(f"torch {torch.__version__} has no chunked linear_cross_entropy")

    def loss(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return chunked(hidden, head, targets, reduction=reduction, options=options())

    return loss
