"""FlexAttention with q = k = z, compiled; the lengths as a mask of blocks, made once for all steps.

Its kernels refuse narrow tokens (below 16 numbers) and wide ones, of which a block does not fit into shared memory; on
a CPU it has no backward. Its own message is the reason that is shown.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as uncompiled

from cdt_fast.bench.baselines.compiled import compiled
from cdt_fast.ops.shared.checks import padding_mask


def prepare(z: Tensor, lengths: Tensor | None, mode: str = "default") -> Callable[[Tensor, Tensor | None], Tensor]:
    """`(z, values) → softmax_rows(z zᵀ) values` for `z` `[B, T, d]` with these lengths, compiled on its first call.

    Raises:
        Unavailable: torch.compile has no compiler.
    """
    batch, tokens, _ = z.shape
    padding = padding_mask(lengths, z)
    blocks = None
    if lengths is not None:

        def counts(sequence: Tensor, _head: Tensor, _row: Tensor, column: Tensor) -> Tensor:
            return column < lengths[sequence]

        blocks = create_block_mask(counts, batch, None, tokens, tokens, device=z.device)
    # Whole graphs are not insisted on: the error of what it cannot do would be hidden in torch.compile's own.
    flex = compiled(uncompiled, mode, z.device, fullgraph=False)

    def attend(z: Tensor, values: Tensor | None) -> Tensor:
        heads = z.unsqueeze(1)
        output = flex(heads, heads, heads if values is None else values.unsqueeze(1), block_mask=blocks, scale=1.0)
        assert isinstance(output, torch.Tensor)  # a tuple only where its log-sum-exp is asked for
        output = output.squeeze(1)
        return output if padding is None else output.masked_fill(padding.unsqueeze(-1), 0.0)

    return attend
