"""Liger's fused linear cross-entropy, the head's gradient summed in float32.

It cannot weight tokens while it computes gradients in its forward: with reduction "none" it computes the logits again
in the backward (and in versions that do not, its gradients are wrong and the gate keeps it from being timed).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.bench.baselines.depths import Loss
from cdt_fast.bench.baselines.support import imported, require_gpu


def prepare(device: torch.device) -> Loss:
    """`(hidden [N, d], head [V, d], targets [N], reduction)` → the loss.

    Raises:
        Unavailable: no GPU, or no Liger.
    """
    require_gpu("Liger", device)
    kind = imported("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss

    def loss(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return kind(reduction=reduction, accum_dtype=torch.float32)(head, hidden, targets)

    return loss
