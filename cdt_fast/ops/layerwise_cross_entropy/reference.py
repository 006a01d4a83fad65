"""The formula of the layerwise cross-entropy, which the tests believe (docs/ops.md §5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def layerwise_cross_entropy_reference(
    hidden_states: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The losses of the depths `[L+1]`, or with the reduction "none" of the tokens `[L+1, ...]`, zero at ignored ones.

    In any dtype, differentiated by torch; arguments as those of the op.
    """

    def log_probabilities(hidden: Tensor) -> Tensor:
        logits = hidden @ weight.mT
        if bias is not None:
            logits = logits + bias
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return torch.log_softmax(logits, -1)

    losses = []
    for depth, hidden in enumerate(hidden_states):
        of_depth = targets if isinstance(targets, Tensor) else targets[depth]
        counted = of_depth != ignore_index
        log_p = log_probabilities(hidden[counted])
        at_target = log_p.gather(-1, of_depth[counted].unsqueeze(-1)).squeeze(-1)
        loss = -(1 - label_smoothing) * at_target - label_smoothing * log_p.mean(-1)
        if reduction == "none":
            losses.append(loss.new_zeros(of_depth.shape).masked_scatter(counted, loss))
        else:
            losses.append(loss.sum() / counted.sum() if reduction == "mean" else loss.sum())
    return torch.stack(losses)
