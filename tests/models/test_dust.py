"""DUST and VideoUT against the same network written out, depth by depth, with both readouts."""

from __future__ import annotations

import shutil
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdt_fast import models
from cdt_fast.checks import InputError
from cdt_fast.models.dictionary import squared_spectral_norm

PATCH, CODES, LAYERS = 9, 20, 3
WEIGHTS = (0.7, -0.4, 0.0, 1.3)
KINDS = (models.DUST, models.VideoUT)
NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def built(kind: type[models.DUST], seed: int = 0, layers: int = LAYERS, **options: Any) -> models.DUST:
    """Return a float64 model whose parameters have left their initial values, each layer's in its own direction."""
    model = kind(PATCH, CODES, layers, **options).double()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=source, dtype=torch.float64)
    return model


def pictures(*leading: int, seed: int = 1, tokens: int = 5) -> tuple[Tensor, Tensor]:
    """Return noisy and clean patches."""
    source = torch.Generator().manual_seed(seed)
    clean = torch.rand(*leading, tokens, PATCH, generator=source, dtype=torch.float64)
    return clean + 0.1 * torch.randn(clean.shape, generator=source, dtype=torch.float64), clean


def written_out_reconstructions(model: models.DUST, noisy: Tensor) -> list[Tensor]:
    """Compute the docstring of DUST: every code formed, layers of four products, each depth read on its own."""
    layers = model.layers
    dictionaries = [model.dictionary] * layers if model.tied else [model.dictionary[index] for index in range(layers)]
    readouts = [dictionaries[0], *dictionaries] if model.readout == "own" else [*dictionaries, dictionaries[-1]]
    codes = model.step * (noisy @ dictionaries[0])
    results = [codes @ readouts[0].T]
    step, threshold = model.step, model.threshold
    for dictionary, readout in zip(dictionaries, readouts[1:], strict=True):
        projection = codes @ dictionary.T
        scores = model.scale * (projection @ projection.transpose(-1, -2))
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
        mixed = (weights / weights.sum(-1, keepdim=True)) @ codes
        update = mixed + step * ((noisy - mixed @ dictionary.T) @ dictionary)
        if isinstance(model, models.VideoUT):
            codes = torch.where(update > 0, update, 0.0)
        else:
            shrunk = update - threshold * torch.sign(update) if model.NONLINEARITY == "soft_threshold" else update
            codes = torch.where(update.abs() > threshold, shrunk, 0.0)
        results.append(codes @ readout.T)
    return results


def written_out(model: models.DUST, noisy: Tensor, clean: Tensor) -> Tensor:
    depths = written_out_reconstructions(model, noisy)
    return torch.stack([(depth - clean).square().sum() / clean[..., 0].numel() for depth in depths])


def parameter_gradients(model: models.DUST, total: Tensor, *others: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(total, [*model.parameters(), *others], allow_unused=True))


def assert_same(given: Any, expected: Any) -> None:
    """Require equality to 1e-10 of the largest value."""
    for one, other in zip(given, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape
            assert (one - other).abs().max() <= 1e-10 * other.abs().max()


@pytest.mark.parametrize("leading", [(), (2, 3)])
@pytest.mark.parametrize("readout", ["own", "next"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_network_written_out(
    kind: type[models.DUST], tied: bool, readout: str, leading: tuple[int, ...]
) -> None:
    model = built(kind, tied=tied, readout=readout, scale=0.8)
    noisy, clean = pictures(*leading)
    expected = written_out_reconstructions(model, noisy)
    assert_same(model.reconstructions(noisy), expected)
    assert_same([model(noisy, depth=depth) for depth in range(LAYERS + 1)], expected)
    assert_same([model(noisy)], expected[-1:])

    losses = written_out(model, noisy.requires_grad_(), clean)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    total, per_depth = model.layer_losses(noisy, clean, weights)
    assert not per_depth.requires_grad
    assert_same([per_depth, total], [losses, torch.dot(weights, losses)])
    right = parameter_gradients(model, torch.dot(weights, losses), noisy)
    assert_same(parameter_gradients(model, total, noisy), right)

    total, per_depth = model.layer_losses(noisy, clean)
    losses = written_out(model, noisy, clean)
    assert_same([per_depth, total], [losses, losses.sum()])
    found, right = (parameter_gradients(model, depths[1] - 2 * depths[2]) for depths in (per_depth, losses))
    assert_same(found, right)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_model_has_the_paper_s_shapes_and_step(kind: type[models.DUST]) -> None:
    model = kind()
    assert model.dictionary.shape == (5, 256, 1024)
    assert abs(1 / model.step - 14.97) < 0.005
    assert 1 / model.step == pytest.approx(squared_spectral_norm(model.dictionary[0]).item(), rel=1e-6)
    assert (model.dictionary == model.dictionary[0]).all()
    assert model.threshold == (0.2 * model.step if kind is models.DUST else 0.0)
    assert ("soft_threshold" if kind is models.DUST else "relu") == model.NONLINEARITY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("readout", ["own", "next"])
def test_autocast_rounds_as_its_dtype_does(dtype: torch.dtype, readout: str) -> None:
    model, weights = built(models.DUST, readout=readout, sparsity=0.02), torch.tensor([1.0, 0.5, 0.5, 1.0])
    noisy, clean = pictures(16, tokens=20)
    losses = written_out(model, noisy, clean)
    exact = (losses, *parameter_gradients(model, torch.dot(weights.double(), losses)))
    model = model.float()
    with torch.autocast("cpu", dtype=dtype):
        total, per_depth = model.layer_losses(noisy.float(), clean.float(), weights)
    for given, true in zip((per_depth, *parameter_gradients(model, total)), exact, strict=True):
        assert given is not None
        assert true is not None
        assert given.dtype == torch.float32
        assert (given - true).norm() <= 8 * torch.finfo(dtype).eps * true.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"tied": True}, {"readout": "next"}])
