"""Weighted losses of all depths from a function that knows one depth: what a user of such a function would write.

None of the peers weights depths within a call. Either each depth is a call, or the depths are concatenated, the losses
of all tokens asked for, and the weights put on those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cdt_fast.bench.case import Step

# (hidden [N, d], head [V, d], targets [N], "mean" or "none") → the loss, one number or [N].
Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]


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
