"""How the losses of single samples descend from depth to depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HISTOGRAM_EDGES = [round(0.05 * index, 2) for index in range(41)]  # of the per-sample ratios, 0 to 2


def per_sample_statistics(losses: Tensor) -> dict[str, Any]:
    """Statistics of the ratios ℓ_l / ℓ_{l−1} of every single sample at every layer, the `per_sample` of an evaluation.

    Args:
        losses: `[L+1, samples]`, depth 0 first.

    Returns:
        `mean_ratio`, `median_ratio`, `descending_fraction` (of the ratios below 1) and `histogram` (`edges`, `counts`;
        the last bin holds all above). A ratio to a loss of zero is left out; the statistics are None when none is left.
    """
    losses = losses.to(torch.float64)
    ratios = (losses[1:] / losses[:-1]).flatten().cpu()
    ratios = ratios[ratios.isfinite()]
    counts = torch.histogram(ratios.clamp(max=HISTOGRAM_EDGES[-1]), torch.tensor(HISTOGRAM_EDGES).double()).hist
    return {
        "mean_ratio": ratios.mean().item() if len(ratios) else None,
        "median_ratio": ratios.median().item() if len(ratios) else None,
        "descending_fraction": (ratios < 1).double().mean().item() if len(ratios) else None,
        "histogram": {"edges": HISTOGRAM_EDGES, "counts": [int(count) for count in counts]},
    }
