"""DenoisingDUST against its docstring written out, in units of the noise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.models import DenoisingDUST

LAYERS = 3


def trained() -> DenoisingDUST:
    """Return a float64 model whose parameters have left their initial values."""
    model = DenoisingDUST(patch=3, patch_frames=2, code_size=24, layers=LAYERS).double()
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=source, dtype=torch.float64)
        model.log_scales.sub_(3)  # so that tokens attend to each other
        model.self_biases.div_(16)
    return model


def tokens(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return noisy tokens and an estimate of what is below."""
    source = torch.Generator().manual_seed(seed)
    strength = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)[:, None, None]
    clean = strength * torch.randn(3, 1, 18, generator=source, dtype=torch.float64) + 10
    draw = [torch.randn(3, 4, 18, generator=source, dtype=torch.float64) for _ in range(2)]
    return clean + draw[0], clean + 0.1 * draw[1]


def written_out(model: DenoisingDUST, level: int, noisy: Tensor, estimate: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of one sequence `[T, n]`, by the docstrings."""
    layer, mean = level - 1, noisy.mean()
    x, e, dictionary = noisy - mean, estimate - mean, model.dictionary[layer]
    strength, change = (e.detach().square().mean(), e.detach().var(0).mean())
    measures = torch.stack([(1 + (each - float(level == 1)).clamp(min=0)).log10() for each in (strength, change)])
    factor, scale, more = model.adaptations[layer] @ measures
    step = 1.0 if level == 1 else torch.sigmoid(model.step_logits[layer - 1] + more)
    mixed = e + step * (x - e)
    beta = scale.exp() * model.log_scales[layer].exp() / 18
    scores = -0.5 * beta * torch.cdist(e, e).square() - model.self_biases[layer] * torch.eye(len(e), dtype=e.dtype)
    attention = scores.exp() / scores.exp().sum(1, keepdim=True)
    codes, left = attention @ mixed @ dictionary, attention.norm(dim=1, keepdim=True)
    threshold = step * factor.exp() * model.log_thresholds[layer].exp()
    gate = torch.sigmoid(model.log_sharpnesses[layer].exp() * ((codes / (left * threshold)).square() - 1))
    variance = (left * gate).square().sum(1)
    return mean + (codes * gate) @ dictionary.T, (variance + 0.1) ** -model.exponents[layer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", range(1, LAYERS + 1))
@pytest.mark.parametrize("cached", [2**18, 1], ids=["together", "one by one"])
def test_without_gradients_a_layer_is_as_precise(
    level: int, dtype: torch.dtype, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["cdt_fast.ops.denoising_layer"], "_CACHED", cached)
    model, (noisy, estimate) = trained(), tokens()
    exact = model.refinement(noisy)(level, estimate)
    narrow = model.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    given = [each.to(narrow.dictionary.dtype) for each in (noisy, estimate)]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        with_gradients = narrow.refinement(given[0])(level, given[1])
        with torch.no_grad():
            found = narrow.refinement(given[0])(level, given[1])
    for truth, allowed, result in zip(exact, with_gradients, found, strict=True):
        errors = [(each.double() - truth).square().mean().sqrt().item() for each in (result, allowed)]
        assert errors[0] <= 1.5 * errors[1] + torch.finfo(dtype).eps * truth.square().mean().sqrt().item()


@pytest.mark.parametrize("level", range(1, LAYERS + 1))
def test_a_layer_is_that_of_the_docstrings_with_every_gradient(level: int) -> None:
    model, (noisy, estimate) = trained(), (each.requires_grad_() for each in tokens())
    estimate = noisy if level == 1 else estimate
    found = model.refinement(noisy)(level, estimate)
    pairs = [written_out(model, level, *each) for each in zip(noisy, estimate, strict=True)]
    expected = [torch.stack(each) for each in zip(*pairs, strict=True)]
    torch.testing.assert_close(list(found), expected, rtol=1e-9, atol=1e-11)
    assert (found[0] - noisy).std() > 0.01
    given = [*model.parameters(), noisy, estimate]
    gradients = [
        torch.autograd.grad((frames.square().sum() + 0.01 * weight.sum()), given, allow_unused=True)
        for frames, weight in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_halves_hold_the_measures_of_large_windows() -> None:
    model = DenoisingDUST(layers=1)  # its windows have more numbers than float16 holds
    noisy = torch.randn(2, 30, model.patch_size, generator=torch.Generator().manual_seed(0)) * 3
    expected, _ = model.refinement(noisy)(1, noisy)
    found, _ = model.half().refinement(noisy.half())(1, noisy.half())
    assert (found - expected).norm() < 4 * torch.finfo(torch.float16).eps * expected.norm()


def test_brightness_changes_nothing_else() -> None:
    model, (noisy, estimate) = trained(), tokens()
    for level in (1, 2):
        found, weight = model.refinement(noisy)(level, estimate)
        brighter, same = model.refinement(noisy + 3)(level, estimate + 3)
        torch.testing.assert_close([brighter, same], [found + 3, weight], rtol=1e-9, atol=1e-10)


def test_the_noise_in_codes_is_that_of_the_covariance_of_blurred_noise() -> None:
    model, place = trained(), torch.arange(3.0, dtype=torch.float64)
    apart = (place[:, None] - place).abs()
    for blur in ((0.0, 0.0), (0.1, 0.1), (0.25, 0.05)):
        along = []  # covariance of a row, of a column: of each pixel with itself and those one and two beside it
        for a in blur:
            shares = torch.tensor([(1 - 2 * a) ** 2 + 2 * a**2, 2 * a * (1 - 2 * a), a**2]).double()
            along.append(shares[apart.long()] / shares[0])
        covariance = torch.kron(torch.eye(2, dtype=torch.float64), torch.kron(along[1], along[0]))
        variance = torch.einsum("lnm,nk,lkm->lm", model.dictionary, covariance, model.dictionary)
        expected = variance.sqrt() / model.dictionary.norm(dim=1)
        torch.testing.assert_close(model.noise_in_codes(blur), expected.detach(), rtol=1e-6, atol=0)


def test_thresholds_follow_the_noise_in_codes() -> None:
    model, (noisy, estimate) = trained(), tokens()
    factors = model.noise_in_codes((0.2, 0.1))
    found = [model.refinement(noisy, factors)(level, estimate) for level in range(1, LAYERS + 1)]
    with torch.no_grad():
        model.log_thresholds.add_(factors.log())
    expected = [model.refinement(noisy)(level, estimate) for level in range(1, LAYERS + 1)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_the_optimizer_gets_every_parameter_once() -> None:
    model = trained()
    given = [id(each) for group in model.parameter_groups() for each in group["params"]]
    assert sorted(given) == sorted(map(id, model.parameters()))


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model, (noisy, _) = trained(), tokens()
    model.save_pretrained(tmp_path)
    again = DenoisingDUST.from_pretrained(tmp_path)
    assert again.config == {"patch": 3, "patch_frames": 2, "code_size": 24, "layers": LAYERS}
    found = (each.refinement(noisy)(1, noisy)[0] for each in (model, again))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 0}, "layers must be an integer >= 1, got 0"),
        ({"patch": 2.5}, "patch must be an integer >= 1, got 2.5"),
        ({"code_size": 17}, "code_size must be at least the 18 pixels of a patch, got 17"),
        ({"code_size": 19}, "code_size must be .* a product of three numbers"),
    ],
)
def test_sizes_out_of_their_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        DenoisingDUST(**{"patch": 3, "patch_frames": 2, **options})


def test_inputs_that_do_not_fit() -> None:
    model, (noisy, _) = trained(), tokens()
    with pytest.raises(InputError, match="noisy must have shape"):
        model.refinement(noisy[..., :5])
    refine = model.refinement(noisy)
    for level in (0, LAYERS + 1, 1.0):
        with pytest.raises(InputError, match=f"level must be an integer from 1 to {LAYERS}, got {level}"):
            refine(level, noisy)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="estimate must have shape"):
        refine(1, noisy[:1])
