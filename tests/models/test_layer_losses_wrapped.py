"""Layer losses of a model in a trainer, compiled; what they cost; what is refused."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses import attach_layer_losses
from tests.models.layer_loss_cases import (
    LAYERS,
    VOCABULARY,
    classifier,
    language_model,
    rows,
    tokens,
)

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


class PeakBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def test_memory_does_not_grow_with_depth_times_vocabulary() -> None:
    vocabulary, length = 4096, 256
    peaks = {}
    for layers in (2, 6):
        model = language_model(num_hidden_layers=layers, vocab_size=vocabulary).float().train()
        inputs = tokens(2, length)
        handle = attach_layer_losses(model)
        handle.weights = [1.0] * (layers + 1)
        for name, weights in (("all", None), ("last", [0.0] * layers + [1.0])):
            with PeakBytes() as bytes_of:
                model(**inputs, depth_weights=weights).loss.backward()
            peaks[layers, name] = bytes_of.peak
            model.zero_grad()
    logits = 4 * 2 * length * vocabulary
    grown = (peaks[6, "all"] - peaks[2, "all"]) - (peaks[6, "last"] - peaks[2, "last"])
    # Beside its gradient [N, d] a depth costs nothing; the logits of one are 128 times as large.
    assert grown < 0.1 * logits, (peaks, logits)
    assert peaks[6, "all"] < 12 * logits


@pytest.mark.parametrize("make", [language_model, classifier])
def test_compiled_as_one_graph(make: Any) -> None:
    """After a forward with labels it is right; before, torch's refusal says what to do."""
    torch._dynamo.reset()
    model, inputs = make(num_hidden_layers=1), tokens() if make is language_model else rows()
    attach_layer_losses(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="call the model once with labels before it is compiled"):
        compiled(**inputs)
    expected = model(**inputs)
    output = compiled(**inputs)
    torch.testing.assert_close(output.layer_losses, expected.layer_losses, **EXACT)
    wrong = {**inputs, "labels": torch.full_like(inputs["labels"], 10**6)}
    with pytest.raises(InputError, match="targets"):
        compiled(**wrong)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "for a Linear: it has no loss of labels.*; supported are"),
        (None, "for a NoneType: it has no loss of labels.*; supported are"),
        ("AutoModel BertConfig", "for a BertModel: it has no loss of labels"),
        ("AutoModelForMaskedLM BertConfig", "for a BertForMaskedLM: it has no loss of labels"),
        ("AutoModelForTokenClassification BertConfig", "for a BertForTokenClassification: it has no loss of labels"),
        (
            "AutoModelForCausalLM BertConfig",
            r"for a BertLMHeadModel: its head \(BertOnlyMLMHead\) is more than one linear map",
        ),
        (
            "AutoModelForSequenceClassification T5Config",
            "T5ForSequenceClassification: it has an encoder and a decoder",
        ),
        (
            "AutoModelForSequenceClassification AlbertConfig",
            "AlbertForSequenceClassification: it holds 0 lists of 3 layers",
        ),
    ],
)
def test_unknown_models(model: Any, message: str) -> None:
    if isinstance(model, str):
        head, config = model.split()
        small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 20}
        if config == "T5Config":
            small = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "vocab_size": 20}
        settings = {**small, "num_hidden_layers": 3, "num_labels": 3}
        model = getattr(transformers, head).from_config(getattr(transformers, config)(**settings))
    with pytest.raises(InputError, match=message):
        attach_layer_losses(model)


def test_something_unknown_before_the_head() -> None:
    model, inputs = language_model(), tokens()
    model.model.register_forward_hook(raised)
    handle = attach_layer_losses(model)
    with pytest.raises(InputError, match=r"4\.\d+ is read from depth 3 .* its own loss is 4\.\d+"):
        model(**inputs)
    assert handle._reader._states is None
    handle.remove()
    attach_layer_losses(model, [-1])  # the last depth is read in the model's own forward
    with pytest.raises(InputError, match=r"LlamaForCausalLM: 4\.\d+ is read from depth 3 .* its own loss is 4\.\d+"):
        model(**inputs)


def raised(module: nn.Module, args: Any, output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state + 1.0
    return output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_labels": 1}, "num_labels=1"),
        ({"problem_type": "multi_label_classification"}, "multi_label_classification"),
        ({"problem_type": "regression"}, "regression"),
    ],
)
def test_losses_that_are_no_cross_entropy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"BertForSequenceClassification.*{message}"):
        attach_layer_losses(classifier(**changes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"taps": []}, "taps must be a list"),
        ({"taps": 2}, "taps must be a list"),
        ({"taps": [0.5]}, r"taps must be .* depths between 0 and 3.*got .0\.5"),
        ({"taps": [LAYERS + 1]}, r"between 0 and 3.*got .4"),
        ({"taps": [-LAYERS - 2]}, "depths between 0 and 3, .* or from -1 to -4, .*got .-5"),
        ({"taps": [2, 1]}, "increasing"),
        ({"taps": [3, -1]}, "increasing"),
        ({"inner_fraction": 0.0}, "inner_fraction must be"),
        ({"inner_fraction": "half"}, "inner_fraction must be"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], message: str) -> None:
    model = language_model()
    with pytest.raises(InputError, match=message):
        attach_layer_losses(model, **arguments)
    attach_layer_losses(model)  # nothing half-attached stays


