"""What the tests of the cross-entropy's kernel share: rows between NaN, the formula, the launch."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import SweepArguments
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_

BLOCK = 32
SMALL = Blocks(columns=BLOCK, warps=1, stages=2)
SIZES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
FLAGS = list(itertools.product((None, 2.5), (0.0, 0.1)))


def targets_of(rows: int, vocabulary: int, device: torch.device, seed: int = 1) -> Tensor:
    return torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(seed)).to(device)


def poisoned_rows(matrix: Tensor, padding: int = 3) -> Tensor:
    """The same values, with NaN before the first row, after each row and after the last."""
    rows, columns = matrix.shape
    buffer = matrix.new_full((rows + 2, columns + padding), float("nan"))
    inside = buffer[1:-1, :columns]
    inside.copy_(matrix)
    return inside


def untouched(inside: Tensor) -> bool:
    """Whether everything around what `poisoned_rows` has returned is still NaN."""
    whole = torch.as_strided(inside, (inside.untyped_storage().size() // inside.element_size(),), (1,), 0)
    return int((~torch.isnan(whole)).sum()) == int((~torch.isnan(inside)).sum())


def written(
    logits: Tensor, targets: Tensor, scales: Tensor, softcap: float | None, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, log-sum-exps and gradients of rows that all count; the gradients from the rounded log-sum-exps."""
    slope = torch.ones_like(logits)
    if softcap is not None:
        capped = torch.tanh(logits / softcap)
        logits, slope = softcap * capped, 1 - capped**2
    wanted = torch.nn.functional.one_hot(targets, logits.shape[1]) * (1 - smoothing) + smoothing / logits.shape[1]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    log_sums = torch.logsumexp(logits, 1)
    gradients = (torch.exp(logits - log_sums.unsqueeze(1)) - wanted) * slope * scales.unsqueeze(1)
    return losses, log_sums, gradients


def run(
    logits: Tensor, targets: Tensor, scales: Tensor | None, softcap: float | None, smoothing: float, **changed: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, log-sum-exps, and the gradient or the logits; what is changed are fields of the rows, or options."""
    losses, log_sums = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    options: dict[str, Any] = {"ignore_index": -100, "softcap": softcap, "smoothing": smoothing, "blocks": SMALL}
    rows = SweepArguments(logits, targets, log_sums, losses, scales=scales, out=None if scales is None else logits)
    rows = rows._replace(**{name: changed.pop(name) for name in rows._fields if name in changed})
    cross_entropy_(rows, **{**options, **changed})
    return losses, rows.log_sums, logits
