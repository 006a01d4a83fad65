from __future__ import annotations

import pytest
import torch

from cdt_fast.errors import InputError
from cdt_fast.video.data.noise import add_noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_has_the_asked_strength(dtype):
    clean = torch.full((400, 500), 0.5, dtype=dtype)
    noise = (add_noise(clean, 0.4, 0.25, torch.Generator().manual_seed(0)) - clean).double()
    assert noise.std().item() == pytest.approx(0.1, rel=0.02)
    assert abs(noise.mean().item()) < 1e-3
    assert add_noise(clean, 0.4, 0.25).dtype == dtype


def test_the_generator_draws_the_same_noise_again():
    clean = torch.rand(3, 4)
    first, second = (add_noise(clean, 1.0, 0.1, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, add_noise(clean, 1.0, 0.1, torch.Generator().manual_seed(6)))


def test_the_formula_and_its_gradient():
    clean = torch.rand(3, 4, requires_grad=True)
    drawn = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    noisy = add_noise(clean, 0.5, 0.2, torch.Generator().manual_seed(1))
    torch.testing.assert_close(noisy, clean + 0.1 * drawn)
    (gradient,) = torch.autograd.grad(noisy.sum(), clean)
    assert torch.equal(gradient, torch.ones(3, 4))


def test_no_noise_changes_nothing():
    clean = torch.rand(3, 4)
    assert torch.equal(add_noise(clean, 0.0, 0.3), clean)


@pytest.mark.parametrize(("gamma", "sigma", "fact"), [(-1, 1, "gamma is -1"), (1, float("nan"), "sigma is nan")])
def test_bad_strengths_are_refused(gamma, sigma, fact):
    with pytest.raises(InputError, match=fact):
        add_noise(torch.zeros(2), gamma, sigma)


def test_whole_numbers_are_refused():
    with pytest.raises(InputError, match="uint8"):
        add_noise(torch.zeros(2, dtype=torch.uint8), 1.0, 1.0)
