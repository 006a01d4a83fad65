"""The pictures of a report on video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from cdt_fast.training.figures import (
    GRAY,
    add_legend,
    axes_of,
    early_exits,
    mark_training,
    plot_runs,
    pyplot,
    set_log_scale,
)
from cdt_fast.training.task import Drawing, EvaluatedRun
from cdt_fast.video.compute import exit_flops
from cdt_fast.video.frames import read_frames
from cdt_fast.video.networks import load_network
from cdt_fast.video.settings import VideoSettings

_STYLES = {"blur": (0, (1, 3)), "dct": "--", "dct3d": "-.", "dct3d_shifted": (0, (3, 1, 1, 1))}


def drawings() -> list[Drawing]:
    """All of them."""
    return [
        Drawing("rmse_over_noise.png", "RMSE over the noise level", _rmse_over_noise),
        Drawing("early_exit.png", "RMSE of an early exit after each depth, over what it costs", _early_exit),
        Drawing("frames.png", "A held-out frame: clean, noisy and denoised", _frames),
    ]


def baseline_label(run: EvaluatedRun, name: str) -> str:
    """What to call a baseline without weights that a run was measured beside."""
    data = run.settings.data
    patch = f"{data.patch}x{data.patch}"
    volume = f"3-D DCT {patch}x{data.window}"
    return {
        "blur": "mean of 3x3 pixels",
        "dct": f"DCT {patch}, hard threshold",
        "dct3d": f"{volume}, hard threshold",
        "dct3d_shifted": f"{volume}, shifted grids",
    }[name]


def level_sign(run: EvaluatedRun) -> str:
    """By what letter a noise level goes: a standard deviation in gray levels, or a multiple of that of the frames."""
    return "σ" if run.settings.data.unit == "level" else "γ"


def _rmse_over_noise(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = axes_of()
    reference = runs[0].evaluation
    axis.plot(reference.gamma, reference.identity_rmse, ":", color=GRAY, label="identity")
    for name, values in reference.baseline_rmse.items():
        axis.plot(reference.gamma, values, linestyle=_STYLES[name], color=GRAY, label=baseline_label(runs[0], name))
    plot_runs(axis, runs, "rmse", reference.gamma)
    mark_training(axis, reference.training_gamma)
    axis.set(xlabel=f"noise level {level_sign(runs[0])}", ylabel="RMSE (0..255)")
    add_legend(axis)
    return figure


def _early_exit(runs: Sequence[EvaluatedRun]) -> Any:
    def add_identity(axis: Any, index: int) -> None:
        axis.axhline(runs[0].evaluation.identity_rmse[index], linestyle=":", color=GRAY, label="identity")

    figure, axes = early_exits(runs, "depth_rmse", add_identity, _cost, level_sign(runs[0]))
    for axis in axes:
        axis.set(xlabel="FLOP a pixel")
    set_log_scale(axes[0], "RMSE (0..255)")
    add_legend(axes[0], middle=1.1)
    return figure


def _cost(run: EvaluatedRun) -> list[float]:
    settings = cast("VideoSettings", run.settings)
    grids = None if settings.data.frames == "crops" else 1  # as it was measured
    return exit_flops(load_network(run.folder.model, "cpu"), settings, grids)


def _frames(runs: Sequence[EvaluatedRun]) -> Any:
    """A row a noise level; None where a run has kept no frames."""
    kept = [frames for run in runs if (frames := read_frames(run.folder.frames)) is not None]
    if len(kept) < len(runs):
        return None
    first, sign = kept[0], level_sign(runs[0])
    rows, columns = len(first["gammas"]), 2 + len(runs)
    size = (2.6 * columns, 2.8 * rows)
    figure, axes = pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for number, (row, gamma) in enumerate(zip(axes, first["gammas"].tolist(), strict=True)):
        shown = {"clean": first["clean"], f"noisy, {sign} = {gamma:g}": first["noisy"][number]}
        shown.update({run.label: frames["denoised"][number] for run, frames in zip(runs, kept, strict=True)})
        for axis, (title, frame) in zip(row, shown.items(), strict=True):
            error = 255 * (frame - first["clean"]).square().mean().sqrt().item()
            axis.imshow(frame.numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_title(f"{title}\nRMSE {error:.1f}" if error else title, fontsize="small", wrap=True)
            axis.axis("off")
    return figure
