"""Losses and gradients of all depths of a transformers model against the eager loop over its hidden states."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses import attach_layer_losses
from tests.models.layer_loss_cases import (
    CLASSIFIERS,
    LANGUAGE_MODELS,
    LAYERS,
    WEIGHTS,
    classifier,
    eager_losses,
    expected,
    gradients,
    language_model,
    rows,
    tokens,
)

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def check(model: Any, inputs: dict[str, Tensor], answer: tuple[Any, ...], tolerance: dict[str, Any] = EXACT) -> Any:
    losses, loss, count, gradient = answer
    output = model(**inputs)
    assert not output.layer_losses.requires_grad
    assert output.layer_loss_count == count
    torch.testing.assert_close(output.layer_losses, losses, **tolerance)
    torch.testing.assert_close(output.loss.detach(), loss, **tolerance)
    found = gradients(model, output.loss)
    for name, of_parameter in gradient.items():
        torch.testing.assert_close(
            found[name], of_parameter, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )
    return output


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models(name: str) -> None:
    model, inputs, family = language_model(name), tokens(), LANGUAGE_MODELS[name]
    answer = expected(model, family, inputs, WEIGHTS, True)
    tolerance = EXACT if family.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    plain = model(**inputs)
    handle = attach_layer_losses(model)
    assert (handle.taps, handle.num_constraints, handle.reads_tokens) == ((0, 1, 2, 3), LAYERS, True)
    handle.weights = WEIGHTS
    output = check(model, inputs, answer, tolerance)
    torch.testing.assert_close(output.logits, plain.logits, rtol=0, atol=0)
    handle.weights = None
    output = model(**inputs)
    # transformers computes its own loss in float32.
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-6, atol=0, check_dtype=False)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(name: str) -> None:
    model, inputs = classifier(name), rows(name)
    answer = expected(model, CLASSIFIERS[name], inputs, WEIGHTS, False)
    plain = model(**inputs)
    handle = attach_layer_losses(model)
    handle.weights = WEIGHTS
    output = check(model, inputs, answer)
    torch.testing.assert_close(output.logits, plain.logits, rtol=0, atol=1e-14)
    handle.weights = None
    torch.testing.assert_close(model(**inputs).loss, plain.loss, rtol=1e-6, atol=0, check_dtype=False)


@pytest.mark.parametrize(
    ("name", "norm"), [("bert", ""), ("roberta", ""), ("llama", "model.norm"), ("vit", "vit.layernorm")]
)
def test_inner_depths_of_a_classifier_are_read_by_the_mean_of_the_tokens(name: str, norm: str) -> None:
    """Of those that are no padding, after the final norm; the last depth stays the model's own."""
    model, inputs = classifier(name), rows(name)

    def read(model: Any, state: torch.Tensor, inputs: Any, last: bool) -> torch.Tensor:
        if not last:
            state = model.get_submodule(norm)(state) if norm else state
            mask = inputs.get("attention_mask", torch.ones(state.shape[:2])).to(state.dtype)
            means = [row[kept.bool()].mean(0).expand_as(row) for row, kept in zip(state, mask, strict=True)]
            state = torch.stack(means)
        return CLASSIFIERS[name].read(model, state, inputs, True)

    answer = expected(model, replace(CLASSIFIERS[name], read=read), inputs, WEIGHTS, False)
    own = expected(model, CLASSIFIERS[name], inputs, WEIGHTS, False)[0]
    assert not torch.allclose(answer[0][:-1], own[:-1])
    handle = attach_layer_losses(model, inner_pooling="mean")
    handle.weights = WEIGHTS
    check(model, inputs, answer)
    logits = handle.depth_logits(**inputs)
    losses = [torch.nn.functional.cross_entropy(depth, inputs["labels"], ignore_index=-100) for depth in logits]
    torch.testing.assert_close(torch.stack(losses), answer[0], **EXACT)


def test_the_pooling_of_inner_depths_is_a_classifiers() -> None:
    with pytest.raises(InputError, match="inner_pooling must be 'own' for a causal language model, got 'mean'"):
        attach_layer_losses(language_model(), inner_pooling="mean")
    with pytest.raises(InputError, match="inner_pooling must be one of 'own', 'mean', got 'first'"):
        attach_layer_losses(classifier(), inner_pooling="first")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("taps", [[0, 3], [1], [0, 2], [-3, -1], range(1, 4)])
@pytest.mark.parametrize("kind", ["language model", "classifier"])
def test_taps(taps: Any, kind: str) -> None:
    shifted = kind == "language model"
    model, inputs = (language_model(), tokens()) if shifted else (classifier(), rows())
    family = LANGUAGE_MODELS["llama"] if shifted else CLASSIFIERS["bert"]
    weights = torch.zeros(LAYERS + 1, dtype=torch.float64)
    weights[list(taps)] = torch.tensor([0.7, -0.4, 1.1], dtype=torch.float64)[: len(taps)]
    losses, *rest = expected(model, family, inputs, weights.tolist(), shifted)
    handle = attach_layer_losses(model, taps)
    handle.weights = weights[list(taps)]
    check(model, inputs, (losses[list(taps)], *rest))
    handle.weights = None
    output = model(**inputs)
    torch.testing.assert_close(output.loss, losses[-1], **EXACT)
    assert output.hidden_states is None


