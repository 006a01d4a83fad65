"""TextUT against its formula written out token by token in float64, and one clear error for each bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune

from cdt_fast import models
from cdt_fast.checks import InputError

CASES: list[dict[str, Any]] = [{}, {"tied": True, "scale": 0.3}, {"width": 4}, {"width": 9, "tied": True}]
LENGTHS = torch.tensor([7, 1, 4])
LABELS = torch.tensor([2, 0, 1])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(seed: int = 3, dtype: torch.dtype = torch.float64, **options: Any) -> models.TextUT:
    """Return a model of 3 layers on 11 words of 6 numbers, with every parameter away from its initial value."""
    torch.manual_seed(seed)
    model = models.TextUT((11, 6), 3, 3, **options).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator(seed), dtype=torch.float64).to(dtype)
    return model


def ids() -> Tensor:
    return torch.randint(0, 11, (3, 7), generator=generator(1))


def written_logits(model: models.TextUT, vectors: Tensor) -> list[Tensor]:
    """Return the logits of all depths of one text `[T, width]` without padding, in loops over tokens."""
    if model.projection is not None:
        vectors = torch.stack([model.projection.weight @ vector for vector in vectors])
    tokens = vectors
    logits = [model.head.weight @ tokens.mean(0) + model.head.bias]
    for layer in range(model.layers):
        w, v = (
            parameter if model.tied else parameter[layer]
            for parameter in (model.attention_weight, model.feedforward_weight)
        )
        following = []
        for token in tokens:
            scores = torch.stack([model.scale * (w @ token) @ (w @ other) for other in tokens])
            weights = torch.exp(scores - scores.max().detach())
            mixed = torch.zeros_like(token)
            for weight, other in zip(weights / weights.sum(), tokens, strict=True):
                mixed = mixed + weight * other
            update = -0.5 * (mixed @ v + mixed @ v.T) + token
            following.append(torch.where(update > 0, update, torch.zeros_like(update)))
        tokens = torch.stack(following)
        logits.append(model.head.weight @ tokens.mean(0) + model.head.bias)
    return logits


def written_batch(model: models.TextUT, tokens: Tensor) -> Tensor:
    """Return the logits `[L+1, B, classes]` of texts of `LENGTHS`."""
    vectors = [model.embedding.weight[row[:length]] for row, length in zip(tokens, LENGTHS, strict=True)]
    return torch.stack([torch.stack(written_logits(model, text)) for text in vectors], 1)


def written_losses(model: models.TextUT, tokens: Tensor) -> Tensor:
    logits = written_batch(model, tokens)
    log_sum = torch.log(torch.exp(logits).sum(-1))
    return (log_sum - logits[:, range(3), LABELS]).mean(1)


@pytest.mark.parametrize("options", CASES)
def test_the_logits_of_every_depth_are_those_of_the_formula(options: dict[str, Any]) -> None:
    model, tokens = made(**options), ids()
    expected = written_batch(model, tokens)
    found = model.depth_logits(tokens, lengths=LENGTHS)
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-11, atol=1e-12)
    for depth, logits in enumerate(found):
        assert torch.equal(model(tokens, depth, lengths=LENGTHS), logits)
    assert torch.equal(model(tokens, lengths=LENGTHS), found[-1])


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("weights", [[0.5, -1.0, 0.0, 2.0], None])
def test_losses_and_gradients_are_those_of_the_formula(options: dict[str, Any], weights: list[float] | None) -> None:
    model, tokens = made(**options), ids()
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = written_losses(model, tokens)
    factors = torch.ones(4, dtype=torch.float64) if weights is None else torch.tensor(weights, dtype=torch.float64)
    wanted = torch.autograd.grad((factors * expected).sum(), parameters)
    total, per_depth = model.layer_losses(tokens, LABELS, weights, lengths=LENGTHS)
    torch.testing.assert_close(per_depth, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(total, (factors * expected).sum(), rtol=1e-11, atol=1e-12)
    assert per_depth.requires_grad == (weights is None)
    for name, found, want in zip(names, torch.autograd.grad(total, parameters), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_what_stands_at_padding_reaches_neither_a_logit_nor_a_gradient() -> None:
    model = made(width=4)
    tokens, padding = ids().clamp(max=9), 10
    for row, length in enumerate(LENGTHS.tolist()):
        tokens[row, length:] = padding
    gradients = []
    for stands_there in (1.0, math.nan):
        with torch.no_grad():
            model.embedding.weight[padding] = stands_there
        total, losses = model.layer_losses(tokens, LABELS, [1.0, 1.0, 1.0, 1.0], lengths=LENGTHS)
        gradients.append([losses, *torch.autograd.grad(total, [*model.parameters()])])
    for clean, padded in zip(*gradients, strict=True):
        assert torch.equal(clean, padded)
    of_embedding = next(grad for grad in gradients[0][1:] if grad.shape == model.embedding.weight.shape)
    assert (of_embedding[padding] == 0).all()
    assert of_embedding.any()


def test_ids_of_any_leading_dimensions() -> None:
    model, tokens = made(), torch.randint(0, 11, (2, 3, 5), generator=generator(4))
    lengths = torch.tensor([[5, 2, 3], [1, 4, 5]])
    expected = torch.stack([model(row, lengths=length) for row, length in zip(tokens, lengths, strict=True)])
    torch.testing.assert_close(model(tokens, lengths=lengths), expected, rtol=1e-12, atol=1e-13)
    assert torch.equal(model(tokens.int(), lengths=lengths.int()), model(tokens, lengths=lengths))


def test_losses_have_shapes_in_a_mode_without_values() -> None:
    with FakeTensorMode():
        model = models.TextUT((11, 6), 3, 2)
        losses = model.layer_losses(torch.ones(3, 4, dtype=torch.int64), torch.ones(3, dtype=torch.int64), [0.0, 1, 2])
        losses.total.backward()
    assert losses.per_depth.shape == (3,)


def test_new_weights_start_as_xavier_says() -> None:
    torch.manual_seed(0)
    model = models.TextUT((300, 32), 4, 2, width=48)
    assert model.projection is not None
    for stack in (model.attention_weight, model.feedforward_weight, [model.projection.weight], [model.head.weight]):
        for matrix in stack:
            bound = math.sqrt(6 / sum(matrix.shape))
            assert 0.9 * bound < matrix.abs().max() <= bound
    assert not model.attention_weight[0].equal(model.attention_weight[1])
    assert not model.head.bias.any()
    assert model.embedding.weight.std().item() == pytest.approx(32**-0.5, rel=0.05)


def test_embeddings_are_copied_from_a_pretrained_model() -> None:
    table = torch.randn(11, 6, generator=generator(2))
    model = models.TextUT(table, 3, 2, width=5)
    total, _ = model.layer_losses(ids(), LABELS, [1.0, 1.0, 1.0])
    total.backward()
    assert model.embedding.weight.grad is not None
    with torch.no_grad():
        model.embedding.weight.zero_()
    assert table.any()
    assert model.get_input_embeddings() is model.embedding


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        (((11, 6), 0, 1), {}, "classes"),
        (((11, 6), 2, 0), {}, "layers"),
        (((11,), 2, 1), {}, "embedding"),
        (((0, 6), 2, 1), {}, "vocabulary"),
        ((nn.Embedding(2, 2), 2, 1), {}, "Embedding"),
        ((torch.zeros(3), 2, 1), {}, "embedding"),
        ((torch.zeros(3, 2, dtype=torch.int64), 2, 1), {}, "embedding"),
        (("bert", 2, 1), {}, "embedding"),
        (((11, 6), 2, 1), {"width": 0}, "width"),
        (((11, 6), 2, 1), {"scale": math.nan}, "scale"),
    ],
)
def test_a_bad_argument_of_the_model_is_named(arguments: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        models.TextUT(*arguments, **options)


@pytest.mark.parametrize(
    ("tokens", "options", "word"),
    [
        (torch.tensor([[1, 11]]), {}, "id 11"),
        (torch.tensor([[1, -1]]), {}, "id -1"),
        (torch.zeros(2, 0, dtype=torch.int64), {}, "at least one token"),
        (torch.zeros(2, 3, dtype=torch.bool), {}, "tokens"),
        (torch.zeros(1, 3, 6), {}, "must be ids"),
        (torch.zeros(2, 3, dtype=torch.int64), {"lengths": torch.tensor([3, 0])}, "from 1 to the 3.*got 0"),
        (torch.zeros(2, 3, dtype=torch.int64), {"lengths": torch.tensor([3, 4])}, "got 4"),
        (torch.zeros(2, 3, dtype=torch.int64), {"lengths": torch.tensor([3])}, "lengths"),
        (torch.zeros(2, 3, dtype=torch.int64), {"lengths": torch.ones(2)}, "lengths"),
        (torch.zeros(1, 2, dtype=torch.int64), {"depth": 4}, "from 0 to 3"),
        (torch.zeros(1, 2, dtype=torch.int64), {"depth": True}, "depth"),
    ],
)
def test_a_bad_input_is_named(tokens: Tensor, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        made()(tokens, **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: prune.random_unstructured(head, "weight", 0.5),
        lambda head: nn.utils.weight_norm(head),
        lambda head: nn.utils.parametrizations.weight_norm(head),
    ],
)
def test_losses_are_of_the_head_as_it_is_called(change: Any) -> None:
    model = made()
    change(model.head)
    for _ in range(2):  # a weight that hooks make anew has a graph of its own
        logits = model.depth_logits(ids())
        expected = torch.stack([nn.functional.cross_entropy(each, LABELS) for each in logits])
        losses = model.layer_losses(ids(), LABELS).per_depth
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
        losses.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1


def test_a_head_whose_weight_is_not_all_of_it() -> None:
    model = made()
    model.head = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})(6, 3)
    with pytest.raises(InputError, match="Doubled has a forward of its own"):
        model.double().layer_losses(ids(), LABELS)


def test_one_graph_holds_texts_of_all_lengths() -> None:
    torch._dynamo.reset()
    model, count = made(), CompileCounter()
    compiled = torch.compile(model, backend=count, dynamic=True)
    for longest in range(4, 9):  # not 3, the number of texts, which one size would stand for both
        tokens = ids().repeat(1, 2)[:, :longest]
        compiled(tokens, lengths=torch.tensor([longest, 1, 2]))
    assert count.frame_count == 1
