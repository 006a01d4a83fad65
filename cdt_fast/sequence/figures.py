"""The pictures and tables of a report on texts and language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdt_fast.training.figures import add_legend, axes_of, colored, early_exits, mark_training, plot_runs
from cdt_fast.training.report import formatted
from cdt_fast.training.task import Drawing, EvaluatedRun, Table


def drawings(accuracy: str) -> list[Drawing]:
    """All pictures; `accuracy`: what the accuracy is called."""
    return [
        Drawing("accuracy_over_noise.png", f"{accuracy} over γ, with its 95 % interval", _accuracy_over_noise),
        Drawing("early_exit.png", f"{accuracy} of an early exit after each depth", _early_exit),
    ]


def depths_of(run: EvaluatedRun) -> list[int]:
    """The depths of the model that are read."""
    return getattr(run.settings.model, "taps", None) or list(range(run.evaluation.layers + 1))


def accuracy_table(runs: Sequence[EvaluatedRun], heading: str) -> Table:
    """Accuracy a noise level, with half of its 95 % interval, and the area under it."""
    rows = [[heading, "parameters", *(f"γ {gamma:g}" for gamma in runs[0].evaluation.gamma), "area under it"]]
    for run in runs:
        values = run.evaluation
        numbers = [
            f"{accuracy:.3f} ±{(high - low) / 2:.3f}"
            for accuracy, (low, high) in zip(values.accuracy, values.accuracy_interval, strict=True)
        ]
        rows.append([run.label, f"{values.parameters:,}", *numbers, formatted(values.auc, ".3f")])
    return rows


def perplexity_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Perplexity of language models a noise level."""
    rows = [["perplexity", *(f"γ {gamma:g}" for gamma in runs[0].evaluation.gamma)]]
    for run in runs:
        rows.append([run.label, *(f"{value:.4g}" for value in run.evaluation.perplexity)])
    return rows


def _agreement(runs: Sequence[EvaluatedRun]) -> Any:
    figure, axes = axes_of(columns=2, width=5.2)
    for axis, name, label in zip(axes, ("depth_agreement", "layer_loss"), ("agreement", "loss, nats"), strict=True):
        for run, color in colored(runs):
            axis.plot(depths_of(run), getattr(run.evaluation, name), "o-", color=color, label=run.label)
        axis.set(xlabel="layers run", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    add_legend(axes[0], middle=1.1)
    return figure


def _accuracy_over_noise(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = axes_of()
    reference = runs[0].evaluation
    plot_runs(axis, runs, "accuracy", reference.gamma)
    for run, color in colored(runs):
        low, high = zip(*run.evaluation.accuracy_interval, strict=True)
        axis.fill_between(reference.gamma, low, high, color=color, alpha=0.12, linewidth=0)
    mark_training(axis, runs[0].settings.noise)
    axis.set(xlabel="noise level γ", ylabel="accuracy")
    add_legend(axis)
    return figure


def _early_exit(runs: Sequence[EvaluatedRun]) -> Any:
    figure, axes = early_exits(runs, "depth_accuracy")
    axes[0].set(ylabel="accuracy")
    add_legend(axes[0], middle=1.1)
    return figure


AGREEMENT = Drawing(
    "agreement.png",
    "Share of the held-out tokens that an exit names as the last depth does, and the loss at that exit",
    _agreement,
)
