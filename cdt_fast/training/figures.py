"""The pictures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.errors import require
from cdt_fast.files import replaced_atomically
from cdt_fast.training.building import load_data, load_model
from cdt_fast.training.results import EvaluatedRun
from cdt_fast.video.denoising import denoised_frames
from cdt_fast.video.evaluation import noisy_batches

# Okabe and Ito's palette: told apart by most kinds of color vision.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
GRAY = "#888888"


def write_figures(folder: Path, runs: Sequence[EvaluatedRun]) -> list[tuple[str, str]]:
    """Draw every picture into `folder` and return names and captions.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    require("matplotlib", "report", "drawing a report")
    import matplotlib

    matplotlib.use("Agg")
    shared = [("loss_over_depth.png", "Held-out loss at every depth, at the training noise", _loss_over_depth)]
    ratios = "Ratio of the losses of neighboring depths, for every {} and layer"
    if runs and runs[0].config.task != "video":
        accuracy = "Accuracy" if runs[0].config.task == "text" else "Accuracy of the tokens"
        drawings = [
            *shared,
            ("accuracy_over_noise.png", f"{accuracy} over γ, with its 95 % interval", _accuracy_over_noise),
            ("early_exit.png", f"{accuracy} of an early exit after each depth", _early_exit_accuracy),
            ("sample_ratios.png", ratios.format("text" if runs[0].config.task == "text" else "sequence"), _ratios),
        ]
    else:
        drawings = [
            *shared,
            ("rmse_over_noise.png", "RMSE over the noise level", _rmse_over_noise),
            ("early_exit.png", "RMSE of an early exit after each depth", _early_exit),
            ("sample_ratios.png", ratios.format("sequence"), _ratios),
            ("frames.png", "A held-out frame: clean, noisy and denoised", _frames),
        ]
    if any(run.evaluation["constrained"] for run in runs):
        drawings.insert(2, ("multipliers.png", "Multipliers during the training", _multipliers))
    for name, _, draw in drawings:
        figure = draw(runs)
        with replaced_atomically(folder / name) as temporary:
            figure.savefig(temporary, dpi=110, bbox_inches="tight")
        _pyplot().close(figure)
    return [(name, caption) for name, caption, _ in drawings]


def _pyplot() -> Any:
    import matplotlib.pyplot as pyplot

    return pyplot


def _axes(width: float = 6.4, height: float = 4.0, columns: int = 1, *, together: bool = False) -> tuple[Any, Any]:
    """A figure with axes side by side; `together`: with the same y, so that they can be compared."""
    figure, axes = _pyplot().subplots(1, columns, figsize=(width * columns, height), squeeze=False, sharey=together)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes[0]


def _lines(axis: Any, runs: Sequence[EvaluatedRun], key: str, x: Sequence[float] | None = None) -> None:
    for run, color in zip(runs, _cycle(len(runs)), strict=True):
        values = run.evaluation[key]
        axis.plot(range(len(values)) if x is None else x, values, "o-", color=color, label=run.label)


def _legend(axis: Any, columns: int = 1, middle: float = 0.5) -> None:
    # Below the axes: with several runs there is no corner that no line passes through.
    axis.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(middle, -0.14), ncols=columns)


