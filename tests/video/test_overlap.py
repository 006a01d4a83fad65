"""The denoiser of `train video`: what it is before training, and losses of the mean over shifted grids."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.models import DUST
from cdt_fast.models.dictionary import tight_cosines
from cdt_fast.training.optimizer import build_constraints
from cdt_fast.video import networks
from cdt_fast.video.data import from_patches, to_patches
from cdt_fast.video.networks import ReconstructionLosses, build_network, reconstructed, tokens_of
from cdt_fast.video.quality import continued
from cdt_fast.video.settings import VideoSettings
from cdt_fast.video.task import load


def denoised_frames(
    model: Any, settings: VideoSettings, frames: Any, deviation: Any = None, **how: Any
) -> torch.Tensor:
    grids = how.pop("grids", 1)
    return reconstructed(model, settings, frames, deviation, grids, only_last=True, **how)[-1]


def denoiser(**changes: Any) -> VideoSettings:
    settings = VideoSettings.chosen({"data": {"size": 16, "patch_frames": 4}, "model": {"code_size": 256}})
    for name, value in changes.items():
        settings.set("data" if name == "frames" else "model", name, value)
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
    transform = tight_cosines(256, 256, 4)
    coefficients = (tokens - mean) @ transform
    kept = torch.where(coefficients.abs() > 2.7 * 0.05, coefficients, 0.0)
    expected = kept @ transform.T + mean
    assert 0 < (kept == 0).double().mean() < 1
    torch.testing.assert_close(network(tokens, depth=1, deviation=0.05), expected, rtol=1e-5, atol=1e-6)


def test_layers_that_start_from_a_mean_take_a_part_of_a_step() -> None:
    for layers in (1, 5):
        network = network_of(denoiser(layers=layers))
        assert network.steps == pytest.approx((1.0, *[0.3] * (layers - 1)), rel=1e-6)
        assert network.thresholds == pytest.approx((2.7, *[1.05] * (layers - 1)), rel=1e-6)
    soft = denoiser(nonlinearity="soft_threshold")
    assert network_of(soft).steps == pytest.approx((1.0, 0.3, 0.3), rel=1e-6)
    soft.data.frames = "resized"
    assert len(set(network_of(soft).steps)) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        *({"code_size": atoms} for atoms in (64, 2048)),
        *({"patch": side} for side in (1, 16)),
        {"patch_frames": 1, "code_size": 256, "patch": 16},
        {"window": 16},
    ],
)
def test_any_size_of_patch_and_code_removes_noise_before_training(sizes: dict[str, int]) -> None:
    settings = VideoSettings()
    for name, value in sizes.items():
        settings.set("model" if name == "code_size" else "data", name, value)
    network = network_of(settings)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    clean = (0.5 + 0.3 * torch.sin(rows / 3 + columns / 7)).expand(1, settings.data.window, 32, 32)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    for level in (5 / 255, 30 / 255):
        noisy = clean + level * noise
        depths = reconstructed(network, settings, noisy, torch.tensor([level]), 2)
        errors = [(depth - clean).square().mean().sqrt().item() for depth in depths]
        assert max(errors[1:]) < 0.7 * errors[0]
        assert sizes or all(after < before for before, after in pairwise(errors)), errors


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("model", "model", "ut", "model must be dust for .* crops, got ut.*--preset paper-ut"),
        ("model", "code_size", 600, "the nearest are 576 and 640; got 600"),
    ],
)
def test_a_network_that_cannot_work_on_crops_is_refused(section: str, name: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load(VideoSettings.chosen({section: {name: value}}))


def test_depth_0_is_no_exit_of_the_denoiser() -> None:
    constraints = build_constraints(denoiser(), 3)
    assert constraints.weights().tolist() == [0, 1, 1, 1]
    plain = denoiser()
    plain.update("constraints", {"constrained": False, "objective": "depths"})
    assert plain.coefficients == [0, 1, 1, 1]


def test_every_layer_starts_from_the_mean_over_grids() -> None:
    settings, resized = denoiser(), denoiser(frames="resized")  # trained on one grid, each goes through on its own
    network = network_of(settings)
    noisy, _, deviation = windows(3)
    expected, apart = noisy, torch.zeros_like(noisy)
    for level in (1, 2):
        total = torch.zeros_like(noisy)
        for top, left in ((0, 0), (0, 4), (4, 0), (4, 4)):
            sides = (left, -(left + 16) % 8, top, -(top + 16) % 8)
            moved, given = (continued(frames, sides) for frames in (noisy, expected))
            tokens, estimate = (to_patches(frames, 8, "time", 4) for frames in (moved, given))
            of_each = deviation.repeat_interleave(len(tokens) // 2)
            found = network.refinement(tokens, deviation=of_each)(level, estimate)
            total += from_patches(found, tuple(moved.shape), 8, "time", 4)[..., top : top + 16, left : left + 16]
            of_grid = denoised_frames(network, resized, moved, deviation, depth=2)  # in both rounds
            apart += of_grid[..., top : top + 16, left : left + 16] / 8
        expected = total / 4
    depths = reconstructed(network, settings, noisy, deviation, 2, depth=2)
    assert len(depths) == 3
    torch.testing.assert_close(depths[2], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(depths[0], noisy)
    alone = denoised_frames(network, resized, noisy, deviation, depth=2, grids=2)
    torch.testing.assert_close(alone, apart, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(alone, expected, atol=1e-3)


def test_grids_that_go_through_together_give_what_they_give_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = denoiser(scale=1e-4)  # every token attends to all of its sequence
    network = network_of(settings)
    noisy, _, deviation = windows(4)
    noisy = noisy[..., :13]  # neither side alike, nor filled by patches
    found = []
    for at_once in (networks._PIXELS_AT_ONCE, 3 * noisy.numel(), 1):
        monkeypatch.setattr(networks, "_PIXELS_AT_ONCE", at_once)
        depths = reconstructed(network, settings, noisy, deviation, None)
        assert all(depth.shape == noisy.shape for depth in depths)
        (gradient,) = torch.autograd.grad(torch.stack(depths).square().sum(), network.dictionary)
        found.append([*depths, gradient / gradient.abs().max()])
    *together, one_by_one = found
    for some in together:
        for mixed, alone in zip(some, one_by_one, strict=True):
            torch.testing.assert_close(mixed, alone, rtol=1e-5, atol=1e-6)


def test_the_losses_of_overlapping_grids_are_those_of_what_is_denoised() -> None:
    settings = denoiser()
    network = network_of(settings)
    noisy, clean, deviation = windows(2)
    total, found = ReconstructionLosses(network, None, settings)(noisy, clean, deviation, (0.0, 1.0, 0.0, 2.0))
    for depth in range(4):
        frames = denoised_frames(network, settings, noisy, deviation, depth=depth, grids=None)
        error = ((frames - clean) / deviation.view(2, 1, 1, 1)).square().mean()
        assert found[depth].item() == pytest.approx(256 * error.item(), rel=1e-4)
    assert total.item() == pytest.approx(found[1].item() + 2 * found[3].item(), rel=1e-5)
    total.backward()
    assert network.dictionary.grad is not None
    assert network.dictionary.grad[2].norm() > 0
