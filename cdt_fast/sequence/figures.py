"""The pictures and tables of a report on texts and language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdt_fast.sequence.evaluation import KEPT
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


def confident_exit_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Classifiers that leave at the first depth that is sure, at thresholds calibrated on the validation texts."""
    gamma = runs[0].evaluation.gamma[0]
    rows = [[f"exit by confidence, γ {gamma:g}", "agreement asked", "threshold", "agreement", "accuracy", "mean depth"]]
    for run in runs:
        for row in run.evaluation.confident_exits:
            numbers = f"{row.threshold:.3f}", f"{row.agreement:.3f}", f"{row.accuracy:.3f}", f"{row.mean_depth:.2f}"
            rows.append([run.label, f"{row.asked:g}", *numbers])
    return rows


def perplexity_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Perplexity of language models a noise level."""
    rows = [["perplexity", *(f"γ {gamma:g}" for gamma in runs[0].evaluation.gamma)]]
    for run in runs:
        rows.append([run.label, *(f"{value:.4g}" for value in run.evaluation.perplexity)])
    return rows


def decoding_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Each exit of each run as a drafter; `generate` with the fastest ones is timed."""
    rows = [["decoding with an exit", "exit", "agreement", "drafts", "kept", "tokens a round", "predicted", "measured"]]
    for run in runs:
        alone = formatted(run.evaluation.tokens_per_second, ".3g")
        for row in run.evaluation.decoding:
            shares = f"{row.agreement:.1%}", str(row.drafts), f"{row.acceptance:.1%}", f"{row.tokens_per_round:.2f}"
            speed = f"{row.predicted:.2f}×", "" if row.measured is None else f"{row.measured:.2f}× of {alone} tokens/s"
            rows.append([run.label, str(row.exit), *shares, *speed])
    return rows


def speed_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Tokens a second over those of the model alone, in turns with it: the decoder kept with each model, and others."""
    rows = [["tokens/s over the model alone", "decoder", "kept drafts", "median", "least", "most"]]
    for run in runs:
        for row in run.evaluation.speeds:
            numbers = [f"{value:.2f}×" for value in (row.median, row.least, row.most)]
            rows.append([run.label, row.name, formatted(row.acceptance, ".1%"), *numbers])
    return rows


def speed_of(run: EvaluatedRun) -> float:
    """The median of the decoder that is kept with the model; 1 where none is."""
    return next((row.median for row in run.evaluation.speeds if row.name == KEPT), 1.0)


def _agreement(runs: Sequence[EvaluatedRun]) -> Any:
    figure, axes = axes_of(columns=2, width=5.2)
    for axis, name, label in zip(axes, ("depth_agreement", "layer_loss"), ("agreement", "loss, nats"), strict=True):
        for run, color in colored(runs):
            axis.plot(depths_of(run), getattr(run.evaluation, name), "o-", color=color, label=run.label)
        axis.set(xlabel="layers run", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    add_legend(axes[0], middle=1.1)
    return figure


def _confident_exit(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = axes_of()
    for run, color in colored(runs):
        axis.plot(depths_of(run), run.evaluation.depth_accuracy[0], "o-", color=color, label=run.label)
        exits = run.evaluation.confident_exits
        points = [exit.mean_depth for exit in exits], [exit.accuracy for exit in exits]
        axis.plot(*points, "*", color=color, markersize=11, markeredgecolor="white")
    axis.set(xlabel="layers run, in the mean", ylabel="accuracy")
    axis.xaxis.get_major_locator().set_params(integer=True)
    add_legend(axis)
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
"""What the exits of language models are worth as drafters."""

CONFIDENT_EXIT = Drawing(
    "confident_exit.png",
    "Accuracy over the layers run, at the least γ: exits after a fixed depth, and by confidence (stars)",
    _confident_exit,
)
"""What classifiers reach for how many layers."""
