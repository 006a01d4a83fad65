"""The denoiser of `train video`: what it is before training, and losses of the mean over shifted grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cdt_fast.models import DUST
from cdt_fast.models.dictionary import cosine_volumes
from cdt_fast.training.factory import build_constraints
from cdt_fast.video.denoising import denoised_frames
from cdt_fast.video.losses import ReconstructionLosses
from cdt_fast.video.networks import build_network
from cdt_fast.video.overlap import tokens_of
from cdt_fast.video.settings import VideoSettings


def denoiser(**changes: Any) -> VideoSettings:
    settings = VideoSettings()
    for section, values in {"data": {"size": 16, "window": 8}, "model": {"code_size": 256}}.items():
        settings.update(section, values)
    for name, value in changes.items():
        settings.set("data" if name in ("overlap", "setup") else "model", name, value)
    return settings


def network_of(settings: VideoSettings) -> DUST:
    network = build_network(settings)
    assert isinstance(network, DUST)
    return network


def windows(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noisy and clean frames `[2, 8, 16, 16]`, and the deviations of their noise."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.rand(2, 8, 16, 16, generator=generator)
    deviation = torch.tensor([0.05, 0.2])
    return clean + deviation.view(2, 1, 1, 1) * torch.randn(clean.shape, generator=generator), clean, deviation


def test_before_training_the_first_layer_is_the_thresholded_transform() -> None:
    settings = denoiser()
    network = network_of(settings).double()
    noisy, _, _ = windows(0)
    tokens = tokens_of(noisy[:1].double(), settings)
    mean = tokens.mean((-2, -1), keepdim=True)
    transform = cosine_volumes(256, 256, 4)
    coefficients = (tokens - mean) @ transform
    kept = torch.where(coefficients.abs() > 2.7 * 0.05, coefficients, 0.0)
    expected = kept @ transform.T + mean
    assert 0 < (kept == 0).double().mean() < 1
    torch.testing.assert_close(network(tokens, depth=1, deviation=0.05), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", [1, 5])
def test_step_and_threshold_fit_any_number_of_layers(layers: int) -> None:
    network = network_of(denoiser(layers=layers))
    assert network.steps == pytest.approx((1.0, *[0.6] * (layers - 1)), rel=1e-6)
    assert network.thresholds == pytest.approx((2.7, *[2.4] * (layers - 1)), rel=1e-6)


def test_depth_0_is_no_exit_of_the_denoiser() -> None:
    constraints = build_constraints(denoiser(), None, "cpu", 3)
    assert constraints.weights().tolist() == [0, 1, 1, 1]
    assert denoiser(setup="paper").coefficients is None


def test_the_losses_of_one_grid_are_those_of_its_patches() -> None:
    settings = denoiser(overlap=1)
    network = network_of(settings)
    noisy, clean, deviation = windows(1)
    of_frames = ReconstructionLosses(network, None, settings)(noisy, clean, deviation, None)[1]
    of_tokens = ReconstructionLosses(network, None)(
        tokens_of(noisy, settings), tokens_of(clean, settings), deviation, None
    )[1]
    torch.testing.assert_close(of_frames, of_tokens, rtol=1e-4, atol=0)


def test_the_losses_of_overlapping_grids_are_those_of_what_is_denoised() -> None:
    settings = denoiser(overlap=2)
    network = network_of(settings)
    noisy, clean, deviation = windows(2)
    total, found = ReconstructionLosses(network, None, settings)(noisy, clean, deviation, (0.0, 1.0, 0.0, 2.0))
    for depth in range(4):
        frames = denoised_frames(network, settings, noisy, deviation, depth=depth, grids=2)
        error = ((frames - clean) / deviation.view(2, 1, 1, 1)).square().mean()
        assert found[depth].item() == pytest.approx(256 * error.item(), rel=1e-4)
    assert total.item() == pytest.approx(found[1].item() + 2 * found[3].item(), rel=1e-5)
    total.backward()
    assert network.dictionary.grad is not None
    assert network.dictionary.grad[2].norm() > 0
