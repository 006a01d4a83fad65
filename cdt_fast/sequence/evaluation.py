"""Measurements of a trained network on held-out texts, their table and their picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from cdt_fast.progress import progress_bar
from cdt_fast.sequence.networks import Network
from cdt_fast.sequence.settings import SequenceSettings
from cdt_fast.sequence.tokenizers import IGNORED, EncodedSamples
from cdt_fast.training.execution import precision_of
from cdt_fast.training.report import add_legend, axes_of, formatted, mark_training, plot_runs
from cdt_fast.training.results import Evaluation, mean_margin, per_sample_statistics
from cdt_fast.training.task import EvaluatedRun, Table

_TEXTS_AT_ONCE = 64


class SequenceEvaluation(Evaluation):
    """The `evaluation.json` of a run on texts or instructions, see `measure`."""

    accuracy: list[float]
    accuracy_margin: list[float]  # to the farther end of its 95 % interval
    auc: float | None  # of accuracy over γ, by the trapezoid
    depth_accuracy: list[list[float]]
    depth_loss: list[list[float]]
    layer_loss_margin: list[float] | None = None  # half of the 95 % interval of `layer_loss`
    answers: int  # that counted
    test_texts: int
    guess_loss: float | None = None  # None: of a uniform guess
    seen_texts: int = 0  # of them, among those for training too
    test_digest: str
    classes: list[str] | None = None  # of labeled texts
    vocabulary: int | None = None  # of a language model, whose accuracy is that of its tokens

    HEADLINE: ClassVar[str] = "area under accuracy(γ)"

    @property
    def headline(self) -> float:
        """Return the figure of the paper's tables."""
        return math.nan if self.auc is None else self.auc


@torch.no_grad()
def measure(network: Network, test: EncodedSamples, settings: SequenceSettings, bf16_on_cpu: bool) -> dict[str, Any]:
    """Measure accuracy over γ, and the losses of every depth, with perturbed word embeddings, and return the entries of
    `SequenceEvaluation`. On a CPU products are as in the training (`Task.BF16_ON_CPU`)."""
    levels, training_gamma = [float(gamma) for gamma in settings.evaluation.gammas], sum(settings.noise) / 2
    use_cuda = settings.training.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    network.model.to(device).eval()
    # Of 2,500 reviews at most three are read otherwise, and no mean loss changes by a thousandth.
    narrow = not use_cuda and precision_of(settings, device, bf16_on_cpu) == "bf16"
    # Losses and right answers of all texts, not of each batch: small tensors that stay between large ones of changing
    # sizes cut up the heap, to 15 GiB for 25,000 reviews.
    empty = torch.zeros((network.layers + 1, 2, len(test)), dtype=torch.float64, device=device)
    found = {gamma: empty.clone() for gamma in (*levels, training_gamma)}
    size = settings.training.batch if test.targets[0].dim() else max(settings.training.batch, _TEXTS_AT_ONCE)
    batches = test.batches(size, network.padding_id, device)
    with progress_bar(total=len(test), desc="evaluate", unit="sample") as bar, network.perturbed(settings) as noise:
        for chosen, inputs, targets in batches:
            places = noise.samples = torch.tensor(chosen, device=device)  # a text's noise, up to its strength, is one
            # The label of a token is the next one, as language models shift them.
            labels = targets if targets.dim() == 1 else nn.functional.pad(targets, (0, 1), value=IGNORED)[:, 1:]
            labels = labels.view(len(labels), -1)
            for noise.gamma, values in found.items():
                with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
                    for value, logits in zip(values, network.depth_logits(inputs), strict=True):
                        value[:, places] = _read(logits.flatten(0, -2), labels)
            bar.update(len(chosen))
    counts, sums = torch.tensor(test.counts), found[training_gamma][:, 0].cpu()
    answers = sum(test.counts)
    means = {gamma: (values.sum(2) / answers).T.tolist() for gamma, values in found.items()}
    accuracy = [means[gamma][1][-1] for gamma in levels]
    right = {gamma: found[gamma][-1:, 1].cpu() for gamma in levels}
    area = sum((g1 - g0) * (a0 + a1) / 2 for (g0, a0), (g1, a1) in pairwise(zip(levels, accuracy, strict=True)))
    return {
        "layers": network.layers,
        "answers": answers,
        "test_texts": len(test),
        "gamma": levels,
        "accuracy": accuracy,
        "accuracy_margin": [accuracy_margin(right[gamma], counts) for gamma in levels],
        "auc": area if len(levels) > 1 else None,
        "depth_accuracy": [means[gamma][1] for gamma in levels],
        "depth_loss": [means[gamma][0] for gamma in levels],
        "training_gamma": training_gamma,
        "layer_loss": means[training_gamma][0],
        "layer_loss_margin": mean_margin(sums, counts),
        "per_sample": per_sample_statistics(sums / counts),
        "parameters": sum(parameter.numel() for parameter in network.model.parameters()),
    }


def accuracy_margin(right: torch.Tensor, counts: torch.Tensor) -> float:
    """Return the distance from an accuracy to the farther end of its 95 % interval: Wilson's for an answer a text, or
    by the variation between texts. `right` are the right answers of each text `[1, texts]`, of so many."""
    if counts.max() > 1:
        return (mean_margin(right, counts) or [1.0])[0]
    accuracy, square = right.mean().item(), 1.959963984540054**2 / len(counts)  # the normal quantile of 97.5 %
    half = math.sqrt(square * (accuracy * (1 - accuracy) + square / 4))
    return (half + abs(accuracy - 0.5) * square) / (1 + square)


def _read(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return `[2, B]`: the samples' sums of the loss in float64, and how many answers are right, at one depth."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=IGNORED)
    right = logits.argmax(-1).view(labels.shape) == labels  # no answer is −100
    return torch.stack([losses.view(labels.shape).sum(1, dtype=torch.float64), right.sum(1)])


def accuracy_table(runs: Sequence[EvaluatedRun], heading: str) -> Table:
    """Return accuracy a noise level, with half of its 95 % interval, and the area under it."""
    rows = [[heading, "parameters", *(f"γ {gamma:g}" for gamma in runs[0].evaluation.gamma), "area under it"]]
    for run in runs:
        values = run.evaluation
        pairs = zip(values.accuracy, values.accuracy_margin, strict=True)
        numbers = [f"{accuracy:.3f} ±{margin:.3f}" for accuracy, margin in pairs]
        rows.append([run.label, f"{values.parameters:,}", *numbers, formatted(values.auc, ".3f")])
    return rows


def draw_accuracy(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = axes_of()
    plot_runs(axis, runs, [run.evaluation.accuracy for run in runs], runs[0].evaluation.gamma)
    mark_training(axis, runs[0].settings.noise)
    axis.set(xlabel="noise level γ", ylabel="accuracy")
    add_legend(axis)
    return figure
