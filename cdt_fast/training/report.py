"""Tables and pictures of one run, or of several side by side: a function of what their folders hold."""

import importlib
import io
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from cdt_fast import page
from cdt_fast.checks import MissingExtra, require
from cdt_fast.training.evaluation import checks
from cdt_fast.training.results import QUANTILES
from cdt_fast.training.task import EvaluatedRun, Table

_WORST = "Worst: the largest share by which a loss exceeds its bound, negative where all bounds hold, and its depth."
# Okabe and Ito's palette: told apart by most kinds of color vision.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
GRAY = "#888888"
_STYLES = ("-", "--", ":", "-.")


def write_report(folder: str | os.PathLike[str], runs: Sequence[EvaluatedRun], command: str) -> Path:
    """Write `report.html`, which names the command, with pictures where matplotlib is installed; return its path."""
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs on {Path(runs[0].evaluation.source).name}"
    own = runs[0].task.report(runs)
    parts = [page.paragraph(f"`{command}` makes this page."), page.table(verdict_table(runs))]
    bounds = [f"{run.label}: {run.evaluation.report.text}" for run in runs if run.evaluation.constrained]
    parts += [*map(page.paragraph, (*bounds, *remarks(runs), own.conditions)), *map(page.table, own.tables)]
    parts += [page.table(descent_table(runs)), page.paragraph(_WORST)]
    try:
        parts += drawn_pictures(runs)
    except MissingExtra as error:
        parts.append(page.paragraph(f"No pictures: {error}"))
    path = Path(folder) / "report.html"
    page.write_page(path, title, parts)
    return path


def drawn_pictures(runs: Sequence[EvaluatedRun]) -> list[str]:
    """Return the pictures of a page, or MissingExtra: matplotlib is not installed."""
    first, *others = runs[0].task.report(runs).pictures
    pictures = [
        first,
        ("Held-out loss at every depth, at the training noise; dashed: what the constraints allow", loss_over_depth),
        *others,
        ("Ratios of the losses of a sample after and before a layer: the share of them below", _ratios),
        ("Multipliers during the training", _multipliers),
    ]
    drawn = ((caption, draw(runs)) for caption, draw in pictures)
    return [page.picture(as_png(figure), caption) for caption, figure in drawn if figure is not None]


def as_png(figure: Any) -> bytes:
    """Return a figure as the contents of a PNG file, and close it."""
    contents = io.BytesIO()
    figure.savefig(contents, format="png", dpi=110, bbox_inches="tight")
    pyplot().close(figure)
    return contents.getvalue()


