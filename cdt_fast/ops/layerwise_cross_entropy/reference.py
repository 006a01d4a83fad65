"""The formula of the layerwise cross-entropy, which the tests believe (MATH: section 6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def layerwise_cross_entropy_reference(
    hidden_states: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    inner_kl: float = 0.0,
    detach_last: bool = True,
) -> Tensor:
    """The losses of the depths `[L+1]`, in any dtype, differentiated by torch; arguments as those of the op."""
    counted = targets != ignore_index
    of_depths: list[Tensor] = []
    for hidden in hidden_states:
        logits = hidden[counted] @ weight.mT
        if bias is not None:
            logits = logits + bias
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        of_depths.append(torch.log_softmax(logits, -1))
    last = of_depths[-1].detach() if detach_last else of_depths[-1]
    losses = []
    for depth, log_probabilities in enumerate(of_depths):
        at_target = log_probabilities.gather(-1, targets[counted].unsqueeze(-1)).squeeze(-1)
        loss = -(1 - label_smoothing) * at_target - label_smoothing * log_probabilities.mean(-1)
        if inner_kl and depth < len(of_depths) - 1:
            kl = torch.nn.functional.kl_div(log_probabilities, last, reduction="none", log_target=True).sum(-1)
            loss = (1 - inner_kl) * loss + inner_kl * kl
        losses.append(loss.sum() / counted.sum() if reduction == "mean" else loss.sum())
    return torch.stack(losses)
