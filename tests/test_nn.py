"""The modules against the formulas of their ops, their state dicts, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cdt_fast as cdt
from cdt_fast.errors import InputError
from cdt_fast.models.dictionary import overcomplete_dct, squared_spectral_norm
from cdt_fast.ops.layerwise_cross_entropy import layerwise_cross_entropy_reference
from cdt_fast.ops.lista_step import lista_step_reference
from cdt_fast.ops.residual_linear import residual_linear_reference
from cdt_fast.ops.soft_threshold import soft_threshold_reference
from cdt_fast.ops.symmetric_attention import symmetric_attention_reference
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
DOUBLE = torch.float64
WORDS: tuple[dict[str, Any], ...] = ({"nonlinearity": "tanh"}, {"reduction": "none"})


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def check(module: torch.nn.Module, output: Tensor, expected: Tensor) -> None:
    """The values, the gradients of all parameters, and the parameters after a round trip."""
    torch.testing.assert_close(output, expected, **EXACT)
    direction = torch.randn_like(expected)
    parameters = list(module.parameters())
    assert parameters
    for found, wanted in zip(
        torch.autograd.grad((output * direction).sum(), parameters),
        torch.autograd.grad((expected * direction).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, **EXACT)
        assert wanted.any()


@pytest.mark.parametrize("energy", [False, True])
def test_symmetric_attention(energy: bool) -> None:
    module = cdt.nn.SymmetricAttention(6, 4, scale=0.7, energy=energy, dtype=DOUBLE)
    tokens, lengths = torch.randn(2, 5, 6, dtype=DOUBLE), torch.tensor([5, 3])
    expected = symmetric_attention_reference(
        tokens @ module.weight.mT, tokens, scale=0.7, lengths=lengths, energy=energy
    )
    check(module, module(tokens, lengths), expected)
    assert cdt.nn.SymmetricAttention(6).weight.shape == (6, 6)


@pytest.mark.parametrize("nonlinearity", ["relu", "soft_threshold", "identity"])
def test_residual_linear(nonlinearity: Any) -> None:
    module = cdt.nn.ResidualLinear(4, 6, alpha=0.5, nonlinearity=nonlinearity, threshold=0.1, dtype=DOUBLE)
    x, residual = torch.randn(2, 5, 4, dtype=DOUBLE), torch.randn(2, 5, 6, dtype=DOUBLE)
    options: dict[str, Any] = {"alpha": 0.5, "nonlinearity": nonlinearity, "threshold": 0.1}
    check(module, module(x, residual), residual_linear_reference(x, module.weight, residual, **options))


@pytest.mark.parametrize("features", [1, 6])
def test_a_learned_threshold(features: int) -> None:
    module, x = cdt.nn.SoftThreshold(0.3, features, dtype=DOUBLE), torch.randn(5, 6, dtype=DOUBLE)
    assert isinstance(module.threshold, torch.nn.Parameter)
    check(module, module(x), soft_threshold_reference(x, module.threshold))
    with torch.no_grad():
        module.threshold.fill_(-1.0)
    torch.testing.assert_close(module(x), x, **EXACT)


def test_a_fixed_threshold() -> None:
    module, x = cdt.nn.SoftThreshold(0.3), torch.randn(5, 6, dtype=DOUBLE)
    assert not list(module.parameters())
    torch.testing.assert_close(module(x), soft_threshold_reference(x, 0.3), **EXACT)


@pytest.mark.parametrize("nonlinearity", ["relu", "soft_threshold", "hard_threshold"])
def test_lista_step(nonlinearity: Any) -> None:
    module = cdt.nn.LISTAStep(4, 9, sparsity=0.5, nonlinearity=nonlinearity, dtype=DOUBLE)
    step = 1 / squared_spectral_norm(overcomplete_dct(4, 9)).item()
    assert (module.step, module.threshold) == (step, 0.0 if nonlinearity == "relu" else 0.5 * step)
    codes, signal = torch.randn(5, 9, dtype=DOUBLE), torch.randn(5, 4, dtype=DOUBLE)
    options: dict[str, Any] = {"step": module.step, "threshold": module.threshold, "nonlinearity": nonlinearity}
    check(module, module(codes, signal), lista_step_reference(codes, signal, module.dictionary, **options))


def test_unrolled_layers_hand_their_projection_on() -> None:
    first = cdt.nn.UnrolledLayer(4, 9, scale=0.6, dtype=DOUBLE)
    second = cdt.nn.UnrolledLayer(4, 9, step=0.05, dtype=DOUBLE)
    with torch.no_grad():
        second.dictionary.add_(0.1 * torch.randn_like(second.dictionary))
    signal = torch.randn(2, 5, 4, dtype=DOUBLE)
    codes = torch.randn(2, 5, 9, dtype=DOUBLE)
    middle, projection, *_ = first(codes, signal, next_dictionary=second.dictionary)
    codes_after, *_ = second(middle, signal, projection)
    expected = codes
    for layer in (first, second):
        expected, *_ = unrolled_layer_reference(
            expected, signal, layer.dictionary, step=layer.step, threshold=layer.threshold, scale=layer.scale
        )
    check(torch.nn.ModuleList([first, second]), codes_after, expected)
    assert second.step == 0.05


def test_layerwise_cross_entropy() -> None:
    head = torch.nn.Linear(6, 5, dtype=DOUBLE)
    states, targets = [torch.randn(7, 6, dtype=DOUBLE) for _ in range(3)], torch.randint(5, (7,))
    targets[2] = 9
    options: dict[str, Any] = {"ignore_index": 9, "reduction": "sum", "label_smoothing": 0.1, "softcap": 2.0}
    module, weights = cdt.nn.LayerwiseCrossEntropy(**options, chunk_tokens=4), [0.5, -0.2, 1.0]
    expected = layerwise_cross_entropy_reference(states, head.weight, targets, head.bias, **options)
    total, per_depth, *_ = module(states, head.weight, targets, head.bias, weights)
    torch.testing.assert_close(per_depth, expected.detach(), **EXACT)
    check(head, total, torch.tensor(weights, dtype=DOUBLE) @ expected)


def test_a_fraction_of_the_tokens_is_for_training_alone() -> None:
    weight, states, targets = torch.randn(5, 6), [torch.randn(64, 6) for _ in range(2)], torch.randint(5, (64,))
    module = cdt.nn.LayerwiseCrossEntropy(inner_fraction=0.25)
    assert len({module(states, weight, targets)[1][0].item() for _ in range(4)}) == 4
    assert len({module.eval()(states, weight, targets)[1][0].item() for _ in range(4)}) == 1
    expected = layerwise_cross_entropy_reference(states, weight, targets, inner_kl=0.5)
    module = cdt.nn.LayerwiseCrossEntropy(inner_kl=0.5)
    torch.testing.assert_close(module(states, weight, targets)[1], expected)
    torch.testing.assert_close(
        module.eval()(states, weight, targets)[1], layerwise_cross_entropy_reference(states, weight, targets)
    )


def test_layerwise_reconstruction_loss() -> None:
    target, lengths = torch.randn(2, 5, 4, dtype=DOUBLE), torch.tensor([5, 3])
    reconstructions = [torch.randn(2, 5, 4, dtype=DOUBLE) for _ in range(3)]
    total, per_depth = cdt.nn.LayerwiseReconstructionLoss()(reconstructions, target, [0.5, 0.0, 1.0], lengths)
    kept = torch.arange(5) < lengths.unsqueeze(1)
    expected = torch.stack([(target - each).square().sum(-1)[kept].mean() for each in reconstructions])
    torch.testing.assert_close(per_depth, expected, **EXACT)
    torch.testing.assert_close(total, 0.5 * expected[0] + expected[2], **EXACT)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cdt.nn.SymmetricAttention(0), "width must be an integer >= 1, got 0"),
        (lambda: cdt.nn.SymmetricAttention(6)(torch.ones(2, 5, 3)), r"tokens must have shape \(2, 5, 6\)"),
        (lambda: cdt.nn.ResidualLinear(4, 6, **WORDS[0]), "nonlinearity must be one of"),
        (lambda: cdt.nn.SoftThreshold(-0.1), "threshold"),
        (lambda: cdt.nn.LISTAStep(4, 9, step=0.0), "step must be a finite number > 0, got 0.0"),
        (lambda: cdt.nn.UnrolledLayer(4, 9, sparsity=-1.0), "sparsity"),
        (lambda: cdt.nn.LayerwiseCrossEntropy(label_smoothing=2.0), "label_smoothing must be a number in"),
        (lambda: cdt.nn.LayerwiseCrossEntropy(**WORDS[1]), "reduction must be one of"),
    ],
)
def test_wrong_options(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("name", cdt.nn.__all__)
def test_every_module_says_what_it_is(name: str) -> None:
    sizes = {
        "SymmetricAttention": (6,),
        "ResidualLinear": (4, 6),
        "SoftThreshold": (0.25,),
        "LISTAStep": (4, 9),
        "UnrolledLayer": (4, 9),
    }
    module = getattr(cdt.nn, name)(*sizes.get(name, ()))
    assert name in repr(module)
    assert type(module).__doc__
    assert type(module).forward.__doc__
    again = getattr(cdt.nn, name)(*sizes.get(name, ()))
    again.load_state_dict(module.state_dict())
