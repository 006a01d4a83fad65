"""The noise of windows: its formula, at one level and at one of a range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate

from cdt_fast.video.noise import add_noise_by_window, estimated_noise, finest_noise, unclipped


def deviation_of(frames: Tensor) -> float:
    return estimated_noise(frames).deviation


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
        assert deviation_of(torch.linspace(0, 1, 64) + sigma * noise) == pytest.approx(sigma, rel=0.1, abs=1e-6)
    assert deviation_of(torch.rand(2, 1, 9)) == 0
    for shape in ((3, 1079, 1921), (600, 3, 1000)):  # where not every pair of rows is taken
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        assert deviation_of(0.1 * noise) == pytest.approx(0.1, rel=0.01)


def test_bars_beside_the_picture_have_no_part_in_its_noise() -> None:
    frames = 0.1 * torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    for bar in (8, 24):
        frames[..., :bar] = frames[..., -bar:] = 0
        assert deviation_of(frames) == pytest.approx(0.1, rel=0.05)
    frames[:] = (torch.arange(64) // 8).float()  # clean steps that stand still, and black
    assert deviation_of(frames) == deviation_of(0 * frames) == 0
    frames[..., 20:28, 20:28] = torch.rand(2, 4, 8, 8)  # what moves on a screen that is flat beside it is no noise
    assert deviation_of(frames) == 0


@pytest.mark.parametrize(
    "blur", [(0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.15, 0.15), (0.25, 0.25), (0.0, 0.15), (0.1, 0.0)]
)
def test_noise_of_a_camera_is_found_at_half_the_size(blur: tuple[float, float]) -> None:
    across, down = (torch.tensor([a, 1 - 2 * a, a]) for a in blur)  # as of missing colors, or lines, filled in
    noise = torch.randn(16, 1, 98, 130, generator=torch.Generator().manual_seed(0))
    frames = conv2d(0.1 * noise, torch.outer(down, across)[None, None])[:, 0] + torch.linspace(0, 1, 128)
    found, deviation = estimated_noise(frames), (frames - torch.linspace(0, 1, 128)).std().item()
    assert found.blur == pytest.approx([min(a, 0.162) for a in blur], abs=0.04)
    assert estimated_noise(frames, deviation).blur == pytest.approx(found.blur, abs=0.025)
    assert 0.98 * deviation < found.deviation < 1.14 * deviation
    assert finest_noise(frames) < (1.02 - sum(blur)) * deviation


def test_coarse_noise_that_a_coder_leaves_is_not_that_of_the_least_eigenvalues() -> None:
    generator = torch.Generator().manual_seed(0)
    white, coarse = torch.randn(16, 96, 128, generator=generator), torch.randn(16, 1, 24, 32, generator=generator)
    noise = 0.03 * white + 0.1 * interpolate(coarse, (96, 128), mode="bilinear")[:, 0]
    found, deviation = estimated_noise(noise, coded=True).deviation, noise.std().item()
    assert deviation_of(noise) < 0.7 * deviation
    assert 0.9 * deviation < found < 1.15 * deviation
    assert estimated_noise(white, coded=True) == estimated_noise(white)
    picture = torch.rand(1, 1, 32, 40, generator=generator)
    large = interpolate(picture, (128, 160), mode="bilinear")[0, 0]
    moving = torch.stack([large[t : t + 96, t : t + 128] for t in range(16)]) + 0.01 * white
    for count in (2, 3, 4, 16):
        assert estimated_noise(moving[:count], coded=True) == estimated_noise(moving[:count])


def test_white_noise_is_not_taken_for_blurred() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(16, 96, 128, generator=generator)
    waves = 0.5 * (0.3 * (torch.arange(128) + 3 * torch.arange(16)[:, None, None])).sin()  # moving, without fine detail
    assert max(estimated_noise(waves + 0.02 * noise).blur) < 0.02
    texture = 0.05 * conv2d(torch.randn(16, 1, 98, 130, generator=generator), torch.full((1, 1, 3, 3), 1 / 3))[:, 0]
    assert max(estimated_noise(texture + 0.02 * noise, 0.02).blur) == 0
    blocks = torch.rand(16, 12, 16, generator=generator) < 0.6  # as a coder drops the noise of a block
    coded = noise * blocks.repeat_interleave(8, 1).repeat_interleave(8, 2)
    assert max(estimated_noise(coded).blur) < 0.02


def test_detail_that_stands_still_or_moves_is_no_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    noise, picture = torch.randn(16, 96, 128, generator=generator), torch.rand(128, 160, generator=generator)
    for speed in (0, 1):
        frames = torch.stack([picture[speed * t : speed * t + 96, speed * t : speed * t + 128] for t in range(16)])
        assert finest_noise(frames + 0.02 * noise) > 0.2
        assert deviation_of(frames + 0.02 * noise) == pytest.approx(0.02, rel=0.1)
    frames[:, :48] = 0.02 * noise[:, :48]  # half of the picture is another one in each frame
    frames[:, 48:] = torch.rand(16, 48, 128, generator=generator)
    assert deviation_of(frames) == pytest.approx(0.02, rel=0.1)


def test_noise_that_grows_with_the_brightness_is_not_that_of_the_dark() -> None:
    noise, brightness = torch.randn(16, 96, 128, generator=torch.Generator().manual_seed(0)), torch.linspace(0, 1, 128)
    deviation = 0.1 * brightness.sqrt()
    assert deviation_of(brightness + deviation * noise) == pytest.approx(0.1 / 2**0.5, rel=0.25)


def test_repeated_frames_have_no_part_in_the_noise() -> None:
    frames = 0.1 * torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(0))
    assert deviation_of(frames.repeat_interleave(3, 0)) == deviation_of(frames) == pytest.approx(0.1, rel=0.06)
    assert deviation_of(frames[:1].expand(4, -1, -1)) == deviation_of(frames[0]) == finest_noise(frames[0])


def noisy_in_bytes(clean: Tensor, deviation: float) -> Tensor:
    noise = deviation * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    return (255 * (clean + noise)).round().clamp(0, 255) / 255


@pytest.mark.parametrize("ends", [(0.0, 1.0), (0.0, 0.15), (0.8, 1.0)])
@pytest.mark.parametrize("deviation", [0.05, 0.2])
def test_the_mean_of_clipped_noise_is_put_right(ends: tuple[float, float], deviation: float) -> None:
    clean = torch.linspace(*ends, 100).expand(10_000, 1, 100)
    noisy = noisy_in_bytes(clean, deviation)
    mean = noisy.mean(0, keepdim=True).expand_as(noisy)
    errors = [(found - clean).square().mean().sqrt().item() for found in (mean, unclipped(mean, noisy))]
    assert errors[0] > 0.08 * deviation
    # Where all pixels are near an end, the deviation is read too low.
    assert errors[1] < (0.25 if deviation < 0.1 or ends == (0.0, 1.0) else 0.6) * errors[0]


def test_a_picture_that_is_black_itself_stays_as_it_is() -> None:
    shape = torch.arange(64) % 3 == 0
    clean = torch.where(shape, 0.0, torch.linspace(0.02, 0.7, 64)).expand(20, 64, 64)
    shown = clean + 0.001
    for noisy in (torch.where(shape, clean, noisy_in_bytes(clean, 0.05)), (255 * clean).round() / 255):
        torch.testing.assert_close(unclipped(shown, noisy), shown, rtol=0, atol=1e-6)
    gray = clean * 0.2 + 0.4
    assert unclipped(gray, noisy_in_bytes(gray, 0.05)) is gray
