"""The cross-entropy behind a linear head by others: each is prepared for a device and a dtype, and then called as
`loss(hidden [N, d], head [V, d], targets [N], reduction)`.

Each raises `Unavailable` where a GPU, a package or a dtype that it needs is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from cdt_fast.bench.baselines.depths import Loss
from cdt_fast.bench.baselines.support import imported, require_gpu
from cdt_fast.bench.case import Unavailable


def eager(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """All logits at once in eager torch, the softmax in float32."""
    return torch.nn.functional.cross_entropy((hidden @ head.mT).float(), targets, reduction=reduction)


def torch_chunked(device: torch.device, dtype: torch.dtype) -> Loss:
    """torch's own `linear_cross_entropy`, chunked as its `LinearCrossEntropyOptions()` decides.

    With "mean" gradients are computed in the forward and scaled in the backward; with "none" the backward computes the
    logits again.
    """
    # Looked up by name: the package supports versions of torch that lack both.
    chunked = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if chunked is None or options is None:
        raise Unavailable(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    return lambda hidden, head, targets, reduction: chunked(
        hidden, head, targets, reduction=reduction, options=options()
    )


def liger(device: torch.device, dtype: torch.dtype) -> Loss:
    """Liger's fused linear cross-entropy, the head's gradient summed in float32.

    It cannot weight tokens while it computes gradients in its forward: with reduction "none" it computes the logits
    again in the backward (and in versions that do not, its gradients are wrong and the gate keeps it from being timed).
    """
    require_gpu("Liger", device)
    kind = imported("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    return lambda hidden, head, targets, reduction: kind(reduction=reduction, accum_dtype=torch.float32)(
        head, hidden, targets
    )


def cce(device: torch.device, dtype: torch.dtype, *, filtered: bool) -> Loss:
    """Cut cross-entropy, whose logits never leave the chip; filtered: gradients of small logits are left out, as is its
    default."""
    require_gpu("CCE", device)
    function = imported("cut_cross_entropy").linear_cross_entropy
    if dtype not in (torch.float16, torch.bfloat16):
        raise Unavailable(f"CCE differentiates float16 and bfloat16 alone, not {str(dtype).removeprefix('torch.')}")
    options = {} if filtered else {"filter_eps": None}
    return lambda hidden, head, targets, reduction: function(hidden, head, targets, reduction=reduction, **options)


PEERS: dict[str, Callable[[torch.device, torch.dtype], Loss]] = {
    "torch linear_cross_entropy": torch_chunked,
    "Liger": liger,
    "CCE": functools.partial(cce, filtered=True),
    "CCE without its filter": functools.partial(cce, filtered=False),
}
