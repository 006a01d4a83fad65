"""Noise on codes, layers passed over, a price for the Jacobian, a bound on dictionaries: baselines of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.errors import InputError
from cdt_fast.models import DUST
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.losses import BetweenLayers, bound_spectral_norms, jacobian_penalty
from tests.runs import new_trainer, train


def seeds(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_the_noise_is_of_the_codes_own_size_and_each_window_s_own() -> None:
    torch.manual_seed(0)
    codes = torch.randn(6, 50, 80) * torch.tensor([1.0, 1, 1, 4, 4, 4])[:, None, None]
    noisy = BetweenLayers(0.5, 0.0, seeds(7, 8))(1, codes)
    # Four standard deviations of the standard deviation of 12,000 numbers.
    assert (noisy - codes)[:3].std().item() == pytest.approx(0.5, abs=0.5 * 4 / (2 * 12_000) ** 0.5)
    assert (noisy - codes)[3:].std().item() == pytest.approx(2.0, abs=2.0 * 4 / (2 * 12_000) ** 0.5)
    torch.testing.assert_close(BetweenLayers(0.5, 0.0, seeds(8))(1, codes[3:]), noisy[3:])
    other_depth = BetweenLayers(0.5, 0.0, seeds(7, 8))(2, codes) - codes
    correlation = torch.corrcoef(torch.stack([(noisy - codes)[:3].flatten(), other_depth[:3].flatten()]))[0, 1]
    assert abs(correlation.item()) < 4 / 12_000**0.5


def test_a_layer_is_passed_over_for_whole_windows_as_often_as_asked_for() -> None:
    number = 400
    between = BetweenLayers(0.0, 0.25, torch.arange(number))
    first, second = (torch.full((2 * number, 3, 4), value) for value in (1.0, 2.0))
    assert torch.equal(between(1, first), first)  # before layer 1 there are no codes to go on with
    after = between(2, second)
    passed = (after == 1.0).view(number, -1)
    assert torch.equal(passed.all(1), passed.any(1))
    # Four standard deviations of a binomial count.
    assert abs(int(passed.all(1).sum()) - 100) < 4 * (number * 0.25 * 0.75) ** 0.5


def test_the_next_layer_takes_the_codes_as_they_are_handed_on() -> None:
    torch.manual_seed(0)
    model = DUST(16, 24, 3).double()
    noisy, clean = torch.rand(2, 4, 5, 16, dtype=torch.float64)
    seen = []

    def doubled(depth: int, codes: torch.Tensor) -> torch.Tensor:
        seen.append(depth)
        return 2 * codes

    _, plain = model.layer_losses(noisy, clean)
    _, found = model.layer_losses(noisy, clean, between=doubled)
    assert seen == [1, 2]
    assert torch.equal(found[:2], plain[:2])
    dictionary = model.dictionary[1]
    codes = model.step * noisy @ model.dictionary[0]
    for layer in (0, 1):
        own = model.dictionary[layer]
        mixed = torch.softmax((codes @ own.T) @ (codes @ own.T).mT, -1) @ codes
        update = mixed + model.step * (noisy - mixed @ own.T) @ own
        codes = update.sign() * (update.abs() - model.threshold).clamp(min=0) * (2 if layer == 0 else 1)
    torch.testing.assert_close(found[2], (codes @ dictionary.T - clean).square().sum(-1).mean())


@pytest.mark.parametrize(("name", "value"), [("code_noise", 0.5), ("layer_dropout", 0.5), ("jacobian", 100.0)])
def test_a_training_is_the_same_however_its_windows_are_cut(
    tiny_config: Any, tmp_path: Path, name: str, value: float
) -> None:
    gradients = []
    for number, changes in enumerate(({}, {"batch": 1, "accumulate": 2}, {name: 0.0})):
        settings = tiny_config(**{"constrained": False, "steps": 3, "layers": 3, name: value} | changes)
        trainer = new_trainer(RunFolder.create(tmp_path / str(number), settings), settings)
        trainer._train_step()
        gradients.append(trainer.model.dictionary.grad)
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()
    assert (gradients[0] - gradients[2]).norm() > 1e-2 * gradients[0].norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code_noise": 0.1, "overlap": 2}, r"code_noise, layer_dropout and jacobian .* give --overlap 1"),
        ({"jacobian": 1.0, "model": "vit"}, r"code_noise, layer_dropout and jacobian are for dust and ut"),
        ({"spectral_bound": 1.0, "model": "vit"}, r"spectral_bound is of dictionaries, which a vit has none of"),
        ({"model": "vit", "sequence": "space", "overlap": 2}, r"overlap must be 1 but for model dust"),
    ],
)
def test_what_it_is_not_for_is_refused(tiny_config: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings = tiny_config(**changes)
    with pytest.raises(InputError, match=message):
        train(RunFolder.create(tmp_path / "run", settings), settings)


def test_the_jacobian_s_price_is_that_of_the_whole_matrix() -> None:
    torch.manual_seed(0)
    model = DUST(16, 24, 3, sparsity=0.0).double()  # without thresholds it is smooth
    noisy, deviation = torch.rand(4, 5, 16, dtype=torch.float64), torch.tensor([1e-4, 3e-4])
    jacobians = [torch.autograd.functional.jacobian(model, window.requires_grad_()) for window in noisy]
    squared = torch.stack([jacobian.square().sum() / 5 for jacobian in jacobians])
    expected = (squared * deviation.square().repeat_interleave(2)).mean().item()
    drawn = torch.stack(
        [jacobian_penalty(model, noisy.detach(), deviation, seeds(2 * draw, 2 * draw + 1)) for draw in range(400)]
    )
    assert abs(drawn.mean().item() - expected) < 4 * drawn.std().item() / 20
    drawn[0].backward()
    assert model.dictionary.grad is not None
    assert model.dictionary.grad.abs().max() > 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("code_size", [12, 24])
def test_a_dictionary_is_scaled_down_to_the_bound_and_no_further(tied: bool, code_size: int) -> None:
    torch.manual_seed(0)
    model = DUST(16, code_size, 3, tied=tied, step=[0.2, 0.2, 0.2])
    with torch.no_grad():
        model.dictionary.mul_(2).add_(0.1 * torch.randn_like(model.dictionary))
    before = model.spectral_ratio()
    bound_spectral_norms(model, 1.01 * before.max().item() * 16 ** (1 / 2**8))
    assert torch.equal(model.spectral_ratio(), before)
    bound_spectral_norms(model, 0.5 * before.min().item())
    reached = model.spectral_ratio() / (0.5 * before.min())
    assert reached.max() <= 1 + 1e-5
    assert reached.min() >= 16 ** -(1 / 2**8) - 1e-5


def test_the_bound_holds_after_every_update(tiny_config: Any, tmp_path: Path) -> None:
    settings = tiny_config(constrained=False, steps=2, spectral_bound=0.9)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", settings), settings)
    for _ in range(2):
        trainer._train_step()
        assert trainer.model.spectral_ratio().max() <= 0.9 * (1 + 1e-5)