@pytest.mark.parametrize("make", [language_model, classifier])
def test_float32_and_bfloat16_autocast(make: Any) -> None:
    shifted = make is language_model
    model, inputs = make().float(), tokens() if shifted else rows()
    family = LANGUAGE_MODELS["llama"] if shifted else CLASSIFIERS["bert"]
    answer = expected(model, family, inputs, WEIGHTS, shifted)
    handle = attach_layer_losses(model)
    handle.weights = WEIGHTS
    check(model, inputs, answer, {"rtol": 1e-5, "atol": 1e-5})
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs)
    assert output.layer_losses.dtype == torch.float32
    torch.testing.assert_close(output.layer_losses, answer[0], rtol=0.03, atol=0)
    half = model.to(torch.bfloat16)(**inputs)
    torch.testing.assert_close(half.layer_losses, answer[0], rtol=0.03, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    shifted = name in LANGUAGE_MODELS
    model = language_model(name) if shifted else classifier(name)
    inputs = tokens() if shifted else rows(name)
    families = LANGUAGE_MODELS if shifted else CLASSIFIERS
    answer = expected(model, families[name], inputs, WEIGHTS, shifted)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()  # layers are checkpointed in training alone
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    handle = attach_layer_losses(model)
    handle.weights = WEIGHTS
    model(**inputs)  # the first one is compared with further forwards
    seen: list[int] = []
    layer = handle._layout.layers[1]
    layer.register_forward_hook(lambda *_: seen.append(handle._reader._states is not None))
    check(model, inputs, answer)
    assert sum(seen) == 1, "one run within the forward; a second one, in the backward, is not noted"


def test_dropout_of_the_readout_draws_at_every_depth() -> None:
    model, inputs = classifier("distilbert", seq_classif_dropout=0.5), rows("distilbert")
    states = model(**inputs, output_hidden_states=True).hidden_states
    handle = attach_layer_losses(model)
    model.dropout.train()
    torch.manual_seed(5)
    output = model(**inputs)
    torch.manual_seed(5)
    losses = {}
    for depth in [LAYERS, 0, 1, 2]:  # the model's own readout comes first, as without the handle
        features = model.dropout(torch.relu(model.pre_classifier(states[depth][:, 0])))
        losses[depth] = torch.nn.functional.cross_entropy(model.classifier(features), inputs["labels"])
    torch.testing.assert_close(output.layer_losses, torch.stack([losses[depth] for depth in range(4)]), **EXACT)
    handle.remove()


def test_batch_of_one_and_number_of_items() -> None:
    model, inputs = language_model(), {name: value[1:2] for name, value in tokens().items()}
    losses, loss, count, gradient = expected(model, LANGUAGE_MODELS["llama"], inputs, WEIGHTS, True)
    attach_layer_losses(model).weights = WEIGHTS
    check(model, inputs, (losses, loss, count, gradient))
    for items in (24, torch.tensor(24)):
        output = model(**inputs, num_items_in_batch=items)
        torch.testing.assert_close(output.loss.detach(), loss * count / 24, **EXACT)
    image = {name: value[:1] for name, value in rows("vit").items()}
    vit = classifier("vit")
    attach_layer_losses(vit)
    assert vit(**image).layer_loss_count == 1


def test_weights_of_the_call_go_before_those_of_the_handle() -> None:
    model, inputs = classifier(), rows()
    handle = attach_layer_losses(model)
    handle.weights = own = torch.tensor(WEIGHTS)
    other = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    output = model(**inputs, depth_weights=other)
    torch.testing.assert_close(output.loss.detach(), other @ output.layer_losses, **EXACT)
    own.mul_(2)  # taken as it is: a change in place counts
    torch.testing.assert_close(
        model(**inputs).loss.detach(),
        2 * torch.tensor(WEIGHTS).double() @ output.layer_losses,
        rtol=1e-6,
        atol=0,
    )


def test_in_training_a_language_model_computes_no_logits() -> None:
    model, inputs = language_model(), tokens()
    plain = model(**inputs)
    attach_layer_losses(model, inner_fraction=0.3)
    assert model.train()(**inputs).logits is None
    output = model.eval()(**inputs)
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-6, atol=0, check_dtype=False)
    torch.testing.assert_close(output.logits, plain.logits, rtol=0, atol=0)
    exact = eager_losses(model, LANGUAGE_MODELS["llama"], inputs, True)
    torch.testing.assert_close(output.layer_losses, exact, **EXACT)


