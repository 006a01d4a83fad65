"""The tables and pictures of a report on video, and the frames that are kept for it, so that drawing loads no video."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cdt_fast.files import replaced_atomically
from cdt_fast.training.report import GRAY, add_legend, axes_of, mark_training, plot_runs, pyplot, set_log_scale
from cdt_fast.training.task import EvaluatedRun, Table
from cdt_fast.video.data.windows import VideoData
from cdt_fast.video.evaluation import VideoEvaluation
from cdt_fast.video.networks import Denoiser, device_of, reconstructed
from cdt_fast.video.noise import noisy_batches
from cdt_fast.video.quality import dct3d_shifted_denoise, mean_psnr
from cdt_fast.video.settings import VideoSettings

_SHOWN_GAMMA = 0.5  # beside the training's, the noise level of the frames that a report shows


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
    """Return RMSE, and PSNR with SSIM, a noise level and their mean: identity, baselines without weights, the runs."""
    reference = runs[0].evaluation
    levels = [f"{level_sign(runs[0])} {gamma:g}" for gamma in reference.gamma]
    errors = [["RMSE (0..255)", "parameters", *levels, "mean"]]
    quality = [["PSNR in dB / SSIM", *levels, "mean"]]
    rows = [
        (baseline_label(runs[0], name), 0, rmse, reference.baseline_psnr[name], reference.baseline_ssim[name])
        for name, rmse in reference.baseline_rmse.items()
    ]
    measured = [(run.label, run.evaluation) for run in runs]
    rows += [(label, values.parameters, values.rmse, values.psnr, values.ssim) for label, values in measured]
    for name, parameters, rmse, psnr, alike in rows:
        errors.append([name, f"{parameters:,}", *(f"{value:.2f}" for value in (*rmse, sum(rmse) / len(rmse)))])
        pairs = [*zip(psnr, alike, strict=True), (mean_psnr(psnr), sum(alike) / len(alike))]
        quality.append([name, *("" if level is None else f"{level:.2f} / {like:.3f}" for level, like in pairs)])
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


def _frames(runs: Sequence[EvaluatedRun]) -> Any:
    if not all(run.folder.frames.exists() for run in runs):
        return None
    kept = [load_file(run.folder.frames) for run in runs]  # of `keep_frames`
    gammas, frames = kept[0]["gammas"], kept[0]["frames"]
    titles = ["clean", "noisy", baseline_label(runs[0], "dct3d_shifted"), *(run.label for run in runs)]
    size = (2.6 * len(titles), 2.8 * len(gammas))
    figure, axes = pyplot().subplots(len(gammas), len(titles), figsize=size, squeeze=False, layout="constrained")
    for number, (row, gamma) in enumerate(zip(axes, gammas.tolist(), strict=True)):
        shown = [*frames[number, :3], *(others["frames"][number, 3] for others in kept)]
        for axis, title, frame in zip(row, titles, shown, strict=True):
            level = f", {level_sign(runs[0])} = {gamma:g}" if title == "noisy" else ""
            error = 255 * (frame - shown[0]).square().mean().sqrt().item()
            axis.imshow(frame.numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_title(f"{title}{level}" + (f"\nRMSE {error:.1f}" if error else ""), fontsize="small", wrap=True)
            axis.axis("off")
    return figure


PICTURES = [
    ("rmse_over_noise.png", "RMSE over the noise level", _rmse_over_noise),
    ("early_exit.png", "RMSE of an early exit after each depth", _early_exit),
    ("frames.png", "A held-out frame: clean, noisy, by the shifted 3-D DCT and denoised", _frames),
]


@torch.no_grad()
def keep_frames(path: Path, model: Denoiser, data: VideoData, settings: VideoSettings) -> None:
    """Write what a report shows of the test window with the most detail: noise levels, and frames `[levels, 4, h, w]`
    of its middle in [0, 1], clean, noisy, by the DCT and denoised.
    """
    nearest = min(settings.evaluation.gammas, key=lambda gamma: abs(gamma - _SHOWN_GAMMA))
    gammas = sorted({sum(settings.noise) / 2, nearest})
    number = max(range(len(data.test)), key=lambda index: data.test.batch([index]).float().diff().var().item())
    shown = []
    for gamma in gammas:
        batches = noisy_batches(data.test, gamma, data.sigma, device_of(model), batch=1)
        given, clean, deviation = next(islice(batches, number, None))
        transformed = dct3d_shifted_denoise(given, deviation.item(), settings.data.patch)
        denoised = reconstructed(model, settings, given, deviation, only_last=True)[-1]
        shown.append(torch.cat([clean, given, transformed, denoised])[:, data.test.window // 2].float().cpu())
    with replaced_atomically(path) as temporary:
        save_file({"gammas": torch.tensor(gammas, dtype=torch.float64), "frames": torch.stack(shown)}, temporary)
