"""From the settings of a run to its data, its network and its constraints."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.errors import InputError, require
from cdt_fast.models import DUST, VideoUT, load_pretrained
from cdt_fast.training.config import RunConfig
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.data import load_video


def load_data(config: RunConfig, progress: bool = True) -> Any:
    """What the settings describe to train on and to measure with: `VideoData`, `Corpus` of texts or of instructions.

    Raises:
        InputError: the settings do not fit each other, or the source cannot be read or holds too little.
    """
    if config.task != "video":
        from cdt_fast.sequence.corpus import load_corpus

        return load_corpus(config)
    data = config.data
    _check_patches(config)
    return load_video(data.source, window=data.window, size=data.size, stride=data.stride, progress=progress)


def describe_data(config: RunConfig, data: Any) -> str:
    """What `load_data` found, in a line or two."""
    if config.task == "video":
        return data.describe()
    from cdt_fast.sequence.corpus import describe

    return describe(data, config.data.source)


def check_settings(config: RunConfig) -> None:
    """Find settings that do not fit each other before any data are read.

    Raises:
        InputError: they do not fit each other.
        MissingExtra: they ask for a package that is not installed.
    """
    if config.task == "video":
        _check_patches(config)
        build_model(config)
        _constraints(config, 0, "cpu", config.model.layers)
    else:
        _check_sequence_settings(config)
    if config.training.tensorboard:
        require("tensorboard", "tensorboard", "--tensorboard")


def _check_sequence_settings(config: RunConfig) -> None:
    if config.data.source is None:
        raise InputError(f"SOURCE is missing: cdt-fast train {config.task} SOURCE")
    gammas = config.evaluation.gammas
    if any(first >= second for first, second in pairwise(gammas)):
        raise InputError(f"[evaluation] gammas must be ascending noise levels, got {gammas}")
    if not 0 < config.data.perturbation_rate <= 1:
        raise InputError(f"[data] perturbation_rate must be in (0, 1], got {config.data.perturbation_rate}")


def _check_patches(config: RunConfig) -> None:
    if config.data.size % config.data.patch:
        raise InputError(f"[data] size must be a multiple of patch ({config.data.patch}), got {config.data.size}")


def build_model(config: RunConfig) -> DUST:
    """The untrained network that the settings describe."""
    settings = config.model
    common: dict[str, Any] = {
        "patch_size": config.data.patch**2,
        "code_size": settings.code_size,
        "layers": settings.layers,
        "tied": not config.constraints.constrained if settings.tied is None else settings.tied,
        "step": settings.step,
        "scale": settings.scale,
        "initial_codes": settings.initial_codes,
        "readout": settings.readout,
    }
    return VideoUT(**common) if settings.model == "ut" else DUST(**common, sparsity=settings.sparsity)


def load_model(run: RunFolder, config: RunConfig) -> DUST:
    """The trained network of a run, on the GPU where there is one and the settings do not say "cpu".

    Raises:
        InputError: the run's model cannot be read.
    """
    model = load_pretrained(run.model)
    if not isinstance(model, DUST):
        raise InputError(f"{run.model}: holds a {type(model).__name__}, expected a model for video")
    use_cuda = config.training.device != "cpu" and torch.cuda.is_available()
    return model.to("cuda" if use_cuda else "cpu").eval()


def samples_per_step(config: RunConfig) -> int:
    """Samples (windows, texts, sequences) that one optimizer step sees."""
    return config.training.batch * config.training.accumulate


def steps_per_epoch(config: RunConfig, data: Any) -> int:
    """Optimizer steps that see every training sample once; the last may see fewer than the others."""
    return math.ceil(len(data.train) / samples_per_step(config))


def build_constraints(
    config: RunConfig, data: Any, device: torch.device | str, layers: int | None = None
) -> DescentConstraints:
    """The constraints that the settings describe, on `device`, nothing recorded yet.

    Args:
        config: the settings.
        data: what the run trains on: it says how long an epoch is.
        device: where the multipliers are.
        layers: L; None: that of the settings.

    Raises:
        InputError: the settings do not fit each other or the number of layers.
    """
    warmup_steps = config.constraints.warmup_epochs * steps_per_epoch(config, data)
    return _constraints(config, warmup_steps, device, config.model.layers if layers is None else layers)


def _constraints(config: RunConfig, warmup_steps: int, device: torch.device | str, layers: int) -> DescentConstraints:
    settings: Any = config.constraints
    return DescentConstraints(
        layers,
        settings.rate,
        settings.reference,
        reference_mode=settings.reference_mode,
        coupling=settings.coupling,
        normalize=settings.normalize,
        margin=settings.margin,
        dual=settings.dual,
        dual_lr=settings.dual_lr,
        betas=tuple(settings.betas),
        proportional_gain=settings.proportional_gain,
        smoothing=settings.smoothing,
        resilience=None if settings.resilience == "none" else settings.resilience,
        slack_cost=settings.slack_cost,
        slack_lr=settings.slack_lr,
        dual_every=settings.dual_every,
        warmup_steps=warmup_steps,
        device=device,
    )
