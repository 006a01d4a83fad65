"""Symmetric attention by others: each is prepared for tokens `z` `[B, T, d]` and their lengths, and then called as
`attend(z)` or `attend(z, values)`, which is `softmax_rows(z zᵀ) values`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cdt_fast.bench.baselines.support import compiled, imported, require_gpu
from cdt_fast.ops.common import padding_mask
from cdt_fast.ops.symmetric_attention import symmetric_attention_reference

Attend = Callable[..., Tensor]
Prepare = Callable[[Tensor, "Tensor | None"], Attend]

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def eager(z: Tensor, lengths: Tensor | None) -> Attend:
    """As everyone would write it first: scores, a softmax and a product, differentiated by torch."""
    return functools.partial(symmetric_attention_reference, lengths=lengths)


def torch_compiled(z: Tensor, lengths: Tensor | None, mode: str) -> Attend:
    """The eager one by torch.compile."""
    return functools.partial(compiled(symmetric_attention_reference, mode, z.device), lengths=lengths)


def sdpa(z: Tensor, lengths: Tensor | None, backend: str | None = None) -> Attend:
    """torch's scaled dot-product attention by whichever of its implementations torch picks, or by one of
    `SDPA_BACKENDS`, which raises RuntimeError for what it does not take."""

    def attend(z: Tensor, values: Tensor | None = None) -> Tensor:
        padding = padding_mask(lengths, z)
        mask = None if padding is None else ~padding[:, None, None, :]
        tokens, read = z.unsqueeze(1), (z if values is None else values).unsqueeze(1)
        with contextlib.nullcontext() if backend is None else sdpa_kernel(SDPA_BACKENDS[backend]):
            output = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, read, mask, scale=1.0)
        return _without_padding(output.squeeze(1), padding)

    return attend


def flex(z: Tensor, lengths: Tensor | None) -> Attend:
    """FlexAttention, compiled on its first call; the lengths as a mask of blocks, made once for all steps.

    On a CPU it has no backward; its kernels refuse narrow tokens (below 16 numbers) and wide ones, of which a block
    does not fit into shared memory: its own message is the reason that is shown.
    """
    require_gpu("FlexAttention's backward", z.device)
    batch, tokens, _ = z.shape
    padding = padding_mask(lengths, z)
    blocks = None
    if lengths is not None:

        def counts(sequence: Tensor, _head: Tensor, _row: Tensor, column: Tensor) -> Tensor:
            return column < lengths[sequence]

        blocks = create_block_mask(counts, batch, None, tokens, tokens, device=z.device)
    # Whole graphs are not insisted on: the error of what it cannot do would be hidden in torch.compile's own.
    function = compiled(flex_attention, "default", z.device, fullgraph=False)

    def attend(z: Tensor, values: Tensor | None = None) -> Tensor:
        heads, read = z.unsqueeze(1), (z if values is None else values).unsqueeze(1)
        output = function(heads, heads, read, block_mask=blocks, scale=1.0)
        assert isinstance(output, torch.Tensor)  # a tuple only where its log-sum-exp is asked for
        return _without_padding(output.squeeze(1), padding)

    return attend


def xformers(z: Tensor, lengths: Tensor | None) -> Attend:
    """xformers' memory-efficient attention; sequences of several lengths are packed into one."""
    require_gpu("xformers", z.device)
    attention = imported("xformers.ops").memory_efficient_attention
    padding = padding_mask(lengths, z)
    if lengths is None or padding is None:

        def attend(z: Tensor, values: Tensor | None = None) -> Tensor:
            heads, read = z.unsqueeze(2), (z if values is None else values).unsqueeze(2)
            return attention(heads, heads, read, scale=1.0).squeeze(2)

        return attend
    # Where the tokens stand is known to whoever pads them: it is no part of a step.
    kept = (~padding).flatten().nonzero().squeeze(1)
    blocks = imported("xformers.ops.fmha.attn_bias").BlockDiagonalMask.from_seqlens(lengths.tolist())

    def attend_packed(z: Tensor, values: Tensor | None = None) -> Tensor:
        heads, read = (tokens.flatten(0, 1)[kept][None, :, None] for tokens in (z, z if values is None else values))
        packed = attention(heads, heads, read, attn_bias=blocks, scale=1.0)[0, :, 0]
        output = packed.new_zeros(z.shape[:-1].numel(), packed.shape[-1]).index_copy(0, kept, packed)
        return output.view(*z.shape[:-1], -1)

    return attend_packed


def _without_padding(output: Tensor, padding: Tensor | None) -> Tensor:
    return output if padding is None else output.masked_fill(padding.unsqueeze(-1), 0.0)
