"""Losses and gradients of all depths of a transformers model against the eager loop over its hidden states."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from cdt_fast.checks import InputError
from cdt_fast.models.layer_losses import attach_layer_losses, outputs
from tests.models.layer_loss_cases import (
    CLASSES,
    CLASSIFIERS,
    EXACT,
    FAMILIES,
    KINDS,
    LANGUAGE_MODELS,
    LAYERS,
    MIXTURES,
    OWN_LOSS,
    WEIGHTS,
    build,
    check,
    eager_losses,
    expected,
    inputs_of,
    unlabeled,
)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *CLASSIFIERS])
def test_losses_logits_and_gradients_of_every_depth(name: str) -> None:
    model, inputs, exact = build(name), inputs_of(name), FAMILIES[name].exact
    answer, plain, losses = expected(name, model, inputs), model(**inputs), eager_losses(name, model, inputs)
    handle = attach_layer_losses(model)
    assert (handle.taps, handle.layers, handle.num_constraints) == ((0, 1, 2, 3), LAYERS, LAYERS)
    assert handle.reads_tokens == handle.shifts_labels == (name in LANGUAGE_MODELS)
    handle.weights = WEIGHTS
    output = check(model, inputs, answer, exact)
    torch.testing.assert_close(output.logits, plain.logits, rtol=0, atol=1e-14)
    handle.weights = None
    output = model(**inputs)
    torch.testing.assert_close(output.loss, plain.loss, **OWN_LOSS)
    torch.testing.assert_close(output.layer_losses, losses, **exact)
    # The logits are those that the losses are of, whatever the labels, and differentiable at every depth.
    logits = handle.depth_logits(**inputs)
    torch.testing.assert_close(logits[-1], plain.logits, **exact)
    labels, parameter = inputs["labels"], next(model.parameters())
    for each, loss in zip(logits, losses, strict=True):
        read = (each, labels) if name in CLASSIFIERS else (each[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.testing.assert_close(torch.nn.functional.cross_entropy(*read), loss, **exact)
        assert torch.autograd.grad(each.sum(), parameter, retain_graph=True)[0].any()
    if name == "llama":  # in training there are no logits
        handle.weights = WEIGHTS
        assert check(model.train(), inputs, answer, exact).logits is None


def test_a_language_model_that_is_given_pictures() -> None:
    text = build("llama").config
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    vision = transformers.CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=28, patch_size=14)
    settings: dict[str, Any] = {"vision_feature_layer": -1, "image_token_index": 99}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, **settings)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    inputs = {**inputs_of("llama"), "pixel_values": torch.randn(3, 3, 28, 28)}
    inputs["input_ids"][:, :4] = 99

    def read(model: Any, state: Tensor, inputs: Any, last: bool) -> Tensor:
        return state if last else model.model.language_model.norm(state)

    answer = expected("llama", model, inputs, read=read)
    attach_layer_losses(model).weights = WEIGHTS
    check(model, inputs, answer, {"rtol": 1e-5, "atol": 1e-5})


@pytest.mark.parametrize("name", MIXTURES)
def test_the_loss_of_the_routers_stays_in_the_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the models add it: times their factor, once a forward, whatever divides the cross-entropy."""
    factor = "aux_loss_coef" if name == "jetmoe" else "router_aux_loss_coef"
    model, inputs = build(name, **{factor: 0.7}), inputs_of(name)
    if not hasattr(model, "num_experts"):
        pytest.skip(f"the router loss of {type(model).__name__} fails in this version of transformers")
    plain = model(**inputs)
    assert plain.aux_loss > 0.1
    answer = expected(name, model, inputs, more=0.7 * plain.aux_loss)
    handle = attach_layer_losses(model)
    handle.weights = WEIGHTS
    # Gradients pass through routers that compute in float32.
    check(model, inputs, answer, {"rtol": 1e-5, "atol": 1e-6})
    halved = model(**inputs, num_items_in_batch=2 * answer.count).loss - 0.7 * plain.aux_loss
    torch.testing.assert_close(halved, (answer.loss - 0.7 * plain.aux_loss) / 2, rtol=1e-9, atol=1e-9)
    handle.weights = None
    torch.testing.assert_close(model(**inputs).loss, plain.loss, **OWN_LOSS)
    output = model(**inputs, output_router_logits=False)
    torch.testing.assert_close(output.loss, output.layer_losses[-1])
    monkeypatch.setattr(outputs, "_ROUTER_FACTORS", ("another_name",))
    with pytest.raises(InputError, match=r"with a router loss.*output_router_logits = False"):
        model(**inputs)


