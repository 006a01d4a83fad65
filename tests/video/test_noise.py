"""The noise of windows: its formula, at one level and at one of a range."""

from __future__ import annotations

import pytest
import torch

from cdt_fast.video.noise import add_noise_by_window, estimated_noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_has_the_asked_strength(dtype: torch.dtype) -> None:
    clean = torch.full((400, 500), 0.5, dtype=dtype)
    for level in ((0.4, 0.4), (0.1, 0.9)):
        noisy, deviation = add_noise_by_window(clean, level, 0.25, torch.Generator(), [5])
        noise = (noisy - clean).double()
        assert noise.std().item() == pytest.approx(deviation.item(), rel=0.02)
        assert abs(noise.mean().item()) < 1e-3
        assert noisy.dtype == deviation.dtype == dtype
    assert 0.025 <= deviation.item() <= 0.225


def test_the_formula_and_its_gradient() -> None:
    clean = torch.rand(3, 4, requires_grad=True)
    drawn = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    noisy, deviation = add_noise_by_window(clean, (0.5, 0.5), 0.2, torch.Generator(), [1])
    torch.testing.assert_close(noisy, clean + 0.1 * drawn)
    assert deviation.tolist() == pytest.approx([0.1])
    (gradient,) = torch.autograd.grad(noisy.sum(), clean)
    assert torch.equal(gradient, torch.ones(3, 4))
    assert torch.equal(add_noise_by_window(clean, (0.0, 0.0), 0.3, torch.Generator(), [1])[0], clean)


def test_the_noise_is_found_from_the_frames() -> None:
    for sigma in (0, 0.02, 0.2):
        noise = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(0))
        assert estimated_noise(torch.linspace(0, 1, 64) + sigma * noise) == pytest.approx(sigma, rel=0.1, abs=1e-6)
    assert estimated_noise(torch.rand(2, 1, 9)) == 0
    for shape in ((3, 1079, 1921), (600, 3, 1000)):  # where not every pair of rows is taken
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        assert estimated_noise(0.1 * noise) == pytest.approx(0.1, rel=0.01)


def test_bars_beside_the_picture_have_no_part_in_its_noise() -> None:
    frames = 0.1 * torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    for bar in (8, 24):
        frames[..., :bar] = frames[..., -bar:] = 0
        assert estimated_noise(frames) == pytest.approx(0.1, rel=0.05)
    frames[:] = (torch.arange(64) // 8).float()  # clean steps that stand still, and black
    assert estimated_noise(frames) == estimated_noise(0 * frames) == 0
    frames[..., 20:28, 20:28] = torch.rand(2, 4, 8, 8)  # what moves on a screen that is flat beside it is no noise
    assert estimated_noise(frames) == 0
