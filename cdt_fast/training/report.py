"""Tables and pictures of one run, or of several side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cdt_fast.files import write_text
from cdt_fast.tables import as_markdown
from cdt_fast.training import figures
from cdt_fast.training.results import EvaluatedRun

_VERDICT = (
    "Worst: the largest share by which a layer exceeds its bound, negative where all bounds hold, and that layer; "
    "feasible: it is not above zero."
)


def error_table(runs: Sequence[EvaluatedRun]) -> list[list[str]]:
    """RMSE a noise level and their mean: identity, baselines without weights, then the runs."""
    reference = runs[0].evaluation
    gammas = reference["gamma"]
    rows = [["RMSE (0..255)", "parameters", *(f"γ {gamma:g}" for gamma in gammas), "mean"]]
    plain = {"identity (the noisy frames)": reference["identity_rmse"]}
    for name, values in reference["baseline_rmse"].items():
        plain[runs[0].baseline_label(name)] = values
    for name, values in plain.items():
        rows.append([name, "0", *(f"{value:.2f}" for value in values), f"{sum(values) / len(values):.2f}"])
    for run in runs:
        values = run.evaluation
        numbers = [*values["rmse"], values["mean_rmse"]]
        rows.append([run.label, f"{values['parameters']:,}", *(f"{value:.2f}" for value in numbers)])
    return rows


def accuracy_table(runs: Sequence[EvaluatedRun]) -> list[list[str]]:
    """Accuracy (of language models that of tokens) a noise level, with half of its 95 % interval, and the area."""
    tokens = runs[0].config.task == "lm"
    gammas = runs[0].evaluation["gamma"]
    heading = "accuracy of tokens" if tokens else "accuracy"
    rows = [[heading, "parameters", *(f"γ {gamma:g}" for gamma in gammas), "AUC"]]
    for run in runs:
        values = run.evaluation
        numbers = [
            f"{accuracy:.3f} ±{(high - low) / 2:.3f}"
            for accuracy, (low, high) in zip(values["accuracy"], values["accuracy_interval"], strict=True)
        ]
        rows.append([run.label, f"{values['parameters']:,}", *numbers, _formatted(values["auc"], ".3f")])
    return rows


def perplexity_table(runs: Sequence[EvaluatedRun]) -> list[list[str]]:
    """Perplexity of language models a noise level."""
    rows = [["perplexity", *(f"γ {gamma:g}" for gamma in runs[0].evaluation["gamma"])]]
    for run in runs:
        rows.append([run.label, *(f"{value:.4g}" for value in run.evaluation["perplexity"])])
    return rows


def descent_table(runs: Sequence[EvaluatedRun]) -> list[list[str]]:
    """Held-out loss of depth 0, the ratio of each layer, and the verdict."""
    layers = max(run.evaluation["layers"] for run in runs)
    rows = [
        ["held-out descent", "ℓ_0", *(f"ℓ_{n}/ℓ_{n - 1}" for n in range(1, layers + 1)), "ℓ_L", "feasible", "worst"]
    ]
    for run in runs:
        values = run.evaluation
        ratios = [_formatted(ratio, ".3f") for ratio in values["layer_ratio"]]
        worst = values["report"]["worst_violation"]
        rows.append(
            [
                run.label,
                f"{values['layer_loss'][0]:.3g}",
                *ratios,
                *[""] * (layers - len(ratios)),
                f"{values['layer_loss'][-1]:.3g}",
                "yes" if values["feasible"] else "no",
                "" if worst is None else f"{worst:+.1%} at {values['report']['worst_layer']}",
            ]
        )
    return rows


def sample_table(runs: Sequence[EvaluatedRun]) -> list[list[str]]:
    """Descent of single sequences or texts."""
    rows = [
        [
            f"per {'text' if runs[0].config.task == 'text' else 'sequence'} and layer",
            "mean ratio",
            "median ratio",
            "descending",
        ]
    ]
    for run in runs:
        values = run.evaluation["per_sample"]
        numbers = [_formatted(values[key], ".3f") for key in ("mean_ratio", "median_ratio")]
        rows.append([run.label, *numbers, _formatted(values["descending_fraction"], ".1%")])
    return rows


def seed_table(runs: Sequence[EvaluatedRun]) -> list[list[str]]:
    """Runs that differ in nothing but the seed, together: mean and range over the seeds; no rows where none do."""
    groups: dict[str, list[EvaluatedRun]] = {}
    for run in runs:
        seedless = replace(run.config, training=replace(run.config.training, seed=0))
        groups.setdefault(repr(seedless), []).append(run)
    largest = f"{runs[0].evaluation['gamma'][-1]:g}"
    video = runs[0].config.task == "video"
    over_all, at_largest = ("mean_rmse", "rmse") if video else ("auc", "accuracy")
    names = ["mean RMSE", f"RMSE, γ {largest}"] if video else ["AUC", f"accuracy, γ {largest}"]
    rows = [["over seeds, mean (range)", "seeds", *names, "ℓ_L", "largest ratio", "feasible"]]
    for group in groups.values():
        if len(group) < 2:
            continue
        measured = [run.evaluation for run in group]
        columns = [
            [values[over_all] for values in measured if values[over_all] is not None],
            [values[at_largest][-1] for values in measured],
            [values["layer_loss"][-1] for values in measured],
            [max(ratio for ratio in values["layer_ratio"] if ratio is not None) for values in measured],
        ]
        feasible = sum(values["feasible"] for values in measured)
        summaries = [
            f"{sum(column) / len(column):.3g} ({min(column):.3g}..{max(column):.3g})" if column else ""
            for column in columns
        ]
        rows.append([group[0].kind, str(len(group)), *summaries, f"{feasible} of {len(group)}"])
    return rows if len(rows) > 1 else []


def tables(runs: Sequence[EvaluatedRun]) -> list[list[list[str]]]:
    """All tables of a report, in order."""
    measured = {
        "video": lambda: [error_table(runs)],
        "text": lambda: [accuracy_table(runs)],
        "lm": lambda: [perplexity_table(runs), accuracy_table(runs)],
    }[runs[0].config.task]()
    found = [*measured, descent_table(runs), sample_table(runs), seed_table(runs)]
    return [table for table in found if table]


def write_report(folder: str | os.PathLike[str], runs: Sequence[EvaluatedRun], command: str) -> Path:
    """Write `report.md` and its pictures into `folder`.

    Args:
        folder: made if it does not exist.
        runs: at least one.
        command: the command that makes the report again.

    Returns:
        The path of `report.md`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    folder = Path(folder)
    pictures = figures.write_figures(folder, runs)
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs on {Path(runs[0].evaluation['source']).name}"
    lines = [f"# {title}", "", f"Made by `{command}`.", ""]
    lines += [f"{_conditions(runs[0])} {_VERDICT}", ""]
    for table in tables(runs):
        lines += [as_markdown(table), ""]
    for run in runs:
        lines += [f"- {run.label}: {run.evaluation['report']['text']}{_spectral(run)}"]
    lines.append("")
    for name, caption in pictures:
        lines += [f"![{caption}]({name})", "", f"*{caption}*", ""]
    path = folder / "report.md"
    write_text(path, "\n".join(lines))
    return path


