"""Tables and pictures of one run, or of several side by side: a function of what their folders hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cdt_fast.checks import MissingExtra
from cdt_fast.files import write_text
from cdt_fast.tables import as_markdown
from cdt_fast.training import figures
from cdt_fast.training.evaluation import verdict
from cdt_fast.training.task import EvaluatedRun, Summary, Table

_VERDICT = (
    "Worst: the largest share by which a layer exceeds its bound, negative where all bounds hold, and that layer; "
    "feasible: it is not above zero."
)
LAST_LOSS = Summary("ℓ_L", lambda run: run.evaluation.layer_loss[-1])
LARGEST_RATIO = Summary("largest ratio", lambda run: max(filter(None, run.evaluation.layer_ratio), default=None))


def descent_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Held-out loss of depth 0, the ratio of each layer, and the verdict."""
    layers = max(run.evaluation.layers for run in runs)
    rows = [
        ["held-out descent", "ℓ_0", *(f"ℓ_{n}/ℓ_{n - 1}" for n in range(1, layers + 1)), "ℓ_L", "feasible", "worst"]
    ]
    for run in runs:
        values = run.evaluation
        ratios = [formatted(ratio, ".3f") for ratio in values.layer_ratio]
        worst = values.report.worst_violation
        rows.append(
            [
                run.label,
                f"{values.layer_loss[0]:.3g}",
                *ratios,
                *[""] * (layers - len(ratios)),
                f"{values.layer_loss[-1]:.3g}",
                "" if worst is None else "yes" if values.feasible else "no",
                "" if worst is None else f"{worst:+.1%} at {values.report.worst_layer}",
            ]
        )
    return rows


def sample_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Descent of single samples."""
    rows = [[f"per {runs[0].task.sample} and layer", "mean ratio", "median ratio", "descending"]]
    for run in runs:
        values = run.evaluation.per_sample
        numbers = [formatted(value, ".3f") for value in (values.mean_ratio, values.median_ratio)]
        rows.append([run.label, *numbers, formatted(values.descending_fraction, ".1%")])
    return rows


def seed_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Runs that differ in nothing but the seed, together: mean and range over the seeds; no rows where none do."""
    groups: dict[str, list[EvaluatedRun]] = {}
    for run in runs:
        seedless = run.settings.model_copy(update={"training": run.settings.training.model_copy(update={"seed": 0})})
        groups.setdefault(repr(seedless), []).append(run)
    columns = [*runs[0].task.summaries(runs), LAST_LOSS, LARGEST_RATIO]
    rows = [["over seeds, mean (range)", "seeds", *(column.heading for column in columns), "feasible"]]
    for group in groups.values():
        if len(group) == 1:
            continue
        every = [[value for run in group if (value := column.value(run)) is not None] for column in columns]
        words = [f"{sum(of) / len(of):.3g} ({min(of):.3g}..{max(of):.3g})" if of else "" for of in every]
        feasible = sum(run.evaluation.feasible for run in group)
        rows.append([group[0].kind, str(len(group)), *words, f"{feasible} of {len(group)}"])
    return rows if len(rows) > 1 else []


def tables(runs: Sequence[EvaluatedRun]) -> list[Table]:
    """All tables of a report, in order."""
    every = [*runs[0].task.tables(runs), descent_table(runs), sample_table(runs), seed_table(runs)]
    return [table for table in every if table]


def judgment(run: EvaluatedRun, runs: Sequence[EvaluatedRun]) -> str:
    """The verdict on one of several runs, that on its constraints where it has some, and whether it is finished."""
    values, words = run.evaluation, [verdict(run, [other for other in runs if other is not run])[1]]
    if values.constrained:
        words.append(values.report.text)
    if not values.finished:
        words.append(f"The training is not finished, this is step {values.trained_steps} of {values.steps}.")
    return " ".join(words)


def write_report(folder: str | os.PathLike[str], runs: Sequence[EvaluatedRun], command: str) -> Path:
    """Write `report.md`, which names the command, and where matplotlib is installed its pictures; returns its path."""
    folder = Path(folder)
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs on {Path(runs[0].evaluation.source).name}"
    lines = [f"# {title}", "", f"`{command}` makes this report.", ""]
    lines += [f"{runs[0].task.conditions(runs[0])} {_VERDICT}", ""]
    for table in tables(runs):
        lines += [as_markdown(table), ""]
    for run in runs:
        lines += [f"- {run.label}: {judgment(run, runs)}"]
    lines.append("")
    try:
        for name, caption in figures.write_figures(folder, runs):
            lines += [f"![{caption}]({name})", "", f"*{caption}*", ""]
    except MissingExtra as error:
        lines += [f"No pictures: {error}", ""]
    path = folder / "report.md"
    write_text(path, "\n".join(lines))
    return path


def formatted(value: float | None, form: str) -> str:
    """The number in this format, or nothing where it is not known."""
    return "" if value is None else format(value, form)
