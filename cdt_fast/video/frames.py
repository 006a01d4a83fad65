"""The frames that a report shows: kept by the evaluation, so that drawing them loads no video and runs no model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.files import replaced_atomically
from cdt_fast.video.data import CropWindows, Windows
from cdt_fast.video.noise import noisy_batches


@dataclass(frozen=True)
class KeptFrames:
    """One frame of the first test window, values in [0, 1], float32.

    Attributes:
        gammas: the noise levels.
        clean: `[h, w]`.
        noisy, denoised: `[levels, h, w]`.
    """

    gammas: list[float]
    clean: Tensor
    noisy: Tensor
    denoised: Tensor

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them as safetensors, atomically."""
        tensors = {"clean": self.clean, "noisy": self.noisy, "denoised": self.denoised}
        tensors["gammas"] = torch.tensor(self.gammas, dtype=torch.float64)
        with replaced_atomically(path) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)


def read_frames(path: Path) -> KeptFrames | None:
    """What `KeptFrames.save` wrote; None where there is nothing.

    Raises:
        InputError: the file is not whole, or no such file.
    """
    if not path.exists():
        return None
    try:
        tensors = load_file(path)
        frames = KeptFrames(tensors["gammas"].tolist(), tensors["clean"], tensors["noisy"], tensors["denoised"])
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"{path}: cannot be read, or is cut short ({error})") from error
    if not frames.noisy.shape == frames.denoised.shape == (len(frames.gammas), *frames.clean.shape):
        raise InputError(f"{path}: its frames do not fit each other")
    return frames


@torch.no_grad()
def keep_frames(
    windows: Windows | CropWindows,
    gammas: Sequence[float],
    sigma: float,
    device: torch.device,
    denoise: Callable[[Tensor, Tensor], Tensor],
) -> KeptFrames:
    """The middle frame of the first window at each noise level, before and after `denoise`."""
    middle = windows.window // 2
    clean, noisy, denoised = torch.empty(0), [], []
    for gamma in gammas:
        given, target, deviation = next(noisy_batches(windows, gamma, sigma, device))
        clean = target[0, middle].cpu()
        noisy.append(given[0, middle].cpu())
        denoised.append(denoise(given, deviation)[0, middle].float().cpu())
    return KeptFrames(list(gammas), clean, torch.stack(noisy), torch.stack(denoised))
