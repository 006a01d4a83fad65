"""The evaluation of a trained denoiser on held-out windows: errors over noise and depth, and descent by sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.progress import progress_bar
from cdt_fast.training.results import Evaluation, per_sample_statistics
from cdt_fast.video.data.windows import VideoData, Windows
from cdt_fast.video.networks import (
    Denoiser,
    ReconstructionLosses,
    device_of,
    known_deviation,
    reconstructed,
    training_input,
)
from cdt_fast.video.noise import LEVELS, noisy_batches
from cdt_fast.video.quality import BASELINES, psnr_of, ssim
from cdt_fast.video.settings import VideoSettings


class VideoEvaluation(Evaluation):
    """The `evaluation.json` of a run on video.

    RMSE and PSNR are on 0..255, over all pixels of a noise level; `mean_rmse` is the plain mean over the levels, and
    SSIM the mean over frames. Losses are sums over the pixels of a patch with values in [0, 1], or in units of the
    noise's variance where the model is noise-adaptive, means over the tokens, at levels spread over the training's. A
    sample of `per_sample` is one sequence, or one window of crops. `training_gamma` is the middle of the levels that
    were trained on.
    """

    tied: bool
    test_windows: list[tuple[str, int]]
    sigma: float
    rmse: list[float]
    psnr: list[float | None]
    ssim: list[float]
    mean_rmse: float
    baseline_rmse: dict[str, list[float]]
    baseline_psnr: dict[str, list[float | None]]
    baseline_ssim: dict[str, list[float]]
    depth_rmse: list[list[float]]

    @property
    def kind(self) -> str:
        """Return `vit`, or whether the layers share a dictionary."""
        return self.model if self.model == "vit" else "tied" if self.tied else "untied"


@torch.no_grad()
def mean_depth_losses(model: Denoiser, windows: Windows, settings: VideoSettings, sigma: float) -> list[float]:
    """Return the mean loss of every depth `[L+1]` over all of `windows`, at the training noise."""
    device, dtype = device_of(model), next(model.parameters()).dtype
    sums = torch.zeros(model.layers + 1, dtype=torch.float64, device=device)
    losses = ReconstructionLosses(model, None, settings)
    for noisy, clean, deviation in noisy_batches(windows, settings.noise, sigma, device, dtype):
        given, target = (training_input(frames, settings) for frames in (noisy, clean))
        sums += losses(given, target, deviation, None)[1].to(torch.float64) * len(clean)
    return (sums / len(windows)).tolist()


@torch.no_grad()
def measure(model: Denoiser, data: VideoData, settings: VideoSettings) -> dict[str, Any]:
    """Return the entries of `VideoEvaluation` but for what `training` adds, on the test windows."""
    gammas, device, depths = settings.evaluation.gammas, device_of(model), model.layers + 1
    rmse, alike = [], []  # a row a noise level: every depth (of SSIM only the last), then the baselines
    for gamma in progress_bar(gammas, desc="evaluate", unit="noise level"):
        errors: Any = 0.0
        similar: Any = 0.0
        pixels = frames = 0
        for noisy, clean, deviation in noisy_batches(data.test, gamma, data.sigma, device):
            outputs = reconstructed(model, settings, noisy, deviation)
            outputs += [denoise(noisy, gamma * data.sigma, settings.data.patch) for denoise in BASELINES.values()]
            errors += torch.stack([(output - clean).square().sum(dtype=torch.float64) for output in outputs]).cpu()
            similar += torch.stack([ssim(output, clean).sum() for output in outputs[depths - 1 :]]).double().cpu()
            pixels, frames = pixels + clean.numel(), frames + clean.shape[:2].numel()
        rmse.append((LEVELS * (errors / pixels).sqrt()).tolist())
        alike.append((similar / frames).tolist())
    losses = _losses_of_samples(model, data, settings)
    final, *others = map(list, list(zip(*rmse, strict=True))[depths - 1 :])
    likeness, *others_alike = map(list, zip(*alike, strict=True))
    return {
        "tied": getattr(model, "tied", False),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.layers,
        "test_windows": [list(data.test.name(index)) for index in range(len(data.test))],
        "training_gamma": sum(settings.noise) / 2,
        "sigma": data.sigma,
        "gamma": list(gammas),
        "rmse": final,
        "psnr": [psnr_of(value) for value in final],
        "ssim": likeness,
        "mean_rmse": sum(final) / len(final),
        "baseline_rmse": dict(zip(BASELINES, others, strict=True)),
        "baseline_psnr": {name: list(map(psnr_of, values)) for name, values in zip(BASELINES, others, strict=True)},
        "baseline_ssim": dict(zip(BASELINES, others_alike, strict=True)),
        "depth_rmse": [row[:depths] for row in rmse],
        "layer_loss": losses.mean(1).tolist(),
        "per_sample": per_sample_statistics(losses),
    }


def _losses_of_samples(model: Denoiser, data: VideoData, settings: VideoSettings) -> Tensor:
    """Return the losses `[L+1, samples]` of every single sequence, or every window of crops, at the training noise."""
    losses: list[Tensor] = []
    for noisy, clean, deviation in noisy_batches(data.test, settings.noise, data.sigma, device_of(model)):
        given, target = (training_input(frames, settings) for frames in (noisy, clean))
        known = known_deviation(model, deviation, len(given))
        if settings.crops:
            pixels = settings.data.patch_frames * settings.data.patch**2
            depths = reconstructed(model, settings, noisy, deviation)
            squares = [pixels * (frames - clean).square().mean((1, 2, 3)) for frames in depths]
        else:
            squares = [(tokens - target).square().sum(-1).mean(-1) for tokens in model.reconstructions(given, **known)]
        unit = known["deviation"].square() if known else 1.0
        if settings.sequence == "space":
            unit = target.shape[-1]  # a vit's losses are means over the pixels of a patch
        losses.append(torch.stack(squares).to(torch.float64) / unit)
    return torch.cat(losses, dim=1)
