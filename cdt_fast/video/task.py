"""The task of denoising video: windows of frames as sequences of patches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.files import read_json
from cdt_fast.models import DUST
from cdt_fast.ops.common import explain
from cdt_fast.ops.unrolled_layer import fused_unsupported_reason
from cdt_fast.training.checkpoint import saved_step
from cdt_fast.training.execution import to_device
from cdt_fast.training.factory import build_constraints, check_trained_depths
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import Drawing, EvaluatedRun, Reading, Summary, Table, Task
from cdt_fast.video import figures
from cdt_fast.video.comparison import as_table, compare_denoisers
from cdt_fast.video.data import VideoData, load_video
from cdt_fast.video.denoising import denoise_video
from cdt_fast.video.evaluation import VideoEvaluation, evaluate, mean_depth_losses
from cdt_fast.video.networks import ReconstructionLosses, build_network, device_of, load_network, training_input
from cdt_fast.video.noise import LEVELS, add_noise_by_window
from cdt_fast.video.settings import VideoSettings


class VideoWorkload:
    """See `training.task.Workload`; a sample is a window, and counts with its tokens.

    Args:
        settings: of the run.
        data: the windows.
        device: where the noise is drawn.
    """

    note: str | None = None
    guess_loss: float | None = None

    def __init__(self, settings: VideoSettings, data: VideoData, device: torch.device) -> None:
        self._settings, self._data = settings, data
        self._denoiser = build_network(settings)
        self.model: nn.Module = self._denoiser
        self.num_constraints = self._denoiser.layers
        self.lr: float = settings.training.lr
        self.steps: int = settings.training.steps
        self.training_samples = len(data.train)
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
        clean = training_input(frames.to(next(self.model.parameters()).dtype) / LEVELS, self._settings)
        noisy, deviation = add_noise_by_window(clean, self._settings.noise, self._data.sigma, self._noise, seeds)
        return noisy, clean, deviation

    def validation_losses(self, autocast: torch.dtype | None) -> list[float]:
        with torch.autocast(device_of(self._denoiser).type, autocast, enabled=autocast is not None):
            return mean_depth_losses(self._denoiser, self._data.validation, self._settings, self._data.sigma)

    def data_identity(self) -> dict[str, Any]:
        windows = [len(part) for part in (self._data.train, self._data.validation, self._data.test)]
        return {"windows": windows, "sigma": self._data.sigma}

    def save_model(self, folder: Path) -> None:
        self._denoiser.save_pretrained(folder, overwrite=True)

    def kernels(self, device: torch.device, dtype: torch.dtype) -> str:
        if not isinstance(self._denoiser, DUST):
            return "attention and layers of transformers, in torch"
        backend = explain()
        if device.type != "cuda" or not backend.startswith("triton"):
            return f"ops on {backend if device.type == 'cuda' else 'torch'}"
        reason = fused_unsupported_reason(self._settings.tokens, self._denoiser.patch_size, dtype)
        if reason is None:
            return "each layer in one fused Triton kernel, forward and backward"
        return f"each layer composed of ops, not in one kernel ({reason})"


class VideoTask(Task):
    """See `training.task.Task`."""

    name, samples, subject, sample = "video", "windows", "frames", "sequence"
    evaluation = VideoEvaluation
    fixed_shapes = True

    def check(self, settings: VideoSettings) -> None:
        settings.check()
        check_trained_depths(settings)
        if settings.model.pretrained is None:
            build_constraints(settings, build_network(settings).layers)

    def load(self, settings: VideoSettings, progress: bool = True) -> VideoData:
        settings.check()
        if settings.data.source is None:
            raise InputError("SOURCE is missing: cdt-fast train video SOURCE")
        chosen = {name: getattr(settings.data, name) for name in ("source", "window", "size")}
        return load_video(**chosen, crops=settings.crops, progress=progress)

    def describe(self, settings: VideoSettings, data: VideoData) -> str:
        return data.description

    def build(self, settings: VideoSettings, data: VideoData, device: torch.device) -> VideoWorkload:
        return VideoWorkload(settings, data, device)

    def evaluate(
        self,
        folder: RunFolder,
        settings: VideoSettings,
        data: VideoData,
        constraints: DescentConstraints,
        progress: bool = True,
    ) -> dict[str, Any]:
        model = load_network(folder.model, settings.training.device)
        measured = evaluate(model, data, settings, progress)
        figures.keep_frames(folder.frames, model, data, settings)
        return measured

    def kind(self, run: EvaluatedRun) -> str:
        if run.settings.model.model == "vit":
            return "vit"
        return "tied" if run.evaluation.tied else "untied"

    def comparable(self, run: EvaluatedRun) -> dict[str, Any]:
        # The loss of a depth is a sum over a patch, and the baselines cut patches too.
        shape = {name: getattr(run.settings.data, name) for name in ("frames", "size", "window", "patch")}
        return {**shape, **{name: getattr(run.evaluation, name) for name in ("sigma", "test_windows")}}

    def conditions(self, run: EvaluatedRun) -> str:
        values, settings = run.evaluation, cast("VideoSettings", run.settings)
        unit = "gray levels" if settings.crops else f"γ, times σ = {values.sigma:.4f}"
        losses = " in units of the noise's variance" if settings.crops else " with values in [0, 1]"
        return (
            f"Test windows: {len(values.test_windows)} of {run.settings.data.window} frames, none of them "
            f"seen in training; training noise {settings.shown_noise} ({unit}). RMSE on 0..255 over all pixels of a "
            f"noise level, then the plain mean over the levels. Losses: squared error summed over the pixels of a "
            f"patch{losses}."
        )

    def reading(self, run: EvaluatedRun) -> Reading:
        values = run.evaluation
        index = min(range(len(values.gamma)), key=lambda index: abs(values.gamma[index] - values.training_gamma))
        references = {
            "the input" if name == "identity" else figures.baseline_label(run, name): rmse[index]
            for name, rmse in values.baseline_rmse.items()
        }
        measure = f"RMSE at {figures.level_sign(run)} {values.gamma[index]:g}"
        return Reading(measure, values.depth_rmse[index], references)

    def tables(self, runs: Sequence[EvaluatedRun]) -> list[Table]:
        return figures.tables(runs)

    def summaries(self, runs: Sequence[EvaluatedRun]) -> list[Summary]:
        gammas, sign = runs[0].evaluation.gamma, figures.level_sign(runs[0])
        return [
            Summary("mean RMSE", lambda run: run.evaluation.mean_rmse),
            Summary(f"RMSE, {sign} {gammas[0]:g}", lambda run: run.evaluation.rmse[0]),
            Summary(f"RMSE, {sign} {gammas[-1]:g}", lambda run: run.evaluation.rmse[-1]),
        ]

    def drawings(self) -> list[Drawing]:
        return figures.drawings()

    def beside_others(
        self, folder: RunFolder, settings: VideoSettings, sources: Sequence[str]
    ) -> tuple[Table, list[dict[str, Any]]]:
        found = compare_denoisers(load_network(folder.model, settings.training.device), settings, sources)
        return as_table(found), [each._asdict() for each in found]

    def denoise(
        self, folder: RunFolder, settings: VideoSettings, source: str, target: str | os.PathLike[str], **options: Any
    ) -> dict[str, Any]:
        model, doubts = load_network(folder.model, settings.training.device), _doubts(folder, settings)
        caution = f"{folder.path}: {doubts}" if doubts else ""
        return denoise_video(model, settings, source, target, caution=caution, **options)


def _doubts(folder: RunFolder, settings: VideoSettings) -> str:
    """Say what speaks against the model of a run; nothing where its evaluation calls it a success."""
    evaluation = read_json(folder.evaluation, VideoEvaluation) if folder.evaluation.exists() else None
    evaluated, steps = 0 if evaluation is None else evaluation.trained_steps, settings.training.steps
    step, words = max(saved_step(folder.checkpoint), evaluated), []  # a copied run may lack its checkpoint
    if step < steps:
        words.append(f"is not finished (step {step:,} of {steps:,})")
    if evaluation is None:
        words.append("was never evaluated")
    elif step > evaluated:
        words.append(f"was trained further since its evaluation (after step {evaluated:,})")
    elif evaluation.success is False:
        words.append(f"is no success: {evaluation.verdict.removeprefix('No success: ').partition('. ')[0]}")
    return " and ".join(words)
