"""What a trained model does on held-out windows: errors over noise and depth, and whether every layer descends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.models import DUST
from cdt_fast.progress import progress_bar
from cdt_fast.training.allocator import disable_malloc_trim
from cdt_fast.training.building import build_constraints, load_data, load_model
from cdt_fast.training.checkpoint import load_checkpoint, run_identity
from cdt_fast.training.config import RunConfig
from cdt_fast.training.per_sample import per_sample_statistics
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.baselines import dct3d_denoise, dct_denoise
from cdt_fast.video.data import VideoData, Windows, add_noise, from_patches, to_patches

LEVELS = 255.0
BASELINES: dict[str, Callable[[Tensor, float, int], Tensor]] = {"dct": dct_denoise, "dct3d": dct3d_denoise}

# Noise of the evaluation: the same for every run, and apart from the noise of any training.
_NOISE_SEED = 20_260_117


def add_noise_by_window(
    clean: Tensor, gamma: float, sigma: float, generator: torch.Generator, seeds: Sequence[int]
) -> Tensor:
    """`add_noise` with a seed a window: the noise of a window does not depend on the windows beside it.

    Args:
        clean: the windows, one after the other along the first dimension: frames, or the tokens of `to_patches`.
        gamma, sigma: as in `add_noise`.
        generator: of the device of `clean`; it is seeded anew for each window.
        seeds: one a window.
    """
    noisy = []
    for window, seed in zip(clean.chunk(len(seeds)), seeds, strict=True):
        generator.manual_seed(seed)
        noisy.append(add_noise(window, gamma, sigma, generator))
    return torch.cat(noisy)


def noisy_batches(
    windows: Windows,
    gamma: float,
    sigma: float,
    device: torch.device,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Tensor, Tensor]]:
    """`(noisy, clean)` frames `[b, T, h, w]` in [0, 1] of all windows; the noise depends on the window alone."""
    generator = torch.Generator(device)
    for start in range(0, len(windows), batch):
        indices = range(start, min(start + batch, len(windows)))
        frames = windows.batch(indices).to(device).to(dtype) / LEVELS
        seeds = [_NOISE_SEED + index for index in indices]
        yield add_noise_by_window(frames, gamma, sigma, generator, seeds), frames


@torch.no_grad()
def mean_depth_losses(model: DUST, windows: Windows, config: RunConfig, sigma: float) -> list[float]:
    """Mean loss of every depth `[L+1]` over all tokens of `windows`, at the training noise."""
    device, dtype = model.dictionary.device, model.dictionary.dtype
    sums = torch.zeros(model.layers + 1, dtype=torch.float64, device=device)
    count = 0
    for noisy, clean in noisy_batches(windows, config.data.gamma, sigma, device, dtype=dtype):
        tokens = _tokens(clean, config)
        sums += model.layer_losses(_tokens(noisy, config), tokens)[1].to(torch.float64) * tokens.shape[:-1].numel()
        count += tokens.shape[:-1].numel()
    return (sums / count).tolist()


@torch.no_grad()
def evaluate(
    model: DUST, data: VideoData, config: RunConfig, constraints: DescentConstraints, progress: bool = True
) -> dict[str, Any]:
    """Measure `model` on the test windows of `data`.

    Args:
        model: the trained model; it is used where it is.
        data: the windows.
        config: the settings of the run.
        constraints: what to judge the losses by.
        progress: show a bar on stderr.

    Returns:
        The content of `evaluation.json`. RMSE and PSNR are on the scale 0..255, over all pixels of a noise level;
        `mean_rmse` is the plain mean over the levels. Losses are sums over the pixels of a patch with values in [0, 1],
        means over the tokens, at the training noise. A sample of `per_sample` is one sequence.
    """
    gammas = config.evaluation.gammas
    depths = model.layers + 1
    rmse = []  # a row a noise level: every depth, the identity, the baselines
    for gamma in progress_bar(gammas, desc="evaluate", unit="noise level", shown=progress):
        errors, pixels = torch.zeros(depths + 1 + len(BASELINES), dtype=torch.float64), 0
        for noisy, clean in noisy_batches(data.test, gamma, data.sigma, model.dictionary.device):
            outputs = [
                from_patches(tokens, *_layout(clean, config))
                for tokens in model.reconstructions(_tokens(noisy, config))
            ]
            outputs.append(noisy)
            outputs.extend(denoise(noisy, gamma * data.sigma, config.data.patch) for denoise in BASELINES.values())
            errors += torch.tensor([_squared_error(output, clean) for output in outputs], dtype=torch.float64)
            pixels += clean.numel()
        rmse.append((LEVELS * (errors / pixels).sqrt()).tolist())
    losses, per_sample = _descent(model, data, config)
    report = constraints.report(losses)
    verdict = report.as_dict()  # without numbers that JSON has no word for
    final = [row[depths - 1] for row in rmse]
    return {
        "task": config.task,
        "model": config.model.model,
        "constrained": config.constraints.constrained,
        "tied": model.tied,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.layers,
        "source": config.data.source,
        "test_windows": [list(data.test.name(index)) for index in range(len(data.test))],
        "training_gamma": config.data.gamma,
        "sigma": data.sigma,
        "gamma": list(gammas),
        "rmse": final,
        "psnr": [_psnr(value) for value in final],
        "mean_rmse": sum(final) / len(final),
        "identity_rmse": [row[depths] for row in rmse],
        "baseline_rmse": {name: [row[depths + 1 + index] for row in rmse] for index, name in enumerate(BASELINES)},
        "depth_rmse": [row[:depths] for row in rmse],
        "layer_loss": losses,
        "layer_ratio": verdict["ratio"],
        "rate": constraints.rates.tolist(),
        "feasible": verdict["feasible"],
        "violation": verdict["violation"],
        "report": {**verdict, "text": str(report)},
        "spectral_ratio": model.spectral_ratio().reshape(-1).tolist(),
        "per_sample": per_sample,
    }


def _descent(model: DUST, data: VideoData, config: RunConfig) -> tuple[list[float], dict[str, Any]]:
    """Mean losses by depth at the training noise, and the ratios ℓ_l / ℓ_{l−1} of every single sequence.

    A depth that is exact (flat patches without noise can be) has no ratio to the next and is left out of the
    statistics; they are None when nothing is left.
    """
    losses = []
    for noisy, clean in noisy_batches(data.test, config.data.gamma, data.sigma, model.dictionary.device):
        target = _tokens(clean, config)
        depths = [
            (tokens - target).square().sum(-1).mean(-1) for tokens in model.reconstructions(_tokens(noisy, config))
        ]
        losses.append(torch.stack(depths).to(torch.float64))
    every = torch.cat(losses, dim=1)
    return every.mean(1).tolist(), per_sample_statistics(every)


def _tokens(frames: Tensor, config: RunConfig) -> Tensor:
    return to_patches(frames, config.data.patch, config.data.sequence)  # type: ignore[arg-type]


def _layout(frames: Tensor, config: RunConfig) -> tuple[Any, ...]:
    return tuple(frames.shape), config.data.patch, config.data.sequence


def _squared_error(frames: Tensor, clean: Tensor) -> float:
    return (frames - clean).square().sum(dtype=torch.float64).item()


def _psnr(rmse: float) -> float | None:
    return 20 * math.log10(LEVELS / rmse) if rmse > 0 else None


def evaluate_run(run: RunFolder, config: RunConfig, progress: bool = True) -> dict[str, Any]:
    """Evaluate the model that a run kept, judged by the constraints as its training left them.

    See `evaluate` for video, `tasks.text_evaluation.evaluate_sequences` for the other tasks.

    Returns:
        The content of `evaluation.json`, with `trained_steps`, how far the training has come, of `steps`.

    Raises:
        InputError: the run's model, data or checkpoint cannot be read.
    """
    disable_malloc_trim()
    if config.task != "video":
        from cdt_fast.sequence.evaluation import evaluate_sequences

        return evaluate_sequences(run, config, progress)
    model = load_model(run, config)
    state = load_checkpoint(run.checkpoint, run=run_identity(config))
    data = load_data(config, progress)
    constraints = build_constraints(config, data, "cpu")
    constraints.load_state_dict(state["constraints"])
    return {
        **evaluate(model, data, config, constraints, progress),
        "trained_steps": state["step"],
        "steps": config.training.steps,
    }
