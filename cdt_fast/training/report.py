"""Tables and pictures of one run, or of several side by side: a function of what their folders hold."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cdt_fast.checks import MissingExtra, require
from cdt_fast.files import replaced_atomically, write_text
from cdt_fast.tables import as_markdown
from cdt_fast.training.evaluation import verdict
from cdt_fast.training.task import EvaluatedRun, Table

_VERDICT = (
    "Worst: the largest share by which a layer exceeds its bound, negative where all bounds hold, and that layer; "
    "feasible: it is not above zero."
)
# Okabe and Ito's palette: told apart by most kinds of color vision.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
GRAY = "#888888"
_STYLES = ("-", "--", ":", "-.")


def write_report(folder: str | os.PathLike[str], runs: Sequence[EvaluatedRun], command: str) -> Path:
    """Write `report.md`, which names the command, and where matplotlib is installed its pictures; return its path."""
    folder = Path(folder)
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs on {Path(runs[0].evaluation.source).name}"
    lines = [f"# {title}", "", f"`{command}` makes this report.", ""]
    lines += [f"{runs[0].task.report(runs).conditions} {_VERDICT}", ""]
    for table in tables(runs):
        lines += [as_markdown(table), ""]
    lines += [*(f"- {run.label}: {judgment(run, runs)}" for run in runs), ""]
    try:
        for name, caption in write_pictures(folder, runs):
            lines += [f"![{caption}]({name})", "", f"*{caption}*", ""]
    except MissingExtra as error:
        lines += [f"No pictures: {error}", ""]
    path = folder / "report.md"
    write_text(path, "\n".join(lines))
    return path


def tables(runs: Sequence[EvaluatedRun]) -> list[Table]:
    """Return all tables of a report, in order."""
    own = runs[0].task.report(runs)
    return [*own.tables, descent_table(runs), _sample_table(runs, own.sample)]


def judgment(run: EvaluatedRun, runs: Sequence[EvaluatedRun]) -> str:
    """Return the verdict on one of several runs, that on its constraints if it has some, and whether it is finished."""
    values, words = run.evaluation, [verdict(run, [other for other in runs if other is not run])[1]]
    if values.constrained:
        words.append(values.report.text)
    if not values.finished:
        words.append(f"The training is not finished, this is step {values.trained_steps} of {values.steps}.")
    return " ".join(words)


def descent_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Return the held-out loss of depth 0, the ratio of each layer, and the verdict."""
    layers = max(run.evaluation.layers for run in runs)
    ratios = [f"ℓ_{n}/ℓ_{n - 1}" for n in range(1, layers + 1)]
    rows = [["held-out descent", "ℓ_0", *ratios, "ℓ_L", "feasible", "worst"]]
    for run in runs:
        values = run.evaluation
        first, *_, last = (f"{loss:.3g}" for loss in values.layer_loss)
        ratios = [formatted(ratio, ".3f") for ratio in values.layer_ratio]
        worst, answers = values.report.worst_violation, ["", ""]
        if worst is not None:
            answers = ["yes" if values.feasible else "no", f"{worst:+.1%} at {values.report.worst_layer}"]
        rows.append([run.label, first, *ratios, *[""] * (layers - len(ratios)), last, *answers])
    return rows


def _sample_table(runs: Sequence[EvaluatedRun], sample: str) -> Table:
    rows = [[f"per {sample} and layer", "mean ratio", "median ratio", "descending"]]
    for run in runs:
        values = run.evaluation.per_sample
        numbers = [formatted(value, ".3f") for value in (values.mean_ratio, values.median_ratio)]
        rows.append([run.label, *numbers, formatted(values.descending_fraction, ".1%")])
    return rows


def formatted(value: float | None, form: str) -> str:
    """Return the number in this format, or nothing where it is not known."""
    return "" if value is None else format(value, form)


