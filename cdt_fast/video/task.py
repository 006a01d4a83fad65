"""The task of denoising video: windows of frames as sequences of patches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.training.building import build_model, steps_per_epoch
from cdt_fast.training.config import RunConfig
from cdt_fast.training.step import ReconstructionLosses
from cdt_fast.video.data import VideoData, to_patches
from cdt_fast.video.evaluation import LEVELS, add_noise_by_window, mean_depth_losses


class VideoTask:
    """See `Task`; a sample is a window, and counts with its tokens.

    Args:
        config: the settings.
        data: the windows.
        device: where the noise is drawn.
    """

    samples, subject = "windows", "frames"

    def __init__(self, config: RunConfig, data: VideoData, device: torch.device) -> None:
        self.config, self.data = config, data
        self._denoiser = build_model(config)
        self.model: nn.Module = self._denoiser
        self.layers = self._denoiser.layers
        self.note: str | None = None
        self.lr: float = config.training.lr
        self.steps: int = config.training.steps
        self.steps_per_epoch = steps_per_epoch(config, data)
        self.training_samples = len(data.train)
        self._tokens = config.data.window * (config.data.size // config.data.patch) ** 2
        self._noise = torch.Generator(device)  # seeded anew for every window

    def losses(self) -> nn.Module:
        return ReconstructionLosses(self._denoiser, self.config.training.precision)

    def count(self, sample: int) -> int:
        return self._tokens

    def batch(self, chosen: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
        """Noisy and clean tokens of windows with their seeds, in the dtype of the model."""
        data = self.config.data
        windows, seeds = zip(*chosen, strict=True)
        frames = self.data.train.batch(windows)
        if device.type == "cuda":
            # From other memory the host would wait for the copy.
            frames = frames.pin_memory().to(device, non_blocking=True)
        frames = frames.to(device).to(self._denoiser.dictionary.dtype) / LEVELS
        clean = to_patches(frames, data.patch, data.sequence)
        return add_noise_by_window(clean, data.gamma, self.data.sigma, self._noise, seeds), clean

    def validation_losses(self) -> list[float]:
        return mean_depth_losses(self._denoiser, self.data.validation, self.config, self.data.sigma)

    def data_identity(self) -> dict[str, Any]:
        windows = [len(part) for part in (self.data.train, self.data.validation, self.data.test)]
        return {"windows": windows, "sigma": self.data.sigma}

    def save_model(self, folder: Path) -> None:
        self._denoiser.save_pretrained(folder)
