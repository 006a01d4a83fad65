"""What was measured of a run, as `evaluation.json` holds it."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from typing_extensions import Self

Count = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=False, protected_namespaces=())


class Histogram(Part):
    """Of the ratios of single samples; the last bin holds all above."""

    edges: list[float]
    counts: list[Count]


class PerSample(Part):
    """The ratios ℓ_l / ℓ_{l−1} of every single sample at every layer; None where no ratio is left."""

    mean_ratio: float | None
    median_ratio: float | None
    descending_fraction: float | None
    histogram: Histogram


class Verdict(Part):
    """A `FeasibilityReport`, and the sentence it is put in."""

    feasible: bool
    worst_layer: Count | None
    worst_violation: float | None
    judged: Count = 0  # constraints in force, and those that are not yet
    unjudged: Count = 0
    caveat: str = ""
    text: str


class Evaluation(Part):
    """The entries of every `evaluation.json`; losses are those at the training noise, on test data."""

    task: str
    model: str
    source: str
    constrained: bool
    parameters: Count
    layers: Annotated[int, Field(ge=1)]
    gamma: Annotated[list[float], Field(min_length=1)]
    training_gamma: float
    layer_loss: list[float]
    layer_ratio: list[float | None]
    rate: list[float | None]  # of each layer; None: no constraint of descent
    feasible: bool
    violation: list[float | None]
    report: Verdict
    per_sample: PerSample
    trained_steps: Count
    steps: Count
    kept_step: Count | None = None  # of the model that was kept and measured
    warmup_steps: Count = 0  # after which the constraints came on
    # On validation data at the last depth: before the training, of the kept model, and at the end.
    untrained_loss: float | None = None
    kept_loss: float | None = None
    final_loss: float | None = None
    success: bool | None = None  # see `training.evaluation.verdict`: of the run alone, with no plain one beside it
    verdict: str = ""

    @model_validator(mode="after")
    def _of_one_size(self) -> Self:
        depths = self.layers + 1
        sizes = {"layer_loss": depths, "layer_ratio": depths - 1, "rate": depths - 1, "violation": depths}
        for name, size in {**sizes, **self.sizes()}.items():
            if len(getattr(self, name)) != size:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries, expected {size}")
        return self

    def sizes(self) -> dict[str, int]:
        """How many entries the lists of a task's own have, by name."""
        return {}

    @property
    def finished(self) -> bool:
        """Whether the training had come to its end."""
        return self.trained_steps >= self.steps


HISTOGRAM_EDGES = [round(0.05 * index, 2) for index in range(41)]  # of the per-sample ratios, 0 to 2


def per_sample_statistics(losses: Tensor) -> dict[str, Any]:
    """The `PerSample` of losses `[L+1, samples]`, depth 0 first; a ratio to a loss of zero is left out."""
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


def mean_margin(sums: Tensor, counts: Tensor) -> list[float] | None:
    """Half of the 95 % interval of the mean of every depth, by what it varies between samples.

    Args:
        sums: float64 `[L+1, samples]`, each over the items of a sample.
        counts: `[samples]`, how many items those are; the means are over all items.

    Returns:
        `L+1` numbers, in the unit of the mean; None of a single sample, which says nothing of others.
    """
    samples, total = len(counts), counts.sum()
    if samples == 1:
        return None
    residuals = sums - sums.sum(1, keepdim=True) / total * counts
    error = (residuals.square().sum(1) * samples / (samples - 1)).sqrt() / total
    return (t_quantile(0.975, min(samples - 1, 1000)) * error).tolist()  # of more, Simpson's steps are too wide


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, for a probability above one half, to 1e-6."""
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    # t = √ν tan θ turns the integral of the density into one of cos^(ν−1) over a bounded interval, by Simpson's rule.
    low, high, steps = 0.0, math.pi / 2, 400
    while high - low > 1e-9:
        middle = (low + high) / 2
        points = [math.cos(middle * index / steps) ** (degrees - 1) for index in range(steps + 1)]
        integral = middle / steps / 3 * (points[0] + points[-1] + 4 * sum(points[1::2]) + 2 * sum(points[2:-1:2]))
        low, high = (middle, high) if 0.5 + factor * integral < probability else (low, middle)
    return math.sqrt(degrees) * math.tan(low)