def _conditions(run: EvaluatedRun) -> str:
    """On what and how the runs were measured."""
    values = run.evaluation
    if run.config.task == "video":
        return (
            f"Test windows: {len(values['test_windows'])} of {run.config.data.window} frames, none of them "
            f"seen in training; training noise γ = {values['training_gamma']:g}, "
            f"σ = {values['sigma']:.4f}. RMSE on 0..255 over all pixels of a noise level, then the plain mean "
            "over the levels. Losses: squared error summed over the pixels of a patch with values in [0, 1]."
        )
    answers = f" with {values['answers']:,} tokens to predict" if run.config.task == "lm" else ""
    return (
        f"Test texts: {values['test_texts']:,}{answers}, none of them seen in training; "
        f"perturbation of the word embeddings: {values['perturbation']}, in training γ = {values['training_gamma']:g}. "
        "Accuracy with half of its 95 % interval; AUC: the trapezoid of accuracy over γ. Losses: cross-entropy in "
        "nats, at the training γ."
    )


def _spectral(run: EvaluatedRun) -> str:
    if run.config.task != "video":
        return ""
    ratios = run.evaluation["spectral_ratio"]
    return f" ‖D‖²/c is at most {max(ratios):.3f}{'' if max(ratios) <= 1 else ', above the bound of 1'}."


def _formatted(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
