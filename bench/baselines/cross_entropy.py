"""The cross-entropy behind a linear head by others, and weighted losses of all depths from what knows one depth.

Each is prepared for a device and a dtype, and raises `Unavailable` where a GPU, a package or a dtype that it needs is
missing. None of them weights depths within a call: either each depth is a call, or the depths are concatenated, the
losses of all tokens asked for, and the weights put on those, as a user of such a function would write it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cdt_fast.bench.baselines.support import imported, require_gpu
from cdt_fast.bench.case import Step, Unavailable

# (hidden [N, d], head [V, d], targets [N], "mean" or "none") → the loss, one number or [N].
Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]


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


@dataclass
class Depths:
    """What a layerwise cross-entropy reads."""

    hidden: list[Tensor]  # `[N, d]` each, L+1 of them, with gradients
    head: Tensor  # `[V, d]`, with a gradient
    targets: Tensor  # `[N]` int64
    weights: Tensor  # `[L+1]` float32


def a_depth_at_a_time(loss: Loss, depths: Depths, draw: Callable[[], Tensor | None] = lambda: None) -> Step:
    """Loss and gradients of one depth after the other, so that nothing of a depth is kept: the weights are known.

    `draw` is asked once a step for the tokens that every depth but the last is estimated from, `[count]`; None: all.
    """

    def step() -> list[Tensor]:
        losses, of_hidden, of_head = [], [], torch.zeros(())
        sample, last = draw(), len(depths.hidden) - 1
        for depth, hidden in enumerate(depths.hidden):
            states, targets = hidden, depths.targets
            if sample is not None and depth < last:
                states, targets = hidden[sample], targets[sample]
            value = loss(states, depths.head, targets, "mean")
            gradient, more = torch.autograd.grad(depths.weights[depth] * value, [hidden, depths.head])
            of_head = of_head.add_(more) if depth else more
            of_hidden.append(gradient)
            losses.append(value.detach().float())
        return [torch.stack(losses), *of_hidden, of_head]

    return step


def all_depths_then_backward(loss: Loss, depths: Depths) -> Step:
    """All losses before any gradient: the weights follow from the losses."""

    def step() -> list[Tensor]:
        losses = torch.stack([loss(hidden, depths.head, depths.targets, "mean").float() for hidden in depths.hidden])
        gradients = torch.autograd.grad(losses, [*depths.hidden, depths.head], depths.weights)
        return [losses.detach(), *gradients]

    return step


def flattened(loss: Loss, depths: Depths) -> Step:
    """One call for the tokens of all depths, one after the other; serves known weights and unknown ones."""

    def step() -> list[Tensor]:
        count = len(depths.hidden)
        each = loss(torch.cat(depths.hidden), depths.head, depths.targets.repeat(count), "none")
        losses = each.view(count, -1).float().mean(1)
        gradients = torch.autograd.grad(losses, [*depths.hidden, depths.head], depths.weights)
        return [losses.detach(), *gradients]

    return step
