"""The denoiser of `train video`: what it is before training, and losses of the mean over shifted grids."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.models import DenoisingDUST
from cdt_fast.models.dictionary import tight_cosines
from cdt_fast.training.optimizer import build_constraints
from cdt_fast.video import networks
from cdt_fast.video.data import from_patches, to_patches
from cdt_fast.video.networks import ReconstructionLosses, build_network, reconstructed, tokens_of
from cdt_fast.video.quality import continued
from cdt_fast.video.settings import VideoSettings
from cdt_fast.video.task import load


def denoiser() -> VideoSettings:
    model = {"code_size": 256, "scratch": True}
    return VideoSettings.chosen({"data": {"size": 16, "window": 8}, "model": model})


def network_of(settings: VideoSettings) -> DenoisingDUST:
    network = build_network(settings)
    assert isinstance(network, DenoisingDUST)
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
    with torch.no_grad():
        network.log_sharpnesses.add_(9)  # a hard threshold
    noisy, _, _ = windows(0)
    tokens = tokens_of(noisy[:1].double(), settings)
    mean = tokens.mean((-2, -1), keepdim=True)
    transform = tight_cosines(256, 256, 4)
    coefficients = (tokens - mean) @ transform
    kept = torch.where(coefficients.abs() > 2.7 * 0.05, coefficients, 0.0)
    expected = kept @ transform.T + mean
    assert 0 < (kept == 0).double().mean() < 1
    found = 0.05 * network.refinement(tokens / 0.05)(1, tokens / 0.05)[0]
    assert (found - expected).abs().max() < 0.02  # a code next to the threshold
    assert (found - expected).abs().mean() < 1e-4


@pytest.mark.parametrize("only_last", [False, True])
def test_every_layer_and_grid_knows_the_noise_in_its_codes(only_last: bool) -> None:
    network, settings = network_of(VideoSettings()), VideoSettings()
    noisy = torch.rand(1, 8, 24, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = reconstructed(network, settings, noisy, torch.tensor([0.1]), only_last=only_last, blur=(0.15, 0.05))
        network.log_thresholds.add_(network.noise_in_codes((0.15, 0.05)).log())
        expected = reconstructed(network, settings, noisy, torch.tensor([0.1]), only_last=only_last)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"code_size": 512},
        {"patch": 16},
        {"patch_frames": 1, "patch": 16},
        {"patch_frames": 8, "window": 8},  # one token a sequence: no attention
        {"window": 32},
    ],
)
def test_any_size_of_patch_and_code_removes_noise_before_training(sizes: dict[str, int]) -> None:
    settings = VideoSettings.chosen({"model": {"scratch": True}})
    for name, value in sizes.items():
        settings.set("model" if name == "code_size" else "data", name, value)
    network = network_of(settings)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    clean = (0.5 + 0.3 * torch.sin(rows / 3 + columns / 7)).expand(1, settings.data.window, 32, 32)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    for level in (5 / 255, 30 / 255):
        noisy = clean + level * noise
        depths = reconstructed(network, settings, noisy, torch.tensor([level]))
        errors = [(depth - clean).square().mean().sqrt().item() for depth in depths]
        assert max(errors[1:]) < 0.7 * errors[0]
        assert sizes or all(after < before for before, after in pairwise(errors)), errors


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("model", "model", "ut", "model must be dust for .* crops, got ut.*--preset paper-ut"),
        ("model", "code_size", 257, "the nearest are 256 and 288; got 257"),
        ("model", "code_size", 64, "code_size must be at least the 256 pixels of a patch, got 64"),
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


def test_grids_are_every_other_one_or_one_in_each_row_and_column_or_between_those() -> None:
    places = [(0, 0, 0), (0, 4, 2), (2, 2, 0), (2, 6, 2), (4, 0, 0), (4, 4, 2), (6, 2, 0), (6, 6, 2)]
    assert denoiser().grid_places() == places
    assert denoiser().grid_places(6) == [places[index] for index in (0, 1, 3, 4, 6, 7)]
    assert denoiser().grid_places(4) == [(0, 0, 0), (2, 4, 2), (4, 2, 0), (6, 6, 2)]
    assert denoiser().grid_places(4, moved=True) == [(1, 3, 0), (3, 7, 2), (5, 5, 0), (7, 1, 2)]


@pytest.mark.parametrize("grids", [[(8, False)] * 3, [(8, False), (4, True), (6, False)]])
def test_every_layer_starts_from_the_weighted_mean_over_grids(grids: list[tuple[int, bool]]) -> None:
    settings, denoised = denoiser(), grids[1:] != grids[:-1]
    network = network_of(settings)
    noisy, _, deviation = windows(3)
    unit = deviation[:, None, None, None]
    expected = noisy / unit
    for level, chosen in enumerate(grids, 1):
        total, weights = torch.zeros_like(noisy), torch.zeros_like(noisy)
        for top, left, late in settings.grid_places(*chosen):
            sides = (left, 8 - left, top, 8 - top)
            moved, given = (continued(frames.roll(-late, 1), sides) for frames in (noisy / unit, expected))
            tokens, estimate = (to_patches(frames, 8, "time", 4) for frames in (moved, given))
            found, weight = network.refinement(tokens)(level, estimate)
            weight = weight[..., None].expand_as(found)
            for sums, given in ((total, weight * found), (weights, weight)):
                frames = from_patches(given, tuple(moved.shape), 8, "time", 4)
                sums += frames[..., top : top + 16, left : left + 16].roll(late, 1)
        expected = total / weights
        assert weights.std() > 0.01 * weights.mean()
    depths = reconstructed(network, settings, noisy, deviation, 3, only_last=denoised)
    assert len(depths) == (2 if denoised else 4)
    torch.testing.assert_close(depths[-1], expected * unit, rtol=1e-5, atol=1e-6)
    assert torch.equal(depths[0], noisy)


def test_two_threads_denoise_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "_PIXELS_AT_ONCE", {"cpu": 1})
    settings = denoiser()
    network, (noisy, _, deviation) = network_of(settings), windows(3)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with torch.no_grad():
                found.append(reconstructed(network, settings, noisy, deviation, only_last=True)[-1])
            with torch.autocast("cpu", torch.bfloat16), networks._workers(True) as (workers, run):
                narrow = list(run(lambda _: torch.is_autocast_enabled("cpu"), range(2)))
            assert workers == count
            assert all(narrow)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_grids_that_go_through_together_give_what_they_give_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = denoiser()
    network = network_of(settings).double()
    with torch.no_grad():
        network.log_scales.sub_(10)  # every token attends to all of its sequence
        network.self_biases.zero_()
    noisy, _, deviation = (each.double() for each in windows(4))
    noisy = noisy[..., :13]  # neither side alike, nor filled by patches
    found = []
    for at_once in (2**24, 6 * noisy.numel(), 1):
        monkeypatch.setattr(networks, "_PIXELS_AT_ONCE", {"cpu": at_once, "cuda": at_once})
        depths = reconstructed(network, settings, noisy, deviation)
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
        frames = reconstructed(network, settings, noisy, deviation, depth)[-1]
        error = ((frames - clean) / deviation.view(2, 1, 1, 1)).square().mean()
        assert found[depth].item() == pytest.approx(256 * error.item(), rel=1e-4)
    assert total.item() == pytest.approx(found[1].item() + 2 * found[3].item(), rel=1e-5)
    total.backward()
    assert network.dictionary.grad is not None
    assert network.dictionary.grad[2].norm() > 0
