"""The evaluation of a trained denoiser on held-out windows: errors over noise and depth, and descent by sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.files import read_json
from cdt_fast.models import DenoisingDUST
from cdt_fast.progress import progress_bar
from cdt_fast.training.results import Evaluation, per_sample_statistics
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.data.windows import VideoData, Windows
from cdt_fast.video.networks import Denoiser, device_of, reconstructed, tokens_of
from cdt_fast.video.noise import LEVELS, noisy_batches, unit_noise_batches
from cdt_fast.video.quality import BASELINES
from cdt_fast.video.settings import VideoSettings


class VideoEvaluation(Evaluation):
    """The `evaluation.json` of a run on video.

    RMSE is on 0..255, over all pixels of a noise level, `mean_rmse` its plain mean over the levels. Losses are sums
    over the pixels of a patch with values in [0, 1], or in units of the noise's variance for crops, means over the
    tokens, at levels spread over the training's, of which `training_gamma` is the middle. A sample of `per_sample` is
    one sequence, or one window of crops.
    """

    tied: bool
    test_windows: list[tuple[str, int]]
    data_digest: str = ""  # of all clips; "": measured before that was noted
    sigma: float
    rmse: list[float]
    mean_rmse: float
    baseline_rmse: dict[str, list[float]]
    depth_rmse: list[list[float]]

    HEADLINE: ClassVar[str] = "mean RMSE"

    @property
    def headline(self) -> float:
        """Return the figure of the paper's tables."""
        return self.mean_rmse

    @property
    def kind(self) -> str:
        """Return `vit`, or whether the layers share a dictionary."""
        return self.model if self.model == "vit" else "tied" if self.tied else "untied"


def measure(
    model: Denoiser, data: VideoData, settings: VideoSettings, autocast: torch.dtype | None = None
) -> dict[str, Any]:
    """Return the entries of `VideoEvaluation` on the test windows, but for the baselines' and what `training` adds.

    Matrix products are in the dtype `autocast`, where it is given, as those of the training are.
    """
    rmse = _measured(_depths(model, settings, autocast), data.test, data.sigma, settings, device_of(model))
    with torch.autocast(device_of(model).type, autocast, enabled=autocast is not None):
        losses = losses_of_samples(model, data.test, settings, data.sigma)
    final = [depths[-1] for depths in rmse]
    return {
        "tied": getattr(model, "tied", False),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.layers,
        "test_windows": [list(data.test.name(index)) for index in range(len(data.test))],
        "data_digest": data.digest,
        "training_gamma": sum(settings.noise) / 2,
        "sigma": data.sigma,
        "gamma": list(settings.evaluation.gammas),
        "rmse": final,
        "mean_rmse": sum(final) / len(final),
        "depth_rmse": rmse,
        "layer_loss": losses.mean(1).tolist(),
        "per_sample": per_sample_statistics(losses),
    }


def mean_rmse(
    model: Denoiser, windows: Windows, settings: VideoSettings, sigma: float, autocast: torch.dtype | None
) -> float:
    """Return the headline of `VideoEvaluation` on these windows, by the last depth alone; not for crops, where that is
    another estimate, of fewer grids."""
    denoise = _depths(model, settings, autocast, only_last=True)
    rmse = _measured(denoise, windows, sigma, settings, device_of(model), shown=False)
    return sum(depths[-1] for depths in rmse) / len(rmse)


def _depths(
    model: Denoiser, settings: VideoSettings, autocast: torch.dtype | None, only_last: bool = False
) -> Callable[[Tensor, Tensor], list[Tensor]]:
    dtype = next(model.parameters()).dtype

    def denoise(noisy: Tensor, deviation: Tensor) -> list[Tensor]:
        with torch.autocast(noisy.device.type, autocast, enabled=autocast is not None):
            return reconstructed(model, settings, noisy.to(dtype), deviation.to(dtype), only_last=only_last)

    return denoise


def baseline_errors(
    folder: RunFolder, data: VideoData, settings: VideoSettings, device: torch.device
) -> dict[str, list[float]]:
    """Return `baseline_rmse`, as a run in a folder beside this one measured it on the same data, or measured here."""
    windows = [data.test.name(index) for index in range(len(data.test))]
    same = settings.data.model_dump(exclude={"gamma"}), settings.evaluation.gammas, data.sigma, windows, data.digest
    for path in sorted(folder.path.absolute().parent.glob("*/evaluation.json")):
        with suppress(InputError):  # of an older version, or of another task
            there, values = VideoSettings.load(path.with_name("config.toml")), read_json(path, VideoEvaluation)
            found = values.gamma, values.sigma, values.test_windows, values.data_digest
            if same == (there.data.model_dump(exclude={"gamma"}), *found):
                return values.baseline_rmse

    def denoise(noisy: Tensor, deviation: Tensor) -> list[Tensor]:
        return [baseline(noisy, deviation[0].item(), settings.data.patch) for baseline in BASELINES.values()]

    rmse = _measured(denoise, data.test, data.sigma, settings, device)
    return dict(zip(BASELINES, map(list, zip(*rmse, strict=True)), strict=True))


@torch.no_grad()
def _measured(
    denoise: Callable[[Tensor, Tensor], list[Tensor]],
    windows: Windows,
    sigma: float,
    settings: VideoSettings,
    device: torch.device,
    shown: bool = True,
) -> list[list[float]]:
    """Return the RMSE on 0..255 `[levels, outputs]` of what `denoise` makes of noisy frames and their deviation `[b]`;
    all levels have the same noise, up to its strength."""
    gammas = settings.evaluation.gammas
    sums: list[Any] = [0.0] * len(gammas)
    with progress_bar(total=len(windows), desc="evaluate", unit="window", shown=shown) as bar:
        for _, clean, drawn in unit_noise_batches(windows, device):
            for level, gamma in enumerate(gammas):
                deviation = clean.new_full((len(clean),), gamma * sigma)
                outputs = denoise(clean + deviation[:, None, None, None] * drawn, deviation)
                squares = [(output - clean).square().sum(dtype=torch.float64) for output in outputs]
                sums[level] += torch.stack(squares)
            bar.update(len(clean))
    pixels = len(windows) * windows.window * windows.size**2
    return (LEVELS * (torch.stack(sums) / pixels).sqrt()).tolist()


@torch.no_grad()
def losses_of_samples(model: Denoiser, windows: Windows, settings: VideoSettings, sigma: float) -> Tensor:
    """Return the losses `[L+1, samples]` of every single sequence, or every window of crops, at the training noise."""
    device, dtype, losses = device_of(model), next(model.parameters()).dtype, list[Tensor]()
    for noisy, clean, deviation in noisy_batches(windows, settings.noise, sigma, device, dtype):
        if isinstance(model, DenoisingDUST):
            pixels = settings.data.patch_frames * settings.data.patch**2
            depths, unit = reconstructed(model, settings, noisy, deviation), deviation.square()
            squares = [pixels * (frames - clean).square().mean((1, 2, 3)) for frames in depths]
        else:
            given, target = (tokens_of(frames, settings) for frames in (noisy, clean))
            squares = [(tokens - target).square().sum(-1).mean(-1) for tokens in model.reconstructions(given)]
            unit = target.shape[-1] if settings.sequence == "space" else 1  # a vit's are means over a patch's pixels
        losses.append(torch.stack(squares).to(torch.float64) / unit)
    return torch.cat(losses, dim=1)