@pytest.mark.parametrize("make", [language_model, classifier])
def test_labels_that_cannot_be_used(make: Any) -> None:
    model, inputs = make(), tokens() if make is language_model else rows()
    handle = attach_layer_losses(model)
    labels = inputs.pop("labels")
    classes = VOCABULARY if make is language_model else 3
    for wrong in (classes, -1):
        bad = labels.clone()
        bad[1] = wrong
        with pytest.raises(InputError, match=rf"labels must be in \[0, {classes}\) or -100, got {wrong}"):
            model(**inputs, labels=bad)
    which = "all of them, but for a sequence's first," if make is language_model else "all of them"
    with pytest.raises(InputError, match=f"labels hold nothing to learn from: {which} are -100"):
        model(**inputs, labels=torch.full_like(labels, -100))
    with pytest.raises(InputError, match="labels must be an integer tensor"):
        model(**inputs, labels=labels.double())
    with pytest.raises(InputError, match="labels must be an integer tensor"):
        model(**inputs, labels=labels.tolist())
    with pytest.raises(InputError, match="labels"):
        model(**inputs, labels=labels[:-1])
    assert handle._reader._states is None
    wrong_weights: list[Any] = [[1.0], "one", torch.ones(3)]
    for weights in wrong_weights:
        with pytest.raises(InputError, match="depth_weights"):
            handle.weights = weights
        with pytest.raises(InputError, match="depth_weights"):
            model(**inputs, labels=labels, depth_weights=weights)


def test_a_layer_that_is_skipped() -> None:
    model, inputs = language_model("opt-projected", layerdrop=1.0), tokens()
    attach_layer_losses(model)
    with pytest.raises(InputError, match=r"layer 1 did not run.*layerdrop"):
        model.train()(**inputs)


def a_larger_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY + 20, 32, dtype=torch.float64))
    model.config.vocab_size = VOCABULARY + 20


FOLLOWED: dict[str, tuple[str, Any]] = {
    "more tokens, tied head": ("llama-tied", lambda model: model.resize_token_embeddings(VOCABULARY + 20)),
    "fewer tokens": ("llama-tied", lambda model: model.resize_token_embeddings(VOCABULARY - 20)),
    "more rows of the head": ("llama", a_larger_head),
    "dtype": ("llama", lambda model: model.float()),
    "checkpointing": ("llama", lambda model: model.train().gradient_checkpointing_enable()),
    "a layer in a wrapper": (
        "llama",
        lambda model: model.model.layers.__setitem__(1, checkpoint_wrapper(model.model.layers[1])),
    ),
    "no softcap": ("gemma2-softcap", lambda model: setattr(model.config, "final_logit_softcapping", None)),
    "scale": ("granite-scaled", lambda model: setattr(model.config, "logits_scaling", 0.1)),
}


@pytest.mark.parametrize("forward_before", [False, True])
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_changes_after_attaching_is_followed(name: str, forward_before: bool) -> None:
    family, change = FOLLOWED[name]
    model = language_model(family)
    handle = attach_layer_losses(model)
    if forward_before:
        model(**tokens())
    change(model)
    inputs = tokens()
    inputs["labels"] = torch.linspace(0, len(model.lm_head.weight) - 1, 14).long().view(2, 7)
    inputs["input_ids"] = inputs["labels"].clamp(max=len(model.get_input_embeddings().weight) - 1)
    output = model(**inputs)
    handle.remove()
    plain = model(**inputs).loss
    for loss in (output.loss, output.layer_losses[-1]):
        torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0, check_dtype=False)


def fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2


def another_norm(model: Any) -> None:
    model.model.norm = copy.deepcopy(model.model.norm)


REPLACED: dict[str, Any] = {
    "order": lambda model: setattr(model.model, "layers", nn.ModuleList(reversed(model.model.layers))),
    "norm": another_norm,
    "base": lambda model: setattr(model, "model", language_model().model),
    "head": lambda model: model.resize_token_embeddings(VOCABULARY + 1),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_after_attaching_is_followed(name: str) -> None:
    model = language_model()
    handle = attach_layer_losses(model)
    model(**tokens())
    REPLACED[name](model)
    losses = model(**tokens()).layer_losses
    handle.remove()
    attach_layer_losses(model)
    torch.testing.assert_close(model(**tokens()).layer_losses, losses, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fewer_layers, "LlamaForCausalLM had 3 layers .* has 2 now: call remove.* attach after"),
        (lambda model: model.model.layers.pop(0), "it holds 0 lists of 3 layers"),
    ],
)
def test_another_number_of_layers_is_refused(change: Any, message: str) -> None:
    model = language_model()
    attach_layer_losses(model, [0, -1])
    model(**tokens())
    change(model)
    with pytest.raises(InputError, match=message):
        model(**tokens())
