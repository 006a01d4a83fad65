"""Symmetric attention as everyone would write it first: scores, a softmax and a product, differentiated by torch."""

from __future__ import annotations

from torch import Tensor

from cdt_fast.ops.symmetric_attention import symmetric_attention_reference


def attend(z: Tensor, values: Tensor | None, lengths: Tensor | None) -> Tensor:
    """`softmax_rows(z zᵀ) values`: `z` `[B, T, d]`, `values` `[B, T, k]` (None: `z`) → `[B, T, k]`."""
    return symmetric_attention_reference(z, values, lengths=lengths)