@pytest.mark.parametrize(
    ("name", "norm"), [("bert", ""), ("roberta", ""), ("llama-classifier", "model.norm"), ("vit", "vit.layernorm")]
)
def test_inner_depths_of_a_classifier_are_read_by_the_mean_of_the_tokens(name: str, norm: str) -> None:
    """Of those that are no padding, after the final norm; the last depth stays the model's own."""
    model, inputs = build(name), inputs_of(name)

    def read(model: Any, state: Tensor, inputs: Any, last: bool) -> Tensor:
        if not last:
            state = model.get_submodule(norm)(state) if norm else state
            mask = inputs.get("attention_mask", torch.ones(state.shape[:2])).to(state.dtype)
            means = [row[kept.bool()].mean(0).expand_as(row) for row, kept in zip(state, mask, strict=True)]
            state = torch.stack(means)
        return CLASSIFIERS[name].read(model, state, inputs, True)

    answer = expected(name, model, inputs, read=read)
    assert not torch.allclose(answer.losses[:-1], eager_losses(name, model, inputs)[:-1])
    handle = attach_layer_losses(model, inner_pooling="mean")
    handle.weights = WEIGHTS
    check(model, inputs, answer)
    logits = handle.depth_logits(**unlabeled(inputs))
    losses = [torch.nn.functional.cross_entropy(depth, inputs["labels"]) for depth in logits]
    torch.testing.assert_close(torch.stack(losses), answer.losses, **EXACT)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "llama-classifier"])
def test_a_classifier_of_tokens(name: str) -> None:
    config, inputs = build(name).config, inputs_of(name)
    inputs["labels"] = (inputs["input_ids"] % CLASSES).where(inputs["attention_mask"] > 0, -100)
    kind: Any = transformers.AutoModelForTokenClassification
    model = kind.from_config(config, attn_implementation="eager").double().eval()

    def read(model: Any, state: Tensor, inputs: Any, last: bool) -> Tensor:
        if name == "llama-classifier":
            return model.score(state if last else model.model.norm(state)).mT
        return model.classifier(state).mT

    answer = expected(name, model, inputs, read=read)
    with pytest.raises(InputError, match="inner_pooling must be 'own' for a classifier of tokens, got 'mean'"):
        attach_layer_losses(model, inner_pooling="mean")
    attach_layer_losses(model).weights = WEIGHTS
    check(model, inputs, answer)
    with pytest.raises(InputError, match=r"labels have shape \(4,\) but the head was given \(4, 7\) tokens"):
        model(**{**inputs, "labels": inputs["labels"][:, 0]})


@pytest.mark.parametrize("taps", [[0, 3], [1], [-3, -1], range(1, 4)])
@pytest.mark.parametrize("name", KINDS)
def test_taps(taps: Any, name: str) -> None:
    model, inputs = build(name), inputs_of(name)
    weights = torch.zeros(LAYERS + 1, dtype=torch.float64)
    weights[list(taps)] = torch.tensor([0.7, -0.4, 1.1], dtype=torch.float64)[: len(taps)]
    answer = expected(name, model, inputs, weights.tolist())
    last, answer.losses = answer.losses[-1], answer.losses[list(taps)]
    handle = attach_layer_losses(model, taps)
    handle.weights = weights[list(taps)]
    check(model, inputs, answer)
    handle.weights = None
    output = model(**inputs)
    torch.testing.assert_close(output.loss, last, **EXACT)
    assert output.hidden_states is None


