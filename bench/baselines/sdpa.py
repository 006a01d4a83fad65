"""torch's scaled dot-product attention with q = k = z, by whichever of its implementations torch picks, or by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cdt_fast.ops.shared.checks import padding_mask

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attend_by(name: str) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """`attend` by one of `BACKENDS`, forward and backward; it raises RuntimeError for what that one does not take."""

    def attend_so(z: Tensor, values: Tensor | None, lengths: Tensor | None) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return attend(z, values, lengths)

    return attend_so


def attend(z: Tensor, values: Tensor | None, lengths: Tensor | None) -> Tensor:
    """`softmax_rows(z zᵀ) values`: `z` `[B, T, d]`, `values` `[B, T, k]` (None: `z`) → `[B, T, k]`."""
    padding = padding_mask(lengths, z)
    tokens = z.unsqueeze(1)
    output = torch.nn.functional.scaled_dot_product_attention(
        tokens,
        tokens,
        tokens if values is None else values.unsqueeze(1),
        attn_mask=None if padding is None else ~padding[:, None, None, :],
        scale=1.0,
    ).squeeze(1)
    return output if padding is None else output.masked_fill(padding.unsqueeze(-1), 0.0)
