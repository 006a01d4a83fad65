"""The pictures of a report that every task has, and what the pictures of all tasks are drawn with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.checks import require
from cdt_fast.files import replaced_atomically
from cdt_fast.training.task import Drawing, EvaluatedRun

# Okabe and Ito's palette: told apart by most kinds of color vision.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
GRAY = "#888888"
_STYLES = ("-", "--", ":", "-.")


def write_figures(folder: Path, runs: Sequence[EvaluatedRun]) -> list[tuple[str, str]]:
    """Draw every picture into `folder` and return names and captions, or MissingExtra: matplotlib is not installed."""
    plots = pyplot()
    first, *others = runs[0].task.drawings()
    drawings = [
        Drawing("loss_over_depth.png", "Held-out loss at every depth, at the training noise", _loss_over_depth),
        first,
        Drawing("multipliers.png", "Multipliers during the training", _multipliers),
        *others,
    ]
    drawn = []
    for name, caption, draw in drawings:
        figure = draw(runs)
        if figure is not None:
            with replaced_atomically(folder / name) as temporary:
                figure.savefig(temporary, dpi=110, bbox_inches="tight")
            plots.close(figure)
            drawn.append((name, caption))
    return drawn


def pyplot() -> Any:
    """`matplotlib.pyplot`, which draws to files alone, or MissingExtra: it is not installed."""
    require("matplotlib", "report", "drawing a report").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def color_and_style(index: int) -> tuple[str, str]:
    """The color of a line and its style, which is the next one where the colors begin again."""
    return COLORS[index % len(COLORS)], _STYLES[index // len(COLORS) % len(_STYLES)]


def axes_of(width: float = 6.4, columns: int = 1, *, together: bool = False) -> tuple[Any, Any]:
    """A figure with axes side by side; `together`: with the same y, so that they can be compared."""
    figure, axes = pyplot().subplots(1, columns, figsize=(width * columns, 4.0), squeeze=False, sharey=together)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes[0]


def colored(runs: Sequence[EvaluatedRun]) -> list[tuple[EvaluatedRun, str]]:
    """The runs, each with the color of its lines."""
    return [(run, COLORS[index % len(COLORS)]) for index, run in enumerate(runs)]


def plot_runs(axis: Any, runs: Sequence[EvaluatedRun], name: str, x: Sequence[float] | None = None) -> None:
    """A line a run: an entry of its evaluation over `x` (None: over its index)."""
    for run, color in colored(runs):
        values = getattr(run.evaluation, name)
        axis.plot(range(len(values)) if x is None else x, values, "o-", color=color, label=run.label)


def add_legend(axis: Any, columns: int = 1, middle: float = 0.5) -> None:
    """A legend below the axes: with several runs there is no corner that no line passes through."""
    axis.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(middle, -0.14), ncols=columns)


def set_log_scale(axis: Any, name: str) -> None:
    """A logarithmic y labeled in plain numbers; a linear one where the values are too close for its ticks."""
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
    """The training noise, from its least level to its greatest: shaded, or a line where there is one level."""
    axis.axvspan(*noise, color=GRAY, alpha=0.12, linewidth=0)
    axis.axvline(noise[0], color=GRAY, linewidth=0.8)
    offset = {"xytext": (3, 0), "textcoords": "offset points"}
    axis.annotate("training", (noise[0], 0.98), xycoords=("data", "axes fraction"), color=GRAY, **offset)


def early_exits(
    runs: Sequence[EvaluatedRun],
    name: str,
    also: Callable[[Any, int], None] | None = None,
    sign: str = "γ",
) -> tuple[Any, Any]:
    """Draw what every depth reaches, at the noise level next to the training's and at the largest.

    `name` is an entry of an evaluation, a row a noise level; `also` draws more into the axis of a noise level, by its
    index; `sign` is the letter of a noise level.
    """
    reference = runs[0].evaluation
    gammas = reference.gamma
    nearest = min(range(len(gammas)), key=lambda index: abs(gammas[index] - reference.training_gamma))
    figure, axes = axes_of(columns=2, width=5.2, together=True)
    for axis, index in zip(axes, (nearest, len(gammas) - 1), strict=True):
        for run, color in colored(runs):
            axis.plot(getattr(run.evaluation, name)[index], "o-", color=color, label=run.label)
        if also is not None:
            also(axis, index)
        axis.set(title=f"{sign} = {gammas[index]:g}", xlabel="layers run")
        axis.xaxis.get_major_locator().set_params(integer=True)
    return figure, axes


def _loss_over_depth(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = axes_of()
    plot_runs(axis, runs, "layer_loss")
    axis.set(xlabel="depth")
    set_log_scale(axis, "loss")
    axis.xaxis.get_major_locator().set_params(integer=True)
    add_legend(axis)
    return figure


def _multipliers(runs: Sequence[EvaluatedRun]) -> Any:
    """The multipliers of the runs that have some; None where none has."""
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
            color, style = color_and_style(depth)
            width = 1.5 + 3 * (1 - depth / layers)  # multipliers of the same value, zero mostly, are all seen
            axis.plot(steps, values, style, color=color, linewidth=width, label=rf"$\lambda_{{{depth}}}$")
        axis.set(xlabel="step", ylabel="multiplier", title=run.label)
        add_legend(axis, columns=3)
    return figure
