"""An unrolled layer in eager torch by the identity `D (A H) = A Z`: one product fewer than written out."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.ops.soft_threshold import soft_threshold_reference


def identity_layer(
    codes: Tensor, signal: Tensor, dictionary: Tensor, *, step: float, threshold: float
) -> tuple[Tensor, Tensor]:
    """`[B, T, m]`, `[B, T, n]`, `[n, m]` → the next codes `[B, T, m]` and their projection `[B, T, n]`."""
    projection = codes @ dictionary.mT
    attention = torch.softmax(projection @ projection.mT, -1)
    update = attention @ codes + step * (signal - attention @ projection) @ dictionary
    next_codes = soft_threshold_reference(update, threshold)
    return next_codes, next_codes @ dictionary.mT
