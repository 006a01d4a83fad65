"""The formula of `symmetric_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.ops.shared.checks import padding_mask, without_padding


def symmetric_attention_reference(
    z: Tensor,
    values: Tensor | None = None,
    *,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    energy: bool = False,
) -> Tensor:
    """The formula of `symmetric_attention`, in any dtype, differentiated by torch."""
    padding = padding_mask(lengths, z)
    z = without_padding(z, padding)
    values = z if values is None else without_padding(values, padding)
    scores = z @ z.mT
    if energy:
        scores = scores - 0.5 * z.square().sum(-1).unsqueeze(-2)
    scores = scale * scores
    if padding is not None:
        scores = scores.masked_fill(padding.unsqueeze(-2), float("-inf"))
    attention = torch.softmax(scores, -1)
    if padding is not None:
        attention = attention.masked_fill(padding.unsqueeze(-1), 0.0)
    return attention @ values
