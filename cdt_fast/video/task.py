"""The task of denoising video: windows of frames as sequences of patches; see `training.task.Task`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.files import read_json
from cdt_fast.models import DenoisingViT
from cdt_fast.ops.common import explain
from cdt_fast.ops.unrolled_layer import unfused_reason
from cdt_fast.training.checkpoint import saved_step
from cdt_fast.training.execution import precision_of, to_device
from cdt_fast.training.optimizer import build_constraints
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun, Report
from cdt_fast.video import evaluation, figures
from cdt_fast.video.data.windows import VideoData, load_video
from cdt_fast.video.networks import (
    ReconstructionLosses,
    build_network,
    device_of,
    load_network,
    shipped_network,
    tokens_of,
)
from cdt_fast.video.noise import LEVELS, add_noise_by_window
from cdt_fast.video.settings import VideoSettings

Evaluation = evaluation.VideoEvaluation
SAMPLES = "windows"
BF16_ON_CPU = FIXED_SHAPES = True


def load(settings: VideoSettings, progress: bool = True) -> VideoData:
    settings.check()
    chosen = settings.constraints
    referred = chosen.reference_mode == "constraint" and chosen.reference is not None
    for name, holds in (("reference_mode constraint", referred), ("bounds", 0 in (chosen.bounds or {}))):
        if settings.constrained and settings.crops and holds:
            reason = "which is the noisy input where grids overlap: nothing trains there"
            raise InputError(f"[constraints] {name} must not be of depth 0, {reason}")
    if settings.model.pretrained is None:
        build_constraints(settings, build_network(settings).layers)  # refuses what does not fit the network
    data = settings.data
    if data.source is None:
        raise InputError("SOURCE is missing: cdt-fast train video SOURCE")
    return load_video(data.source, window=data.window, size=data.size, crops=settings.crops, progress=progress)


class VideoWorkload:
    """A sample is a window, and counts with its tokens; `device` is where the noise is drawn."""

    guess_loss: float | None = None

    def __init__(self, settings: VideoSettings, data: VideoData, device: torch.device) -> None:
        self._settings, self._data = settings, data
        self._denoiser = build_network(settings)
        self.model: nn.Module = self._denoiser
        self.num_constraints = self._denoiser.layers
        self.steps: int = settings.training.steps
        self.training_samples = len(data.train)
        new, chosen = settings.crops and shipped_network(settings) is None, settings.training.lr
        self.lr: float = (1e-2 if new else 1e-3) if chosen is None else chosen
        start = f"\nstarts from {'cosines' if new else 'the network of the package'}"
        self.description = data.description + start * settings.crops
        self._noise = torch.Generator(device)  # seeded anew for every window

    def losses(self, autocast: torch.dtype | None) -> nn.Module:
        return ReconstructionLosses(self._denoiser, autocast, self._settings)

    def count(self, sample: int) -> int:
        data = self._settings.data
        return data.window // data.patch_frames * (data.size // data.patch) ** 2

    def batch(self, chosen: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, ...]:
        """Return noisy and clean tokens of windows (frames for crops), and each window's noise."""
        windows, seeds = zip(*chosen, strict=True)
        frames = to_device(self._data.train.augmented(windows, seeds), device)
        frames = frames.to(next(self.model.parameters()).dtype) / LEVELS
        clean = frames if self._settings.crops else tokens_of(frames, self._settings)
        noisy, deviation = add_noise_by_window(clean, self._settings.noise, self._data.sigma, self._noise, seeds)
        return noisy, clean, deviation

    def validation_losses(self, autocast: torch.dtype | None) -> list[float]:
        with torch.autocast(device_of(self._denoiser).type, autocast, enabled=autocast is not None):
            data = self._data
            losses = evaluation.losses_of_samples(self._denoiser, data.validation, self._settings, data.sigma)
            return losses.mean(1).tolist()

    def validation_error(self, autocast: torch.dtype | None) -> float | None:
        if self._settings.crops:  # trained on all levels
            return None
        data = self._data
        return evaluation.mean_rmse(self._denoiser, data.validation, self._settings, data.sigma, autocast)

    def save_model(self, folder: Path) -> None:
        self._denoiser.save_pretrained(folder, overwrite=True)

    def kernels(self, device: torch.device, dtype: torch.dtype) -> str:
        if isinstance(self._denoiser, DenoisingViT):
            return "attention and layers of transformers, in torch"
        backend = explain()
        if device.type != "cuda" or not backend.startswith("triton"):
            return f"ops on {backend if device.type == 'cuda' else 'torch'}"
        widths = self._denoiser.patch_size, self._denoiser.code_size, self._denoiser.patch_size
        tokens = self._settings.data.window // self._settings.data.patch_frames
        reason = unfused_reason(tokens, widths, dtype, device)
        if reason is None:
            return "each layer in one fused Triton kernel, forward and backward"
        return f"each layer composed of ops, not in one kernel ({reason})"


