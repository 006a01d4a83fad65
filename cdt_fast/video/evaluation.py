"""What a trained denoiser does on held-out windows: errors over noise and depth, and descent by sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cdt_fast.models import DUST
from cdt_fast.progress import progress_bar
from cdt_fast.training.per_sample import per_sample_statistics
from cdt_fast.training.results import Evaluation
from cdt_fast.video.baselines import dct3d_denoise, dct_denoise
from cdt_fast.video.data import VideoData, Windows, from_patches, to_patches
from cdt_fast.video.networks import Denoiser, device_of, dtype_of
from cdt_fast.video.noise import LEVELS, noisy_batches
from cdt_fast.video.settings import VideoSettings

BASELINES: dict[str, Callable[[Tensor, float, int], Tensor]] = {"dct": dct_denoise, "dct3d": dct3d_denoise}


class VideoEvaluation(Evaluation):
    """The `evaluation.json` of a run on video. RMSE and PSNR are on the scale 0..255, over all pixels of a noise level;
    `mean_rmse` is the plain mean over the levels. Losses are sums over the pixels of a patch with values in [0, 1],
    means over the tokens. A sample of `per_sample` is one sequence.
    """

    tied: bool
    test_windows: list[tuple[str, int]]
    sigma: float
    rmse: list[float]
    psnr: list[float | None]
    mean_rmse: float
    identity_rmse: list[float]
    baseline_rmse: dict[str, list[float]]
    depth_rmse: list[list[float]]
    spectral_ratio: list[float]

    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(("rmse", "psnr", "identity_rmse", "depth_rmse"), len(self.gamma))


@torch.no_grad()
def mean_depth_losses(model: Denoiser, windows: Windows, settings: VideoSettings, sigma: float) -> list[float]:
    """Mean loss of every depth `[L+1]` over all tokens of `windows`, at the training noise."""
    device, dtype = device_of(model), dtype_of(model)
    sums = torch.zeros(model.layers + 1, dtype=torch.float64, device=device)
    count = 0
    for noisy, clean in noisy_batches(windows, settings.data.gamma, sigma, device, dtype=dtype):
        tokens = _tokens(clean, settings)
        sums += model.layer_losses(_tokens(noisy, settings), tokens)[1].to(torch.float64) * tokens.shape[:-1].numel()
        count += tokens.shape[:-1].numel()
    return (sums / count).tolist()


@torch.no_grad()
def evaluate(model: Denoiser, data: VideoData, settings: VideoSettings, progress: bool = True) -> dict[str, Any]:
    """Measure `model` on the test windows of `data`.

    Args:
        model: the trained model; it is used where it is.
        data: the windows.
        settings: those of the run.
        progress: show a bar on stderr.

    Returns:
        The entries of `VideoEvaluation` but for what `training.evaluation` adds.
    """
    gammas, device = settings.evaluation.gammas, device_of(model)
    depths = model.layers + 1
    rmse = []  # a row a noise level: every depth, the identity, the baselines
    for gamma in progress_bar(gammas, desc="evaluate", unit="noise level", shown=progress):
        errors, pixels = torch.zeros(depths + 1 + len(BASELINES), dtype=torch.float64), 0
        for noisy, clean in noisy_batches(data.test, gamma, data.sigma, device):
            outputs = [
                from_patches(tokens, tuple(clean.shape), settings.data.patch, settings.data.sequence)  # pyright: ignore[reportArgumentType]
                for tokens in model.reconstructions(_tokens(noisy, settings))
            ]
            outputs.append(noisy)
            outputs.extend(denoise(noisy, gamma * data.sigma, settings.data.patch) for denoise in BASELINES.values())
            errors += torch.tensor([_squared_error(output, clean) for output in outputs], dtype=torch.float64)
            pixels += clean.numel()
        rmse.append((LEVELS * (errors / pixels).sqrt()).tolist())
    losses, per_sample = _descent(model, data, settings)
    final = [row[depths - 1] for row in rmse]
    return {
        "tied": getattr(model, "tied", False),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.layers,
        "test_windows": [list(data.test.name(index)) for index in range(len(data.test))],
        "training_gamma": settings.data.gamma,
        "sigma": data.sigma,
        "gamma": list(gammas),
        "rmse": final,
        "psnr": [_psnr(value) for value in final],
        "mean_rmse": sum(final) / len(final),
        "identity_rmse": [row[depths] for row in rmse],
        "baseline_rmse": {name: [row[depths + 1 + index] for row in rmse] for index, name in enumerate(BASELINES)},
        "depth_rmse": [row[:depths] for row in rmse],
        "layer_loss": losses,
        "spectral_ratio": model.spectral_ratio().reshape(-1).tolist() if isinstance(model, DUST) else [],
        "per_sample": per_sample,
    }


def _descent(model: Denoiser, data: VideoData, settings: VideoSettings) -> tuple[list[float], dict[str, Any]]:
    """Mean losses by depth at the training noise, and the ratios ℓ_l / ℓ_{l−1} of every single sequence.

    A depth that is exact (flat patches without noise can be) has no ratio to the next and is left out of the
    statistics; they are None when nothing is left.
    """
    losses = []
    for noisy, clean in noisy_batches(data.test, settings.data.gamma, data.sigma, device_of(model)):
        target = _tokens(clean, settings)
        depths = [
            (tokens - target).square().sum(-1).mean(-1) for tokens in model.reconstructions(_tokens(noisy, settings))
        ]
        losses.append(torch.stack(depths).to(torch.float64))
    every = torch.cat(losses, dim=1)
    return every.mean(1).tolist(), per_sample_statistics(every)


def _tokens(frames: Tensor, settings: VideoSettings) -> Tensor:
    return to_patches(frames, settings.data.patch, settings.data.sequence)


def _squared_error(frames: Tensor, clean: Tensor) -> float:
    return (frames - clean).square().sum(dtype=torch.float64).item()


def _psnr(rmse: float) -> float | None:
    return 20 * math.log10(LEVELS / rmse) if rmse > 0 else None
