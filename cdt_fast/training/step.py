"""One optimizer step: forward, backward, clipping, update, sums for the log, duals. The host only hands work out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.constraints.duals import DualAction
from cdt_fast.models import DUST


class ReconstructionLosses(nn.Module):
    """The losses of a model that denoises as a forward, so that the hooks of a distributed wrapper fire.

    Args:
        model: the network.
        precision: "bf16" for autocast to bfloat16; anything else leaves the dtypes alone.
    """

    def __init__(self, model: DUST, precision: str) -> None:
        super().__init__()
        self.model = model
        self._bf16 = precision == "bf16"

    def forward(self, noisy: Tensor, clean: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`(total, per_layer)` as `DUST.layer_losses`."""
        # Without autocast's cache: a copy of the weights that outlives a capture would be read at the next one.
        autocast = torch.autocast(noisy.device.type, torch.bfloat16, cache_enabled=False)
        with autocast if self._bf16 else nullcontext():
            return self.model.layer_losses(noisy, clean, weights)


@dataclass(frozen=True)
class TrainingStep:
    """What the device does in one optimizer step. Nothing here waits for it, nor changes anything on the host.

    Attributes:
        losses: its forward `(inputs, targets, weights)` gives `(total, per_layer)`, or a wrapper of it.
        optimizer: of the model's parameters.
        logged_sums: `[L+2]`, the sums of the losses and the count since the last log; added to in place.
        constraints: give the weights of the losses; None: unconstrained.
        fixed_weights: `[L+1]` on the device, the weights where there are no constraints.
        clip: the largest norm of the gradient, None: no bound.
        ranks: processes that take part.
    """

    losses: nn.Module
    optimizer: Optimizer
    logged_sums: Tensor
    constraints: DescentConstraints | None
    fixed_weights: Tensor
    clip: float | None = None
    ranks: int = 1

    def run(
        self,
        batches: Iterable[tuple[Tensor, Tensor]],
        counts: Sequence[int],
        tokens: int,
        work: DualAction | None,
    ) -> None:
        """Take the step.

        Args:
            batches: inputs and targets of each micro-batch of this rank, asked for one by one.
            counts: tokens (or texts) that the losses of each micro-batch are means over; 0 where this rank only takes
                part.
            tokens: those of the step, over micro-batches and ranks.
            work: what `constraints.count_step()` said is due; None without constraints.
        """
        weights = self.fixed_weights if self.constraints is None else self.constraints.weights()
        self.optimizer.zero_grad(set_to_none=True)
        for number, ((inputs, targets), count) in enumerate(zip(batches, counts, strict=True)):
            last = number == len(counts) - 1
            alone = nullcontext() if last else getattr(self.losses, "no_sync", nullcontext)()
            with alone:
                total, per_layer = self.losses(inputs, targets, weights)
                # Distributed wrappers average the gradients of the ranks; the sum over ranks and micro-batches is due.
                (total * (count * self.ranks / tokens)).backward()
            self.logged_sums[:-1] += per_layer.to(torch.float64) * count
            self.logged_sums[-1] += count
            if self.constraints is not None:
                self.constraints.accumulate(per_layer, count)
        if self.clip is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.clip)
        self.optimizer.step()
        if self.constraints is not None and work is not None:
            self.constraints.apply(work)