build = VideoWorkload


def evaluate(folder: RunFolder, settings: VideoSettings, data: VideoData) -> dict[str, Any]:
    model = load_network(folder.model, settings.training.device)
    # Crops in float32: their errors at little noise are smaller than what rounding to bfloat16 adds.
    narrow = not settings.crops and precision_of(settings, device_of(model), BF16_ON_CPU) == "bf16"
    measured = evaluation.measure(model, data, settings, torch.bfloat16 if narrow else None)
    measured["baseline_rmse"] = evaluation.baseline_errors(folder, data, settings, device_of(model))
    figures.keep_frames(folder.in_place().frames, model, data, settings)
    return measured


def report(runs: Sequence[EvaluatedRun]) -> Report:
    values, settings = runs[0].evaluation, cast("VideoSettings", runs[0].settings)
    index = figures.nearest_level(values)
    names = {"identity": "the input", "dct3d_shifted": "3-D DCT"}
    references = {names[name]: rmse[index] for name, rmse in values.baseline_rmse.items()}
    unit = "gray levels" if settings.crops else f"γ, times σ = {values.sigma:.4f}"
    losses = " in units of the noise's variance" if settings.crops else " with values in [0, 1]"
    return Report(
        conditions=f"Test windows: {len(values.test_windows)} of {settings.data.window} frames, none of them seen in "
        f"training; training noise {settings.shown_noise} ({unit}). RMSE on 0..255 over all pixels of a noise level, "
        f"then the plain mean over the levels. Losses: squared error summed over the pixels of a patch{losses}.",
        # The loss of a depth is a sum over a patch, and the baselines cut patches too.
        must_agree={
            **{name: getattr(settings.data, name) for name in ("frames", "size", "window", "patch")},
            **{name: getattr(values, name) for name in ("sigma", "test_windows", "data_digest")},
        },
        measure=f"RMSE at {figures.level_sign(runs[0])} {values.gamma[index]:g}",
        depths=values.depth_rmse[index],
        references=references,
        tables=figures.tables(runs),
        pictures=figures.PICTURES,
    )


def doubts(folder: RunFolder, settings: VideoSettings) -> str:
    """Say what speaks against the model of a run; nothing where its evaluation calls it a success."""
    values = None
    with suppress(InputError):  # there is none, or one of an earlier version
        values = read_json(folder.evaluation, Evaluation)
    evaluated, steps = 0 if values is None else values.trained_steps, settings.training.steps
    step, words = max(saved_step(folder.checkpoint), evaluated), []  # a copied run may lack its checkpoint
    if step < steps:
        words.append(f"is not finished (step {step:,} of {steps:,})")
    if values is None:
        words.append("was never evaluated")
    elif step > evaluated:
        words.append(f"was trained further since its evaluation (after step {evaluated:,})")
    elif values.success is False:
        words.append(f"is {values.verdict}")
    return " and ".join(words)