@pytest.mark.parametrize("name", KINDS)
def test_float32_and_bfloat16_autocast(name: str) -> None:
    model, inputs = build(name).float(), inputs_of(name)
    answer = expected(name, model, inputs)
    attach_layer_losses(model).weights = WEIGHTS
    check(model, inputs, answer, {"rtol": 1e-5, "atol": 1e-5})
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs)
    assert output.layer_losses.dtype == torch.float32
    torch.testing.assert_close(output.layer_losses, answer.losses, rtol=0.03, atol=0)
    half = model.to(torch.bfloat16)(**inputs)
    torch.testing.assert_close(half.layer_losses, answer.losses, rtol=0.03, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model, inputs = build(name), inputs_of(name)
    answer = expected(name, model, inputs)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()  # layers are checkpointed in training alone
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    handle = attach_layer_losses(model)
    handle.weights = WEIGHTS
    model(**inputs)  # the first one is compared with further forwards
    noting: list[bool] = []
    handle._layout.layers[1].register_forward_hook(lambda *_: noting.append(handle._reader._states is not None))
    check(model, inputs, answer)
    assert sum(noting) == 1, "one run within the forward; a second one, in the backward, is not noted"


@pytest.mark.parametrize("taps", [[0, 1, 2, 3, 4], [1, 3]])
@pytest.mark.parametrize("order", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
@pytest.mark.parametrize("name", KINDS)
def test_layers_that_are_one_block(name: str, order: list[int], taps: list[int]) -> None:
    """Its calls are counted: in a forward, after one that was interrupted, and not those of a checkpointed backward."""
    model, inputs = build(name, num_hidden_layers=4, use_cache=False), inputs_of(name)
    owner = model.model if name == "llama" else model.bert.encoder
    layers = "layers" if name == "llama" else "layer"
    setattr(owner, layers, torch.nn.ModuleList(getattr(owner, layers)[index] for index in order))
    weights = [0.5 - 0.2 * tap if tap in taps else 0.0 for tap in range(5)]
    answer = expected(name, model, inputs, weights)
    answer.losses = answer.losses[taps]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    handle = attach_layer_losses(model, taps)
    handle.weights = [weights[tap] for tap in taps]
    check(model, inputs, answer)
    interrupt = handle._layout.layers[2].register_forward_hook(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(**inputs)
    interrupt.remove()
    assert handle._reader._states is None
    assert "forward" not in vars(handle._layout.head)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    check(model, inputs, answer)
    if taps == [1, 3]:
        torch._dynamo.reset()
        losses = torch.compile(model.eval(), backend="eager", fullgraph=True)(**inputs).layer_losses
        torch.testing.assert_close(losses, answer.losses, **EXACT)


def test_the_readout_of_a_classifier_draws_its_dropout_at_every_depth() -> None:
    model, inputs = build("distilbert"), inputs_of("distilbert")
    states = model(**inputs, output_hidden_states=True).hidden_states
    attach_layer_losses(model)
    model.dropout.train()
    torch.manual_seed(5)
    found = model(**inputs).layer_losses
    torch.manual_seed(5)
    losses = {}
    for depth in (LAYERS, 0, 1, 2):  # the model's own readout comes first
        features = model.dropout(torch.relu(model.pre_classifier(states[depth][:, 0])))
        losses[depth] = torch.nn.functional.cross_entropy(model.classifier(features), inputs["labels"])
    torch.testing.assert_close(found, torch.stack([losses[depth] for depth in range(4)]), **EXACT)


def test_number_of_items_and_a_batch_of_one() -> None:
    model, inputs = build("llama"), {name: value[1:2] for name, value in inputs_of("llama").items()}
    answer = expected("llama", model, inputs)
    attach_layer_losses(model).weights = WEIGHTS
    check(model, inputs, answer)
    for items in (24, torch.tensor(24)):
        loss = model(**inputs, num_items_in_batch=items).loss.detach()
        torch.testing.assert_close(loss, answer.loss * answer.count / 24, **EXACT)
    # Labels that are shifted already, as TRL gives them.
    shifted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    output = model(**unlabeled(inputs), shift_labels=shifted)
    torch.testing.assert_close(output.layer_losses, answer.losses, **EXACT)
    vit = build("vit")
    attach_layer_losses(vit)
    assert vit(**{name: value[:1] for name, value in inputs_of("vit").items()}).layer_loss_count == 1


def test_weights_that_change_in_place_count() -> None:
    model, inputs = build("bert"), inputs_of("bert")
    attach_layer_losses(model).weights = own = torch.tensor(WEIGHTS, dtype=torch.float64)
    losses = model(**inputs).layer_losses
    own.mul_(2)
    torch.testing.assert_close(model(**inputs).loss.detach(), own @ losses, **EXACT)


def test_outputs_stay_outputs_of_transformers() -> None:
    model, inputs = build("llama"), inputs_of("llama")
    kind = type(model(**inputs))
    attach_layer_losses(model)
    output = model(**inputs)
    assert isinstance(output, kind)
    assert list(output)[-2:] == ["layer_losses", "layer_loss_count"]
    assert output[0] is output["loss"] is output.loss
    leaves, structure = tree_flatten(output)
    assert tree_unflatten(leaves, structure).layer_losses is output.layer_losses
    as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[-2], output.layer_losses)
    assert "layer_losses" not in model(input_ids=inputs["input_ids"])
    positional = model(inputs["input_ids"], inputs["attention_mask"], labels=inputs["labels"])
    torch.testing.assert_close(positional.loss, output.loss, rtol=0, atol=0)


def test_nothing_is_kept_after_the_forward() -> None:
    model, inputs = build("llama"), inputs_of("llama")
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