def _log_scale(axis: Any, name: str) -> None:
    """A logarithmic y labeled in plain numbers; a linear one where the values are too close for its ticks."""
    values = [value for one in axis.figure.axes for line in one.get_lines() for value in line.get_ydata()]
    if min(values) <= 0 or max(values) < 3 * min(values):
        axis.set(ylabel=name)
        return
    from matplotlib import ticker

    axis.set(ylabel=f"{name}, log scale", yscale="log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())


def _mark_training(axis: Any, gamma: float) -> None:
    axis.axvline(gamma, color=GRAY, linewidth=0.8)
    offset = {"xytext": (3, 0), "textcoords": "offset points"}
    axis.annotate("training", (gamma, 0.98), xycoords=("data", "axes fraction"), color=GRAY, **offset)


def _cycle(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


def _loss_over_depth(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = _axes()
    _lines(axis, runs, "layer_loss")
    axis.set(xlabel="depth")
    _log_scale(axis, "loss")
    axis.xaxis.get_major_locator().set_params(integer=True)
    _legend(axis)
    return figure


def _rmse_over_noise(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = _axes()
    reference = runs[0].evaluation
    axis.plot(reference["gamma"], reference["identity_rmse"], ":", color=GRAY, label="identity")
    for name, style in (("dct", "--"), ("dct3d", "-.")):
        label = runs[0].baseline_label(name)
        axis.plot(reference["gamma"], reference["baseline_rmse"][name], style, color=GRAY, label=label)
    _lines(axis, runs, "rmse", reference["gamma"])
    _mark_training(axis, reference["training_gamma"])
    axis.set(xlabel="noise level γ", ylabel="RMSE (0..255)")
    _legend(axis)
    return figure


def _accuracy_over_noise(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = _axes()
    reference = runs[0].evaluation
    _lines(axis, runs, "accuracy", reference["gamma"])
    for run, color in zip(runs, _cycle(len(runs)), strict=True):
        low, high = zip(*run.evaluation["accuracy_interval"], strict=True)
        axis.fill_between(reference["gamma"], low, high, color=color, alpha=0.12, linewidth=0)
    _mark_training(axis, reference["training_gamma"])
    axis.set(xlabel="noise level γ", ylabel="accuracy")
    _legend(axis)
    return figure


def _early_exit_accuracy(runs: Sequence[EvaluatedRun]) -> Any:
    gammas = runs[0].evaluation["gamma"]
    figure, axes = _axes(columns=2, width=5.2, together=True)
    for axis, index in zip(axes, _shown_levels(runs), strict=True):
        for run, color in zip(runs, _cycle(len(runs)), strict=True):
            axis.plot(run.evaluation["depth_accuracy"][index], "o-", color=color, label=run.label)
        axis.set(title=f"γ = {gammas[index]:g}", xlabel="layers run")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set(ylabel="accuracy")
    _legend(axes[0], middle=1.1)
    return figure


def _shown_levels(runs: Sequence[EvaluatedRun]) -> list[int]:
    """Of the noise levels the one next to the training's, and the largest."""
    gammas = runs[0].evaluation["gamma"]
    training = runs[0].evaluation["training_gamma"]
    return [min(range(len(gammas)), key=lambda index: abs(gammas[index] - training)), len(gammas) - 1]


def _early_exit(runs: Sequence[EvaluatedRun]) -> Any:
    gammas = runs[0].evaluation["gamma"]
    figure, axes = _axes(columns=2, width=5.2, together=True)
    for axis, index in zip(axes, _shown_levels(runs), strict=True):
        for run, color in zip(runs, _cycle(len(runs)), strict=True):
            axis.plot(run.evaluation["depth_rmse"][index], "o-", color=color, label=run.label)
        axis.axhline(runs[0].evaluation["identity_rmse"][index], linestyle=":", color=GRAY, label="identity")
        axis.set(title=f"γ = {gammas[index]:g}", xlabel="layers run")
        axis.xaxis.get_major_locator().set_params(integer=True)
    _log_scale(axes[0], "RMSE (0..255)")
    _legend(axes[0], middle=1.1)
    return figure


def _ratios(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = _axes()
    for run, color in zip(runs, _cycle(len(runs)), strict=True):
        histogram = run.evaluation["per_sample"]["histogram"]
        total = max(sum(histogram["counts"]), 1)
        shares = [count / total for count in histogram["counts"]]
        axis.stairs(shares, histogram["edges"], color=color, label=run.label, linewidth=1.6)
    axis.axvline(1.0, color=GRAY, linewidth=0.8)
    sample = "text" if runs[0].config.task == "text" else "sequence"
    axis.set(xlabel=rf"$\ell_l\,/\,\ell_{{l-1}}$ of one {sample} (the last bin holds all above)", ylabel="share")
    _legend(axis)
    return figure


def _multipliers(runs: Sequence[EvaluatedRun]) -> Any:
    constrained = [run for run in runs if run.evaluation["constrained"]]
    figure, axes = _axes(columns=len(constrained), width=5.2)
    colors = _pyplot().get_cmap("viridis")
    for axis, run in zip(axes, constrained, strict=True):
        entries = [entry for entry in run.folder.read_metrics() if "multipliers" in entry]
        steps = [entry["step"] for entry in entries]
        depths = run.evaluation["layers"] + 1
        for depth in range(depths):
            values = [entry["multipliers"][depth] for entry in entries]
            axis.plot(steps, values, color=colors(depth / depths), label=rf"$\lambda_{{{depth}}}$")
        axis.set(xlabel="step", ylabel="multiplier", title=run.label)
        if not any(any(entry["multipliers"]) for entry in entries):
            axis.set_ylim(0, 1)
            axis.text(0.5, 0.5, "zero at every logged step", transform=axis.transAxes, ha="center", color=GRAY)
        _legend(axis, columns=3)
    return figure


@torch.no_grad()
def _frames(runs: Sequence[EvaluatedRun]) -> Any:
    config = runs[0].config
    data = load_data(config, progress=False)
    levels = sorted({config.data.gamma, min(config.evaluation.gammas, key=lambda gamma: abs(gamma - 0.5))})
    models = [load_model(run.folder, run.config).cpu() for run in runs]
    columns = 2 + len(runs)
    figure, axes = _pyplot().subplots(
        len(levels), columns, figsize=(2.6 * columns, 2.8 * len(levels)), squeeze=False, layout="constrained"
    )
    middle = config.data.window // 2
    for row, gamma in zip(axes, levels, strict=True):
        noisy, clean = next(noisy_batches(data.test, gamma, data.sigma, torch.device("cpu")))
        shown = {"clean": clean, f"noisy, γ = {gamma:g}": noisy}
        shown.update(
            {run.label: denoised_frames(model, run.config, noisy) for run, model in zip(runs, models, strict=True)}
        )
        for axis, (title, frames) in zip(row, shown.items(), strict=True):
            error = 255 * (frames[0, middle] - clean[0, middle]).square().mean().sqrt().item()
            axis.imshow(frames[0, middle].numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_title(f"{title}\nRMSE {error:.1f}" if error else title, fontsize="small", wrap=True)
            axis.axis("off")
    return figure
