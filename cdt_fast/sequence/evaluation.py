"""What a trained network does on held-out texts: accuracy over γ, and the losses of every depth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdt_fast.progress import progress_bar
from cdt_fast.sequence.networks import Network
from cdt_fast.sequence.settings import SequenceSettings
from cdt_fast.sequence.tokenizers import IGNORED, EncodedSamples
from cdt_fast.training.results import Evaluation, mean_margin, per_sample_statistics

_LARGEST_EXPONENT = 700.0  # above it a perplexity is no float
_NORMAL_QUANTILE = 1.959963984540054  # of 97.5 %


class SequenceEvaluation(Evaluation):
    """What the `evaluation.json` of a run on texts or instructions holds, see `measure`."""

    accuracy: list[float]
    accuracy_interval: list[tuple[float, float]]
    auc: float | None
    depth_accuracy: list[list[float]]
    depth_loss: list[list[float]]
    depth_agreement: list[float]
    layer_loss_margin: list[float] | None = None  # half of the 95 % interval of `layer_loss`
    answers: int
    test_texts: int
    test_digest: str

    def sizes(self) -> dict[str, int]:
        names = ("accuracy", "accuracy_interval", "depth_accuracy", "depth_loss")
        return {**dict.fromkeys(names, len(self.gamma)), "depth_agreement": self.layers + 1}


class TextEvaluation(SequenceEvaluation):
    """The `evaluation.json` of a run on labeled texts."""

    classes: list[str]


class LanguageEvaluation(SequenceEvaluation):
    """The `evaluation.json` of a language model, whose accuracy is that of its tokens."""

    perplexity: list[float]
    vocabulary: int

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "perplexity": len(self.gamma)}


@torch.no_grad()
def measure(
    network: Network, test: EncodedSamples, settings: SequenceSettings, device: torch.device, progress: bool = True
) -> dict[str, Any]:
    """Accuracy over γ, and the losses of every depth, of a network on `device` whose word embeddings are perturbed.

    Returns:
        The part of an `evaluation.json` that can be measured here; with `answers`, how many counted, the 95 % interval
        of the last depth's accuracy (Wilson, for independent answers: of tokens it is too narrow), `auc`, the trapezoid
        of accuracy over γ (None for a single γ), and at the training γ `depth_agreement`, the share of the answers that
        a depth gives as the last one does.
    """
    levels, training_gamma = [float(gamma) for gamma in settings.evaluation.gammas], settings.typical_noise
    network.model.eval()
    gammas, measured = dict.fromkeys((*levels, training_gamma)), {}
    with progress_bar(total=len(gammas) * len(test), desc="evaluate", unit="sample", shown=progress) as bar:
        for gamma in gammas:
            with network.perturbed(settings, gamma):  # with the same draws at every γ
                batches = test.batches(settings.training.batch, network.padding_id, device)
                measured[gamma] = _measure(network, batches, bar)
    trained = measured[training_gamma]
    count = int(trained.counts.sum())
    correct = [measured[gamma].correct.tolist() for gamma in levels]
    accuracy = [row[-1] / count for row in correct]
    losses = trained.mean_losses()
    return {
        "layers": len(losses) - 1,
        "answers": count,
        "gamma": levels,
        "accuracy": accuracy,
        "accuracy_interval": [list(wilson_interval(row[-1], count)) for row in correct],
        "auc": area_under_curve(levels, accuracy) if len(levels) > 1 else None,
        "depth_accuracy": [[right / count for right in row] for row in correct],
        "depth_loss": [measured[gamma].mean_losses() for gamma in levels],
        "training_gamma": training_gamma,
        "layer_loss": losses,
        "layer_loss_margin": mean_margin(trained.sums, trained.counts),
        "depth_agreement": (trained.agreed / count).tolist(),
        "per_sample": per_sample_statistics(trained.sums / trained.counts),
        "parameters": sum(parameter.numel() for parameter in network.model.parameters()),
    }


def wilson_interval(correct: int, answers: int) -> tuple[float, float]:
    """The 95 % interval of Wilson for a fraction of `correct` in `answers` ≥ 1 independent answers."""
    square = _NORMAL_QUANTILE**2
    fraction = correct / answers
    center = fraction + square / (2 * answers)
    half = _NORMAL_QUANTILE * math.sqrt(fraction * (1 - fraction) / answers + square / (4 * answers**2))
    low, high = ((center + sign * half) / (1 + square / answers) for sign in (-1, 1))
    # At the ends rounding would leave [0, 1] by a unit in the last place.
    return (0.0 if correct == 0 else low), (1.0 if correct == answers else high)


def area_under_curve(x: Sequence[float], y: Sequence[float]) -> float:
    """The trapezoid of `y` over `x`, in units of x times y: an accuracy of one over γ from 0 to 2 has an area of 2."""
    return sum((x[index] - x[index - 1]) * (y[index] + y[index - 1]) / 2 for index in range(1, min(len(x), len(y))))


class _Measured(NamedTuple):
    """Of one γ: losses `[L+1, samples]`, answers that count `[samples]`, those right, and those as the last depth's,
    `[L+1]`."""

    sums: Tensor
    counts: Tensor
    correct: Tensor
    agreed: Tensor

    def mean_losses(self) -> list[float]:
        return (self.sums.sum(1) / self.counts.sum()).tolist()


def _measure(network: Network, batches: Iterable[tuple[Tensor, Tensor, int]], bar: Any) -> _Measured:
    sums, counts, correct, agreed = [], [], [], []
    for inputs, targets, _ in batches:
        # The label of a token is the next one, as language models shift them.
        labels = targets if targets.dim() == 1 else nn.functional.pad(targets, (0, 1), value=IGNORED)[:, 1:]
        counted = labels != IGNORED
        # Depth by depth: the logits of a language model are too large to be held for all depths at once.
        depths = [_read(logits, labels) for logits in network.depth_logits(inputs)]
        sums.append(torch.stack([loss for loss, _ in depths]))
        answers = torch.stack([answer for _, answer in depths])
        correct.append(((answers == labels) & counted).flatten(1).sum(1))
        agreed.append(((answers == answers[-1]) & counted).flatten(1).sum(1))
        counts.append(counted.flatten(1).sum(1) if labels.dim() > 1 else counted.long())
        bar.update(len(targets))
    shares = (torch.stack(numbers).sum(0).cpu() for numbers in (correct, agreed))
    return _Measured(torch.cat(sums, 1).cpu(), torch.cat(counts).cpu(), *shares)


def _read(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of one depth: the samples' loss sums `[B]` in float64, and the answers, of the shape of the labels."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.view(len(labels), -1).sum(1, dtype=torch.float64), logits.argmax(-1)


def perplexities(measured: dict[str, Any]) -> list[float]:
    """`exp(ℓ_L)` at every noise level."""
    return [math.exp(min(losses[-1], _LARGEST_EXPONENT)) for losses in measured["depth_loss"]]
