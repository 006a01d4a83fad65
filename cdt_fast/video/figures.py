"""The tables and pictures of a report on video, and the frames that are kept for it: drawing loads no video."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from cdt_fast.files import replaced_atomically
from cdt_fast.training.report import (
    GRAY,
    add_legend,
    as_drawn,
    axes_of,
    mark_training,
    plot_runs,
    pyplot,
    set_log_scale,
)
from cdt_fast.training.task import EvaluatedRun, Table
from cdt_fast.video.data.windows import VideoData
from cdt_fast.video.evaluation import VideoEvaluation
from cdt_fast.video.networks import Denoiser, device_of, reconstructed
from cdt_fast.video.noise import LEVELS
from cdt_fast.video.quality import psnr_of
from cdt_fast.video.settings import VideoSettings

_PART = 160  # pixels of a frame along each side, at most, that are shown at every depth
_NOISE_SEED = 20_260_118


def baseline_label(run: EvaluatedRun, name: str) -> str:
    """Name a baseline without weights that a run was measured beside."""
    data = run.settings.data
    shifted = f"3-D DCT {data.patch}x{data.patch}x{data.window}, shifted grids"
    return {"identity": "identity (the noisy frames)", "dct3d_shifted": shifted}.get(name, name)


def nearest_level(values: VideoEvaluation) -> int:
    """Return the index of the noise level next to the training's."""
    return min(range(len(values.gamma)), key=lambda index: abs(values.gamma[index] - values.training_gamma))


def level_sign(run: EvaluatedRun) -> str:
    """Name noise levels by a letter: standard deviations in gray levels, or multiples of that of the frames."""
    return "σ" if run.settings.data.frames == "crops" else "γ"


def tables(runs: Sequence[EvaluatedRun]) -> list[Table]:
    """Return RMSE, and PSNR, a noise level and their mean: identity, baselines without weights, the runs."""
    reference = runs[0].evaluation
    levels = [f"{level_sign(runs[0])} {gamma:g}" for gamma in reference.gamma]
    errors = [["RMSE (0..255)", "parameters", *levels, "mean"]]
    quality = [["PSNR in dB", *levels, "mean"]]
    rows = [(baseline_label(runs[0], name), 0, rmse) for name, rmse in reference.baseline_rmse.items()]
    rows += [(run.label, run.evaluation.parameters, run.evaluation.rmse) for run in runs]
    for name, parameters, rmse in rows:
        psnr = list(map(psnr_of, rmse))
        errors.append([name, f"{parameters:,}", *(f"{value:.2f}" for value in (*rmse, sum(rmse) / len(rmse)))])
        quality.append([name, *(f"{value:.2f}" for value in (*psnr, sum(psnr) / len(psnr)))])
    return [errors, quality]


def _rmse_over_noise(runs: Sequence[EvaluatedRun]) -> Any:
    figure, (axis,) = axes_of()
    reference = runs[0].evaluation
    for name, values in reference.baseline_rmse.items():
        style = ":" if name == "identity" else "--"
        axis.plot(reference.gamma, values, linestyle=style, color=GRAY, label=baseline_label(runs[0], name))
    plot_runs(axis, runs, [run.evaluation.rmse for run in runs], reference.gamma)
    mark_training(axis, runs[0].settings.noise)
    axis.set(xlabel=f"noise level {level_sign(runs[0])}", ylabel="RMSE (0..255)")
    add_legend(axis)
    return figure


def _early_exit(runs: Sequence[EvaluatedRun]) -> Any:
    reference = runs[0].evaluation
    figure, axes = axes_of(columns=2, width=5.2, together=True)
    for axis, index in zip(axes, (nearest_level(reference), len(reference.gamma) - 1), strict=True):
        plot_runs(axis, runs, [run.evaluation.depth_rmse[index] for run in runs])
        axis.axhline(reference.baseline_rmse["identity"][index], linestyle=":", color=GRAY, label="identity")
        axis.set(title=f"{level_sign(runs[0])} = {reference.gamma[index]:g}", xlabel="layers run")
    set_log_scale(axes[0], "RMSE (0..255)")
    add_legend(axes[0], middle=1.1)
    return figure


def draw_depths(runs: Sequence[EvaluatedRun]) -> Any:
    """Draw a held-out frame at every depth of every run; None where what `keep_frames` kept is missing or broken."""
    try:
        kept = [load_file(run.folder.frames)["shown"] for run in runs]
    except (KeyError, OSError, SafetensorError):
        return None
    clean = kept[0][0]
    layers = max(run.evaluation.layers for run in runs)
    figure, axes = grid(len(runs), layers + 3, 1.6, 2.4)
    part = detail(clean, min(*clean.shape, _PART))
    for row, run, one in zip(axes, runs, kept, strict=True):
        frames = [*one[1:], clean]
        names = ["noisy", *(f"depth {depth}" for depth in range(len(one) - 2)), "clean"]
        for axis, frame, name in zip(row, frames, names, strict=False):
            error = LEVELS * (frame - clean).square().mean().sqrt().item()
            draw_frame(axis, frame[part], f"{name}\n" + f"RMSE {error:.1f}" * (error > 0))
        name = as_drawn(run.name or run.folder.name)
        row[0].annotate(name, (0, 1.36), xycoords="axes fraction", fontsize="large", fontweight="bold")
    return figure


def grid(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of so many axes without ticks, each of this size in inches."""
    size = {"figsize": (width * columns, height * rows), "layout": "constrained"}
    figure, axes = pyplot().subplots(rows, columns, squeeze=False, **size)
    for axis in axes.flat:
        axis.axis("off")
    return figure, axes


def draw_frame(axis: Any, frame: Tensor, words: str) -> None:
    """Draw a gray frame `[h, w]` in [0, 1] below words."""
    axis.imshow(frame.numpy(), cmap="gray", vmin=0, vmax=1)
    axis.set_title(words, fontsize="medium")


def detail(frame: Tensor, side: int) -> tuple[slice, slice]:
    """Return where the square of so many pixels is that has the most contrast."""
    squares = torch.stack([frame, frame.square()])
    mean, square = torch.nn.functional.avg_pool2d(squares, side, max(1, side // 4))
    top, left = divmod(int((square - mean.square()).argmax()), mean.shape[1])
    top, left = top * max(1, side // 4), left * max(1, side // 4)
    return slice(top, top + side), slice(left, left + side)


PICTURES = [
    ("A held-out frame at every depth of the network, at the training noise", draw_depths),
    ("RMSE over the noise level", _rmse_over_noise),
    ("RMSE of an early exit after each depth", _early_exit),
]


@torch.no_grad()
def keep_frames(path: Path, model: Denoiser, data: VideoData, settings: VideoSettings) -> None:
    """Write what a report shows of the test window with the most detail: `shown` `[L+3, h, w]` in [0, 1], of the frame
    in its middle, at the training noise: clean, noisy, after every depth; whole, even if a network trains on crops."""
    number = max(range(len(data.test)), key=lambda index: data.test.batch([index]).float().diff().var().item())
    clean = data.test.whole(number).to(device_of(model), torch.float32) / LEVELS
    deviation = clean.new_full((1,), sum(settings.noise) / 2 * data.sigma)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(_NOISE_SEED)).to(clean)
    noisy = clean + deviation * noise
    shown = torch.cat([clean, noisy, *reconstructed(model, settings, noisy, deviation)])
    with replaced_atomically(path) as temporary:
        # Not by `save_file`, whose files no other user can read.
        temporary.write_bytes(save({"shown": shown[:, clean.shape[1] // 2].float().cpu().contiguous()}))
