"""xformers' memory-efficient attention with q = k = z; sequences of several lengths are packed into one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cdt_fast.bench.baselines.support import imported, require_gpu
from cdt_fast.ops.shared.checks import padding_mask


def prepare(z: Tensor, lengths: Tensor | None) -> Callable[[Tensor, Tensor | None], Tensor]:
    """`(z, values) → softmax_rows(z zᵀ) values` for `z` `[B, T, d]` with these lengths.

    Raises:
        Unavailable: no GPU, or no xformers.
    """
    require_gpu("xformers", z.device)
    attention = imported("xformers.ops").memory_efficient_attention
    if lengths is None:

        def attend(z: Tensor, values: Tensor | None) -> Tensor:
            heads = z.unsqueeze(2)
            return attention(heads, heads, heads if values is None else values.unsqueeze(2), scale=1.0).squeeze(2)

        return attend
    padding = padding_mask(lengths, z)
    assert padding is not None
    # Where the tokens stand is known to whoever pads them: it is no part of a step.
    kept = (~padding).flatten().nonzero().squeeze(1)
    blocks = imported("xformers.ops.fmha.attn_bias").BlockDiagonalMask.from_seqlens(lengths.tolist())

    def attend_packed(z: Tensor, values: Tensor | None) -> Tensor:
        heads = z.flatten(0, 1)[kept][None, :, None]
        read = heads if values is None else values.flatten(0, 1)[kept][None, :, None]
        packed = attention(heads, heads, read, attn_bias=blocks, scale=1.0)[0, :, 0]
        output = packed.new_zeros(z.shape[:-1].numel(), packed.shape[-1]).index_copy(0, kept, packed)
        return output.view(*z.shape[:-1], -1)

    return attend_packed
