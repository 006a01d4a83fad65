"""Symmetric attention by the kernels that suit the sequences.

Sequences of at most `LONGEST` tokens are packed into tiles, longer ones are streamed.
"""

from __future__ import annotations

from torch import Tensor

from cdt_fast.kernels.arguments import SymmetricAttentionArguments, SymmetricAttentionBackwardArguments
from cdt_fast.kernels.blocks import LONGEST
from cdt_fast.kernels.symmetric_attention_packed import packed_backward, packed_forward
from cdt_fast.kernels.symmetric_attention_streaming import streaming_backward, streaming_forward


def symmetric_attention_forward(attention: SymmetricAttentionArguments) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output `[B, T, k]`, the rows' log-sum-exp `[B, T]`, and what else is kept for a backward, if anything."""
    if attention.z.shape[1] <= LONGEST:
        return *packed_forward(attention), None
    return streaming_forward(attention)


def symmetric_attention_backward(attention: SymmetricAttentionBackwardArguments) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of z and of the values, those that are needed."""
    if attention.z.shape[1] <= LONGEST:
        return packed_backward(attention)
    return streaming_backward(attention)
