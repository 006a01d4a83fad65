"""The measurements of a run, as `evaluation.json` holds them."""

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from cdt_fast.training.settings import Count


class Part(BaseModel):
    """An object of `evaluation.json`; a task may add entries."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=False, protected_namespaces=())


QUANTILES = [step / 20 for step in range(21)]


class PerSample(Part):
    """Statistics of the ratios ℓ_l / ℓ_{l−1} of every single sample at every layer; None if no ratio is left."""

    mean_ratio: float | None
    median_ratio: float | None
    descending_fraction: float | None
    quantiles: list[float] | None = None  # at `QUANTILES`


class Verdict(Part):
    """A `FeasibilityReport`, and its text."""

    worst_layer: Count | None
    worst_violation: float | None
    unjudged: Count = 0  # constraints that are not in force yet
    depths: list[Count] = Field(default_factory=list)  # what they are called; none: 0 to L
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
    kept_step: Count  # of the model that was kept and measured
    warmup_steps: Count  # after which the constraints came on
    # On validation data at the last depth: before the training (None: not known), and of the kept model.
    untrained_loss: float | None
    kept_loss: float
    limit: Count | None = None  # most test samples that were measured; None: all
    success: bool | None = None  # see `training.evaluation.verdict`: of the run alone, with no plain one beside it
    verdict: str = ""

    @property
    def finished(self) -> bool:
        """Return whether the training had come to its end."""
        return self.trained_steps >= self.steps

    @property
    def kind(self) -> str:
        """Return the network in a word."""
        return Path(self.model).name


def per_sample_statistics(losses: Tensor) -> dict[str, Any]:
    """Return the `PerSample` of losses, float64 `[L+1, samples]`, depth 0 first, without ratios to a loss of zero."""
    ratios = (losses[1:] / losses[:-1]).flatten().cpu()
    ratios = ratios[ratios.isfinite()]
    if len(ratios) == 0:
        return dict.fromkeys(PerSample.model_fields)
    return {
        "mean_ratio": ratios.mean().item(),
        "median_ratio": float(np.median(ratios)),
        "descending_fraction": (losses[1:] < losses[:-1]).double().mean().item(),
        "quantiles": np.quantile(ratios.numpy(), QUANTILES).tolist(),
    }


def mean_margin(sums: Tensor, counts: Tensor) -> list[float] | None:
    """Return half of the 95 % confidence interval of the mean at every depth, `L+1` numbers, from the variation between
    samples: `sums`, float64 `[L+1, samples]`, over `counts` `[samples]` items each. None for a single sample."""
    samples, total = len(counts), counts.sum()
    if samples == 1:
        return None
    residuals = sums - sums.sum(1, keepdim=True) / total * counts
    error = (residuals.square().sum(1) * samples / (samples - 1)).sqrt() / total
    return (t_quantile(0.975, samples - 1) * error).tolist()


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, for a probability above one half, to 1e-6."""
    # With t = √ν tan θ the density is cos^(ν−1) θ on a bounded interval; trapezoids give its distribution.
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    below = np.cumsum(density[1:] + density[:-1])
    angle = np.interp(2 * probability - 1, below / below[-1], angles[1:])
    return math.sqrt(degrees) * math.tan(angle)
