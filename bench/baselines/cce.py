"""Cut cross-entropy: its logits never leave the chip. By default it leaves small gradients of logits out."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.bench.baselines.depths import Loss
from cdt_fast.bench.baselines.support import imported, require_gpu
from cdt_fast.bench.case import Unavailable


def prepare(device: torch.device, dtype: torch.dtype, filtered: bool) -> Loss:
    """`(hidden [N, d], head [V, d], targets [N], reduction)` → the loss.

    Args:
        device: where the tensors are.
        dtype: of the hidden states and of the head.
        filtered: leave gradients of logits that are small in `dtype` out, as is its default; else compute all of them.

    Raises:
        Unavailable: no GPU, no cut_cross_entropy, or a dtype that its backward does not take.
    """
    require_gpu("CCE", device)
    function = imported("cut_cross_entropy").linear_cross_entropy
    if dtype not in (torch.float16, torch.bfloat16):
        raise Unavailable(f"CCE differentiates float16 and bfloat16 alone, not {str(dtype).removeprefix('torch.')}")
    options = {} if filtered else {"filter_eps": None}

    def loss(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return function(hidden, head, targets, reduction=reduction, **options)

    return loss