def verdict_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Return the measure and the checks of every run, a row each, below what it is compared with. Only the first
    comparison says "better"."""
    own = [run.task.report([run]) for run in runs]
    bounds, first, *others = checks(runs[0], runs)
    rows = [["", own[0].measure, bounds, first, *(name.removeprefix("better ") for name in others)]]
    rows += [[name, f"{value:.4g}", *[""] * (len(rows[0]) - 2)] for name, value in own[0].references.items()]
    pairs = zip(runs, own, strict=True)
    return rows + [[run.label, f"{one.depths[-1]:.4g}", *checks(run, runs).values()] for run, one in pairs]


def remarks(runs: Sequence[EvaluatedRun]) -> list[str]:
    """Return what else the user of the models should know, a line each."""
    said = []
    for run in runs:
        values, kept, before = run.evaluation, run.evaluation.kept_step, run.evaluation.untrained_loss
        if kept == 0:
            said.append(f"{run.label}: training gained nothing: the model that was kept is the untrained one")
        if before is not None and values.kept_loss > before:
            change = f"{before:.6g} -> {values.kept_loss:.6g} on validation data"
            said.append(f"{run.label}: training made the last depth worse than it was untrained: {change}")
        if values.constrained and 0 < kept <= values.warmup_steps:
            when = f"before the constraints come on (after step {values.warmup_steps})"
            said.append(f"{run.label}: the model that was kept is of step {kept}, {when}")
        if not values.finished:
            done = f"this is step {values.trained_steps} of {values.steps}"
            said.append(f"{run.label}: the training is not finished, {done}")
    return said


def descent_table(runs: Sequence[EvaluatedRun]) -> Table:
    """Return the held-out loss of depth 0 and L, the ratio of each layer, the worst, and the ratios of samples."""
    known = [dict(zip(pairwise(depths_of(run)), run.evaluation.layer_ratio, strict=True)) for run in runs]
    pairs = sorted({pair for ratios in known for pair in ratios}, key=lambda pair: pair[::-1])
    begins = {f"ℓ_{depths_of(run)[0]}" for run in runs}
    names = ["ℓ_L", "worst", "of samples: mean ratio", "median", "descending"]
    begin = "first ℓ" if len(begins) > 1 else begins.pop()
    rows = [["held-out descent", begin, *(f"ℓ_{after}/ℓ_{before}" for before, after in pairs), *names]]
    for run, own in zip(runs, known, strict=True):
        values, report, samples = run.evaluation, run.evaluation.report, run.evaluation.per_sample
        first, *_, last = (f"{loss:.3g}" for loss in values.layer_loss)
        ratios = [formatted(own.get(pair), ".3f") for pair in pairs]
        worst = "" if report.worst_violation is None else f"{report.worst_violation:+.1%} at {report.worst_layer}"
        means = [formatted(value, ".3f") for value in (samples.mean_ratio, samples.median_ratio)]
        rows.append([run.label, first, *ratios, last, worst, *means, formatted(samples.descending_fraction, ".1%")])
    return rows


def depths_of(run: EvaluatedRun) -> list[int]:
    """Return the depths that a run has losses of."""
    return run.evaluation.report.depths or list(range(run.evaluation.layers + 1))


def formatted(value: float | None, form: str) -> str:
    """Return the number in this format, or nothing where it is not known."""
    return "" if value is None else format(value, form)


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


def as_drawn(name: str) -> str:
    """Return a name that matplotlib draws as it is: not as mathematics, nor, for a leading underscore, left out."""
    return ("\u200b" if name.startswith("_") else "") + name.replace("$", r"\$")


def plot_runs(
    axis: Any, runs: Sequence[EvaluatedRun], values: Sequence[Sequence[float]], x: Sequence[float] | None = None
) -> None:
    """Draw a line a run: its values over `x`; None: over its depths."""
    for number, (run, line) in enumerate(zip(runs, values, strict=True)):
        places, color = depths_of(run) if x is None else x, COLORS[number % len(COLORS)]
        axis.plot(places, line, "o-", color=color, label=as_drawn(run.label))
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


def loss_over_depth(runs: Sequence[EvaluatedRun]) -> Any:
    """Draw the held-out losses of every run, and what its constraints allow."""
    figure, (axis,) = axes_of()
    plot_runs(axis, runs, [run.evaluation.layer_loss for run in runs])
    for number, run in enumerate(runs):
        values = run.evaluation
        # A violation is what a loss is above its bound.
        violations = [values.violation, values.report.bound_violation or [None] * len(values.violation)]
        worst = [max((one for one in both if one is not None), default=None) for both in zip(*violations, strict=True)]
        triples = zip(depths_of(run), values.layer_loss, worst, strict=True)
        allowed = [(depth, loss - above) for depth, loss, above in triples if above is not None]
        if values.constrained and allowed:
            axis.plot(*zip(*allowed, strict=True), "--", color=COLORS[number % len(COLORS)])
    axis.set(xlabel="depth")
    set_log_scale(axis, "loss")
    add_legend(axis)
    return figure


def _ratios(runs: Sequence[EvaluatedRun]) -> Any:
    """Draw the distribution of the ratios ℓ_l / ℓ_{l−1} of single samples, up to 2."""
    found = [run.evaluation.per_sample.quantiles for run in runs]
    if not any(found):  # evaluated before they were
        return None
    figure, (axis,) = axes_of()
    for number, (run, ratios) in enumerate(zip(runs, found, strict=True)):
        if ratios:
            axis.plot(ratios, QUANTILES, color=COLORS[number % len(COLORS)], label=as_drawn(run.label))
    axis.axvline(1.0, color=GRAY, linewidth=0.8)
    axis.set(xlabel="ratio", ylabel="share", xlim=(0, 2))
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
        for number, depth in enumerate(depths_of(run)):
            values = [entry["multipliers"][number] for entry in entries]
            color, style = COLORS[number % len(COLORS)], _STYLES[number // len(COLORS) % len(_STYLES)]
            width = 1.5 + 3 * (1 - number / layers)  # multipliers of the same value, zero mostly, are all seen
            axis.plot(steps, values, style, color=color, linewidth=width, label=rf"$\lambda_{{{depth}}}$")
            if depth in (run.settings.constraints.bounds or {}) and "bound_multipliers" in entries[0]:
                values = [entry["bound_multipliers"][number] for entry in entries]
                axis.plot(steps, values, ":", color=color, linewidth=width, label=rf"bound $\mu_{{{depth}}}$")
        axis.set(xlabel="step", ylabel="multiplier", title=as_drawn(run.label))
        add_legend(axis, columns=3)
    return figure
