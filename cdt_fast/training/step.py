"""One optimizer step: forward, backward, clipping, update, sums for the log, duals. The host only hands work out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.constraints.duals import DualAction


@dataclass(frozen=True)
class TrainingStep:
    """What the device does in one optimizer step. Nothing here waits for it, nor changes anything on the host.

    The forward `(*batch, weights)` of `losses` gives `(total, per_depth)`, and behind them shares of agreement where
    the constraints ask for some.
    """

    losses: nn.Module
    optimizer: Optimizer
    logged_sums: Tensor  # `[L+2]`, the sums of the losses and the count since the last log; added to in place
    constraints: DescentConstraints | None  # give the weights of the losses; None: unconstrained
    clip: float | None = None  # the largest norm of the gradient
    ranks: int = 1  # processes that take part

    def run(
        self,
        batches: Iterable[Sequence[Tensor]],
        counts: Sequence[int],
        items: int,
        known: Sequence[float] | None,
        action: DualAction | None,
    ) -> None:
        """Take the step.

        Args:
            batches: the tensors of each micro-batch of this rank, asked for one by one.
            counts: items (tokens, texts) that the losses of each micro-batch are means over; 0 where this rank only
                takes part.
            items: those of the step, over micro-batches and ranks.
            known: the weights of the depths where the host knows them: a depth of weight 0 then costs no backward;
                None: the constraints' own.
            action: what `constraints.count_step()` said is due; None without constraints.
        """
        weights: Any = known
        if known is None:
            assert self.constraints is not None, "without constraints the weights have to be known"
            weights = self.constraints.weights()
        self.optimizer.zero_grad(set_to_none=True)
        for number, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            last = number == len(counts) - 1
            with nullcontext() if last else getattr(self.losses, "no_sync", nullcontext)():
                total, per_depth, *agreement = self.losses(*batch, weights)
                # Distributed wrappers average the gradients of the ranks; the sum over ranks and micro-batches is due.
                share = count * self.ranks / items
                (total if share == 1 else total * share).backward()
            self.logged_sums[:-1].add_(per_depth, alpha=count)
            self.logged_sums[-1].add_(count)
            if self.constraints is not None:
                self.constraints.accumulate(per_depth, count, *agreement)
        if self.clip is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.clip)
        self.optimizer.step()
        if self.constraints is not None and action is not None:
            self.constraints.apply(action)