@pytest.mark.parametrize("weights", [torch.tensor(WEIGHTS), WEIGHTS, None], ids=["tensor", "numbers", "none"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_COMPILER])])
def test_torch_compile_sees_one_graph(
    kind: type[models.DUST], options: dict[str, Any], weights: Any, backend: str
) -> None:
    model, (noisy, clean) = built(kind, **options), pictures(2)
    torch._dynamo.reset()
    compiled = torch.compile(model.layer_losses, fullgraph=True, backend=backend)
    results = []
    for losses in (compiled, model.layer_losses):
        total, per_depth = losses(noisy, clean, weights)
        results.append([total, per_depth, *parameter_gradients(model, total)])
    assert_same(*results)


class Drawn(nn.Module):
    """Scales a weight by a number that is drawn at each access."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + 0.1 * torch.rand(()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_dictionary_that_is_drawn_at_each_access_is_drawn_once(tied: bool) -> None:
    model = built(models.DUST, tied=tied)
    parametrize.register_parametrization(model, "dictionary", Drawn())
    inputs, (weight,) = pictures(2), model.parameters()
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def total(step: float = 0.0) -> Tensor:
        torch.manual_seed(0)
        weight.data += step * direction
        return model.layer_losses(*inputs, WEIGHTS).total

    total().backward()
    assert weight.grad is not None
    slope = (total(1e-6) - total(-2e-6)) / 2e-6
    torch.testing.assert_close((weight.grad * direction).sum(), slope, rtol=1e-6, atol=0)


def test_a_reconstruction_can_be_changed_in_place() -> None:
    model, (noisy, clean) = built(models.DUST), pictures(2)
    expected = parameter_gradients(model, (2 * model(noisy) - clean).square().sum())
    assert_same(parameter_gradients(model, model(noisy).mul_(2).sub_(clean).square().sum()), expected)


@pytest.mark.parametrize("depth", [-1, LAYERS + 1, 1.0, "1"])
def test_a_depth_that_is_not_there(depth: Any) -> None:
    with pytest.raises(InputError, match=rf"depth must be an integer from 0 to {LAYERS}, got {depth!r}"):
        built(models.DUST)(pictures(2)[0], depth=depth)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 0}, "patch_size must be an integer >= 1, got 0"),
        ({"code_size": -4}, "code_size must be an integer >= 1, got -4"),
        ({"step": 0}, "step must be above 0, got 0"),
        ({"sparsity": -0.1}, "sparsity must be a finite number >= 0, got -0.1"),
        ({"scale": None}, "scale must be a finite number, got None"),
        ({"readout": "last"}, "readout must be one of 'own', 'next', got 'last'"),
    ],
)
def test_settings_out_of_their_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        models.DUST(**{"patch_size": PATCH, "code_size": CODES, **options})


@pytest.mark.parametrize(
    ("noisy", "message"),
    [
        (torch.zeros(PATCH), r"noisy must be .*\[\.\.\., T, n\], got \(9,\) float32"),
        (torch.zeros(2, 5, 8), r"noisy must have shape \(2, 5, 9\).*patch_size\), got \(2, 5, 8\)"),
        (None, r"noisy must be a dense floating-point tensor .* got None"),
        (torch.zeros(2, 5, PATCH, dtype=torch.float64), r"dictionary is torch.float32 but noisy is torch.float64"),
        (torch.zeros(2, 5, PATCH, device="meta"), r"dictionary is on cpu but noisy is on meta"),
    ],
)
def test_inputs_that_do_not_fit(noisy: Any, message: str) -> None:
    model = models.DUST(PATCH, CODES, 2)
    for call in (model, model.reconstructions, lambda given: model.layer_losses(given, torch.zeros(2, 5, PATCH))):
        with pytest.raises(InputError, match=message):
            call(noisy)


def test_a_clean_signal_or_weights_that_do_not_fit() -> None:
    model, (noisy, clean) = built(models.DUST), pictures(2)
    with pytest.raises(InputError, match=r"clean must have shape \(2, 5, 9\) \(as noisy\), got \(2, 4, 9\)"):
        model.layer_losses(noisy, clean[:, :4])
    with pytest.raises(InputError, match=r"depth_weights must have shape \(4,\).*got \(3,\)"):
        model.layer_losses(noisy, clean, [1.0, 2.0, 3.0])
    with pytest.raises(InputError, match="depth_weights must be numbers or one tensor"):  # else its gradient is lost
        model.layer_losses(noisy, clean, cast("Any", [torch.ones((), requires_grad=True), *WEIGHTS[1:]]))
    with pytest.raises(InputError, match="clean must not require a gradient"):
        model.layer_losses(noisy, clean.clone().requires_grad_())
    for weights in (None, WEIGHTS, torch.tensor(WEIGHTS)):
        with pytest.raises(InputError, match=r"clean must hold at least one token, got shape \(0, 5, 9\)"):
            model.layer_losses(noisy[:0], clean[:0], weights)