def test_a_fraction_of_the_tokens_is_unbiased_and_seeded() -> None:
    model, inputs = language_model(), tokens()
    exact = eager_losses(model, LANGUAGE_MODELS["llama"], inputs, True).detach()
    attach_layer_losses(model.train(), inner_fraction=0.25)
    with torch.no_grad():
        drawn = torch.stack([model(**inputs).layer_losses for _ in range(200)])
        first, second = (model(**inputs).layer_losses for _ in range(2) if torch.manual_seed(3))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(drawn[:, -1], exact[-1].expand(200), **EXACT)
    assert drawn[:, 0].std() > 0
    error = (drawn.mean(0) - exact)[:-1].abs()
    assert (error < 4 * drawn.std(0)[:-1] / 200**0.5).all()


def test_outputs_stay_outputs_of_transformers() -> None:
    model, inputs = language_model(), tokens()
    kind = type(model(**inputs))
    attach_layer_losses(model)
    output = model(**inputs)
    assert isinstance(output, kind)
    assert list(output)[-2:] == ["layer_losses", "layer_loss_count"]
    assert output[0] is output["loss"] is output.loss
    leaves, structure = tree_flatten(output)
    again = tree_unflatten(leaves, structure)
    assert again.layer_losses is output.layer_losses
    as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[-2], output.layer_losses)
    assert "layer_losses" not in model(input_ids=inputs["input_ids"])
    positional = model(inputs["input_ids"], inputs["attention_mask"], labels=inputs["labels"])
    torch.testing.assert_close(positional.loss, output.loss, rtol=0, atol=0)


@pytest.mark.parametrize("make", [language_model, classifier])
def test_remove_gives_the_model_back(make: Any) -> None:
    model, inputs = make(), tokens() if make is language_model else rows()
    plain = model(**inputs)
    names = {name: sorted(vars(module)) for name, module in model.named_modules()}
    state, settings = copy.deepcopy(model.state_dict()), model.config.to_dict()
    handle = attach_layer_losses(model)
    handle.weights = WEIGHTS
    model(**inputs).loss.backward()
    handle.remove()
    handle.remove()
    assert names == {name: sorted(vars(module)) for name, module in model.named_modules()}
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert settings == model.config.to_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    output = model(**inputs)
    assert list(output) == list(plain)
    assert torch.equal(output.logits, plain.logits)
    attach_layer_losses(model)


def test_a_deep_copy_stands_alone() -> None:
    model, inputs = language_model(), tokens()
    handle = attach_layer_losses(model)
    handle.weights = WEIGHTS
    before = model(**inputs).layer_losses
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(copied(**inputs).layer_losses, before, rtol=0, atol=0)
    assert model(**inputs).layer_losses[0] != before[0]


def test_nothing_is_kept_after_the_forward() -> None:
    model, inputs = language_model(), tokens()
    handle = attach_layer_losses(model, [2])
    layers = handle._layout.layers
    assert [len(layer._forward_pre_hooks) for layer in layers] == [0, 0, 1]
    model(**inputs)  # the first one is compared with further forwards
    states: list[weakref.ref[Tensor]] = []
    layers[2].register_forward_pre_hook(lambda module, args: states.append(weakref.ref(args[0])))
    with torch.no_grad():
        model(**inputs)
    gc.collect()
    assert [state() for state in states] == [None]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = layers[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**inputs)
    hook.remove()
    assert handle._reader._states is None
    assert "layer_losses" not in model(input_ids=inputs["input_ids"])
    assert model(**inputs).layer_losses.shape == (1,)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *CLASSIFIERS])
def test_logits_of_the_depths_are_those_that_the_losses_are_of(name: str) -> None:
    shifted = name in LANGUAGE_MODELS
    model, inputs = (language_model(name), tokens()) if shifted else (classifier(name), rows(name))
    family = (LANGUAGE_MODELS if shifted else CLASSIFIERS)[name]
    tolerance: dict[str, Any] = EXACT if family.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    losses = eager_losses(model, family, inputs, shifted)
    unlabeled = {name: value for name, value in inputs.items() if name != "labels"}
    own = model(**unlabeled).logits
    handle = attach_layer_losses(model)
    logits = handle.depth_logits(**unlabeled)
    assert len(logits) == LAYERS + 1
    torch.testing.assert_close(logits[-1], own, **tolerance)
    labels = inputs["labels"]
    for each, loss in zip(logits, losses, strict=True):
        read, wanted = (each[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) if shifted else (each, labels)
        torch.testing.assert_close(torch.nn.functional.cross_entropy(read, wanted), loss, **tolerance)
    torch.testing.assert_close(handle.depth_logits(**inputs)[0], logits[0], rtol=0, atol=0)  # labels do not matter
    # Differentiable, at every depth.
    assert all(torch.autograd.grad(each.sum(), model.get_input_embeddings().weight if shifted else
               next(model.parameters()), retain_graph=True)[0].any() for each in logits)  # fmt: skip
