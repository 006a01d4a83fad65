"""The frames that a report shows: kept by the evaluation, so that drawing them loads no video and runs no model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.files import replaced_atomically
from cdt_fast.video.data import VideoData
from cdt_fast.video.denoising import denoised_frames
from cdt_fast.video.networks import Denoiser, device_of
from cdt_fast.video.noise import noisy_batches
from cdt_fast.video.settings import VideoSettings

_SHOWN_GAMMA = 0.5  # beside the training's, the noise level of the frames that a report shows


@torch.no_grad()
def keep_frames(path: Path, model: Denoiser, data: VideoData, settings: VideoSettings) -> None:
    """Write the middle frame of the first test window at two noise levels, as `read_frames` reads it."""
    nearest = min(settings.evaluation.gammas, key=lambda gamma: abs(gamma - _SHOWN_GAMMA))
    gammas = sorted({settings.typical_noise, nearest})
    middle = data.test.window // 2
    clean, noisy, denoised = torch.empty(0), [], []
    for gamma in gammas:
        given, target, deviation = next(noisy_batches(data.test, gamma, data.sigma, device_of(model), batch=1))
        clean = target[0, middle].cpu()
        noisy.append(given[0, middle].cpu())
        denoised.append(denoised_frames(model, settings, given, deviation)[0, middle].float().cpu())
    tensors = {"clean": clean.contiguous(), "noisy": torch.stack(noisy), "denoised": torch.stack(denoised)}
    with replaced_atomically(path) as temporary:
        save_file({**tensors, "gammas": torch.tensor(gammas, dtype=torch.float64)}, temporary)


def read_frames(path: Path) -> dict[str, Tensor] | None:
    """`gammas` `[levels]`, and frames in [0, 1]: `clean` `[h, w]`, `noisy` and `denoised` `[levels, h, w]`.

    None where there is no file.

    Raises:
        InputError: the file is not whole, or no such file.
    """
    if not path.exists():
        return None
    try:
        frames = load_file(path)
        levels = (len(frames["gammas"]), *frames["clean"].shape)
        if frames["noisy"].shape == frames["denoised"].shape == levels:
            return frames
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"{path}: cannot be read, or is cut short ({error})") from error
    raise InputError(f"{path}: its frames do not fit each other")
