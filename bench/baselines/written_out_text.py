"""TextUT's formulas in eager torch, as everyone would write them first."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.models import TextUT


def written_out_text_losses(model: TextUT, tokens: Tensor, labels: Tensor) -> Tensor:
    """The losses `[L+1]` of an untied model whose residual is a layer's own input, for ids `[B, T]` without padding."""
    states = model.embedding(tokens)
    losses = [_loss(model, states, labels)]
    for attention_weight, feedforward in zip(model.attention_weight, model.feedforward_weight, strict=True):
        projection = states @ attention_weight.mT
        attention = torch.softmax(model.scale * projection @ projection.mT, -1)
        states = torch.relu(attention @ states @ (-0.5 * (feedforward + feedforward.mT)) + states)
        losses.append(_loss(model, states, labels))
    return torch.stack(losses)


def _loss(model: TextUT, states: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model.head(states.mean(-2)), labels)