def write_pictures(folder: Path, runs: Sequence[EvaluatedRun]) -> list[tuple[str, str]]:
    """Draw every picture into `folder` and return names and captions, or MissingExtra: matplotlib is not installed."""
    plots = pyplot()
    first, *others = runs[0].task.report(runs).pictures
    pictures = [
        ("loss_over_depth.png", "Held-out loss at every depth, at the training noise", _loss_over_depth),
        first,
        ("multipliers.png", "Multipliers during the training", _multipliers),
        *others,
    ]
    drawn = []
    for name, caption, draw in pictures:
        figure = draw(runs)
        if figure is not None:
            with replaced_atomically(folder / name) as temporary:
                figure.savefig(temporary, dpi=110, bbox_inches="tight")
            plots.close(figure)
            drawn.append((name, caption))
    return drawn


def pyplot() -> Any:
    """Return `matplotlib.pyplot`, which draws to files alone, or MissingExtra: it is not installed."""
    require("matplotlib", "report", "drawing a report").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def axes_of(width: float = 6.4, columns: int = 1, *, together: bool = False) -> tuple[Any, Any]:
    """Return a figure with axes side by side; `together`: with the same y, so that they can be compared."""
    figure, axes = pyplot().subplots(1, columns, figsize=(width * columns, 4.0), squeeze=False, sharey=together)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes[0]


def plot_runs(
    axis: Any, runs: Sequence[EvaluatedRun], values: Sequence[Sequence[float]], x: Sequence[float] | None = None
) -> None:
    """Draw a line a run: its values over `x`; None: over their depths."""
    for number, (run, line) in enumerate(zip(runs, values, strict=True)):
        axis.plot(range(len(line)) if x is None else x, line, "o-", color=COLORS[number % len(COLORS)], label=run.label)
    if x is None:
        axis.xaxis.get_major_locator().set_params(integer=True)


def add_legend(axis: Any, columns: int = 1, middle: float = 0.5) -> None:
    """Add a legend below the axes: with several runs there is no corner that no line passes through."""
    axis.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(middle, -0.14), ncols=columns)


def set_log_scale(axis: Any, name: str) -> None:
    """Make y logarithmic, labeled in plain numbers; linear where the values are too close for its ticks."""
    values = [value for one in axis.figure.axes for line in one.get_lines() for value in line.get_ydata()]
    if min(values) <= 0 or max(values) < 3 * min(values):
        axis.set(ylabel=name)
        return
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set(ylabel=f"{name}, log scale", yscale="log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())


def mark_training(axis: Any, noise: tuple[float, float]) -> None:
    """Shade the training noise from its least level to its greatest, or draw a line where there is one level."""
    axis.axvspan(*noise, color=GRAY, alpha=0.12, linewidth=0)
    axis.axvline(noise[0], color=GRAY, linewidth=0.8)
    offset = {"xytext": (3, 0), "textcoords": "offset points"}
    axis.annotate("training", (noise[0], 0.98), xycoords=("data", "axes fraction"), color=GRAY, **offset)


def _loss_over_depth(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = axes_of()
    plot_runs(axis, runs, [run.evaluation.layer_loss for run in runs])
    axis.set(xlabel="depth")
    set_log_scale(axis, "loss")
    add_legend(axis)
    return figure


def _multipliers(runs: Sequence[EvaluatedRun]) -> Any:
    constrained = [run for run in runs if run.evaluation.constrained]
    if not constrained:
        return None
    figure, axes = axes_of(columns=len(constrained), width=5.2)
    for axis, run in zip(axes, constrained, strict=True):
        entries = [entry for entry in run.folder.read_metrics() if "multipliers" in entry]
        steps = [entry["step"] for entry in entries]
        layers = run.evaluation.layers
        for depth in range(layers + 1):
            values = [entry["multipliers"][depth] for entry in entries]
            color, style = COLORS[depth % len(COLORS)], _STYLES[depth // len(COLORS) % len(_STYLES)]
            width = 1.5 + 3 * (1 - depth / layers)  # multipliers of the same value, zero mostly, are all seen
            axis.plot(steps, values, style, color=color, linewidth=width, label=rf"$\lambda_{{{depth}}}$")
        axis.set(xlabel="step", ylabel="multiplier", title=run.label)
        add_legend(axis, columns=3)
    return figure
