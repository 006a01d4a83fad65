"""The networks that denoise video, from the settings or from what a run kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.errors import InputError
from cdt_fast.models import DUST, DenoisingViT, VideoUT, load_pretrained
from cdt_fast.video.noise import LEAST_DEVIATION
from cdt_fast.video.quality import THRESHOLD_FACTOR
from cdt_fast.video.settings import VideoSettings

Denoiser = DUST | DenoisingViT

# A first layer with an orthonormal dictionary, a step of 1 and a hard threshold is the thresholded transform that the
# baselines are, at their threshold. Later layers add a part of the noise again to what was denoised.
FIRST_SPARSITY, INNER_SPARSITY, INNER_STEP = THRESHOLD_FACTOR, 3.5, 0.3
SOFT_SPARSITY = 1.5


def device_of(model: nn.Module) -> torch.device:
    """Where the weights are."""
    return next(model.parameters()).device


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the weights."""
    return next(model.parameters()).dtype


def is_adaptive(model: Denoiser) -> bool:
    """Whether the model takes the noise's standard deviation."""
    return isinstance(model, DUST) and model.noise_adaptive


def known_deviation(model: Denoiser, deviation: Tensor | None, sequences: int) -> dict[str, Tensor]:
    """What the methods of a model take of the noise: nothing, or its deviation for each of `sequences`, from that of
    the windows `[b]`, which have equally many.
    """
    if deviation is None or not is_adaptive(model):
        return {}
    return {"deviation": deviation.clamp(min=LEAST_DEVIATION).repeat_interleave(sequences // len(deviation))}


def build_network(settings: VideoSettings) -> Denoiser:
    """The untrained network that the settings describe, or a pretrained ViT.

    Raises:
        InputError: the settings do not fit each other, or the pretrained ViT cannot be used.
        MissingExtra: transformers is not installed, which a ViT needs.
    """
    model, patch = settings.model, settings.data.patch
    if model.model == "vit":
        return _build_vit(settings)
    pixels = settings.data.patch_frames * patch**2
    common: dict[str, Any] = {
        "patch_size": pixels,
        "patch_frames": settings.data.patch_frames,
        "tight_frame": settings.overlapping or settings.data.patch_frames > 1,
        "noise_adaptive": model.adaptive,
        "code_size": model.code_size or pixels,
        "layers": model.layers,
        "tied": not settings.constrained if model.tied is None else model.tied,
        "step": model.step,
        "scale": model.scale,
        "initial_codes": model.initial_codes,
        "readout": model.readout,
    }
    sparsity, inner = model.sparsity, model.layers - 1
    hard = model.model == "dust" and model.nonlinearity == "hard_threshold"
    # A layer that starts from the mean over grids would see nothing of it with a whole step.
    if model.step is None and (hard or settings.overlapping):
        largest = DUST(**{**common, "layers": 1}).step
        common["step"] = [largest] + [INNER_STEP * largest] * inner
    if model.model == "ut":
        return VideoUT(**common)
    if hard and sparsity is None:
        sparsity = [FIRST_SPARSITY] + [INNER_SPARSITY] * inner
    sparsity = SOFT_SPARSITY if sparsity is None else sparsity
    return DUST(**common, sparsity=sparsity, nonlinearity=model.nonlinearity)


def _build_vit(settings: VideoSettings) -> DenoisingViT:
    model, data = settings.model, settings.data
    if data.sequence != "space":
        raise InputError(f"[data] sequence must be space for a vit, which sees a frame at once; got {data.sequence!r}")
    if data.frames != "resized" or data.patch_frames != 1 or settings.overlapping:
        raise InputError(
            "[data] frames must be resized, patch_frames 1 and overlap 1 for a vit, which sees whole frames of one "
            "size: give --preset paper-vit"
        )
    grid = (data.size // data.patch,) * 2
    if model.pretrained is None:
        return DenoisingViT(data.patch**2, grid, model.layers, width=model.width, heads=model.heads)
    vit = DenoisingViT.from_pretrained(model.pretrained, grid=grid)
    if vit.patch_size != data.patch**2:
        side = int(vit.patch_size**0.5)
        raise InputError(f"[data] patch must be {side}, that of the ViT in {model.pretrained}; got {data.patch}")
    return vit


def load_network(folder: Path, device: str) -> Denoiser:
    """The trained network of a run, on the GPU where there is one and `device` is not "cpu".

    Raises:
        InputError: the run's model cannot be read.
    """
    model = load_pretrained(folder)
    if not isinstance(model, Denoiser):
        raise InputError(f"{folder}: holds a {type(model).__name__}, expected a model for video")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    return model.to("cuda" if use_cuda else "cpu").eval()
