"""A model with layer losses attached: what it costs, compiles, is copied, saved and changed; what is refused."""

from __future__ import annotations

import copy
import json
import re
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from cdt_fast.checks import InputError
from cdt_fast.models.layer_losses import attach_layer_losses
from cdt_fast.models.layer_losses.reading import DepthReader
from cdt_fast.sequence.perturbation import perturbed
from tests.models.layer_loss_cases import (
    EXACT,
    KINDS,
    LAYERS,
    OWN_LOSS,
    VOCABULARY,
    WEIGHTS,
    adapted,
    build,
    check,
    expected,
    inputs_of,
    tokens,
    unlabeled,
)


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
    vocabulary, length, peaks = 4096, 256, {}
    for layers in (2, 6):
        model = build("llama", num_hidden_layers=layers, vocab_size=vocabulary).float().train()
        handle = attach_layer_losses(model)
        for name, weights in (("all", [1.0] * (layers + 1)), ("last", [0.0] * layers + [1.0])):
            handle.weights = weights
            with PeakBytes() as bytes_of:
                model(**tokens(2, length)).loss.backward()
            peaks[layers, name] = bytes_of.peak
            model.zero_grad()
    logits = 4 * 2 * length * vocabulary
    grown = (peaks[6, "all"] - peaks[2, "all"]) - (peaks[6, "last"] - peaks[2, "last"])
    # Beside its gradient [N, d] a depth costs nothing; the logits of one are 128 times as large.
    assert grown < 0.1 * logits, (peaks, logits)
    assert peaks[6, "all"] < 12 * logits


@pytest.mark.parametrize("name", KINDS)
def test_compiled_as_one_graph(name: str) -> None:
    """After a forward with labels it is right; before, torch's refusal says what to do."""
    torch._dynamo.reset()
    model, inputs = build(name, num_hidden_layers=1), inputs_of(name)
    own = [module for module in model.modules() if "forward" in vars(module)]
    handle = attach_layer_losses(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="call the model once with labels before it is compiled"):
        compiled(**inputs)
    losses = model(**inputs).layer_losses
    torch.testing.assert_close(compiled(**inputs).layer_losses, losses, **EXACT)
    with pytest.raises(InputError, match="targets"):
        compiled(**{**inputs, "labels": torch.full_like(inputs["labels"], 10**6)})
    handle.remove()
    assert own == [module for module in model.modules() if "forward" in vars(module)]


def test_labels_that_are_all_ignored_have_no_gradient_where_they_cannot_be_refused() -> None:
    torch._dynamo.reset()
    model, inputs = build("llama").train(), inputs_of("llama")
    handle = attach_layer_losses(model)
    model(**inputs)
    handle.weights = [1.0] * len(handle.taps)
    loss = torch.compile(model, backend="aot_eager")(
        **{**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    ).loss
    loss.backward()
    assert loss.isnan()
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("name", KINDS)
def test_remove_gives_the_model_back(name: str, tmp_path: Path) -> None:
    model, inputs = build(name), inputs_of(name)
    plain = model(**inputs)
    model.save_pretrained(tmp_path / "plain")
    names = {name: sorted(vars(module)) for name, module in model.named_modules()}
    state, settings = copy.deepcopy(model.state_dict()), model.config.to_dict()
    handle = attach_layer_losses(model)
    with pytest.raises(InputError, match="has layer losses already"):
        attach_layer_losses(model)
    handle.weights = WEIGHTS
    model(**inputs).loss.backward()
    model.save_pretrained(tmp_path / "attached")
    with pytest.raises(InputError, match="cannot be pickled"):
        torch.save(model, tmp_path / "pickled")
    (tmp_path / "pickled").unlink()
    handle.remove()
    handle.remove()
    assert names == {name: sorted(vars(module)) for name, module in model.named_modules()}
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert settings == model.config.to_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    output = model(**inputs)
    assert list(output) == list(plain)
    assert torch.equal(output.logits, plain.logits)
    with pytest.raises(InputError, match="were removed"):
        handle.depth_logits(**unlabeled(inputs))
    # A saved model knows nothing of its layer losses.
    first, second = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("plain", "attached"))
    assert first == second
    again = type(model).from_pretrained(tmp_path / "attached")
    assert "layer_losses" not in again(**inputs)
    attach_layer_losses(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, torch.optim.swa_utils.AveragedModel])
@pytest.mark.parametrize("name", KINDS)
def test_a_copy_has_its_own_loss(name: str, copied: Any) -> None:
    model, inputs = build(name), inputs_of(name)
    own, handle = model(**inputs).loss, attach_layer_losses(model)
    handle.weights, handle.router_factor = torch.tensor(WEIGHTS, dtype=torch.float64), 2.0
    lagrangian = model(**inputs).loss
    output = copied(model)(**inputs)
    torch.testing.assert_close(output.loss, own, **OWN_LOSS)
    torch.testing.assert_close(output.layer_losses, model(**inputs).layer_losses, **EXACT)
    torch.testing.assert_close(model(**inputs).loss, lagrangian, **EXACT)


class Counted(nn.Dropout):
    """Dropout with a buffer that only training changes."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("name", KINDS)
def test_the_check_of_the_first_forward_changes_nothing(name: str) -> None:
    model, inputs = build(name), inputs_of(name)
    model.base_model.add_module("counted", Counted())
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: model.base_model.counted(output))
    model.train()
    torch.manual_seed(5)
    plain = model(**inputs).loss.detach()
    model.base_model.config.problem_type = None
    attach_layer_losses(model)
    losses = []
    for _ in range(2):  # with the check, and without
        torch.manual_seed(5)
        losses.append(model(**inputs).layer_losses)
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    torch.testing.assert_close(losses[0][-1].detach(), plain, **OWN_LOSS)
    assert model.base_model.counted.calls == 3
    assert all(module.training for module in model.modules())
    assert model.config.problem_type is None


@pytest.mark.parametrize("name", KINDS)
def test_noise_on_the_embeddings_is_not_drawn_for_the_check(name: str) -> None:
    model, inputs = build(name), inputs_of(name)
    attach_layer_losses(model)
    with perturbed(model, gamma=0.5, padding_id=0) as perturbation:
        first = model(**inputs).layer_losses
        assert perturbation.next_sample == len(inputs["input_ids"])
        perturbation.next_sample = 0
        torch.testing.assert_close(model(**inputs).layer_losses, first, rtol=0, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_weights_cast_without_gradients_are_not_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 would take them for the rest of the block of autocast, and find no gradients of the weights."""
    model, inputs, keeps, linear = build(name).train(), inputs_of(name), [], nn.functional.linear

    def noted(*args: Any) -> Tensor:
        keeps.append((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
        return linear(*args)

    monkeypatch.setattr(nn.functional, "linear", noted)
    attach_layer_losses(model)
    for _ in range(2):  # the first call compares the losses with the model's own
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs).loss.backward()
    assert set(keeps) == {(True, True), (False, False)}
    assert all(parameter.grad is not None for parameter in model.parameters())


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """A loss function of the user's own."""
    rows = logits[:, :-1].float().reshape(-1, vocab_size)
    return nn.functional.cross_entropy(rows, labels[:, 1:].flatten(), label_smoothing=0.01)


@pytest.mark.parametrize("taps", [None, [-1]])
def test_what_is_not_the_models_own_loss_is_refused_with_both_numbers(taps: Any) -> None:
    plain, other = build("llama"), build("llama")
    other.loss_function = smoothed

    def raised(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + 1.0
        return output

    plain.model.register_forward_hook(raised)  # something unknown before the head
    messages = {
        plain: r"LlamaForCausalLM: logits read from depth 3 and its own differ by \d.* where the largest is \d",
        other: r"LlamaForCausalLM: its own loss .* is 4\.\d+, and the cross-entropy of its logits is 4\.\d+",
    }
    for model, message in messages.items():
        handle = attach_layer_losses(model, taps)
        with pytest.raises(InputError, match=message):
            model(**tokens())
        assert handle._reader._states is None


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_a_loss_function_that_is_set_later_is_refused_in_any_precision(precision: str) -> None:
    model = build("llama").to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    attach_layer_losses(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        model(**tokens())
        model.loss_function = smoothed
        with pytest.raises(InputError, match="its loss is no cross-entropy of the labels"):
            model(**tokens())


@pytest.mark.parametrize("name", KINDS)
def test_a_loss_of_training_alone_is_refused_in_training(name: str) -> None:
    model, inputs = build(name), inputs_of(name)
    forward = model.forward

    def regularized(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if model.training and "loss" in output:
            output.loss = output.loss + 0.01 * output.logits.logsumexp(-1).square().mean()
        return output

    model.forward = regularized
    attach_layer_losses(model)
    with pytest.raises(InputError, match="its loss is no cross-entropy of the labels"):
        model.train()(**inputs)
    assert all(module.training for module in model.modules())


def test_unknown_models() -> None:
    small: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 20}
    labels: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    config = transformers.BertConfig(**small)
    models = {
        "for a BertModel: only transformers' …ForSeq.* are supported": transformers.BertModel(config),
        "BertForSequenceClassification.*num_labels=1 and problem_type='regression'": (
            transformers.BertForSequenceClassification(transformers.BertConfig(**small, **labels))
        ),
        "for a NoneType: only transformers' …ForSeq.* are supported": None,
    }
    for message, model in models.items():
        with pytest.raises(InputError, match=message):
            attach_layer_losses(model)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        *(
            ("llama", {"taps": taps}, rf"taps must be .* depths between 0 and 3.*got {re.escape(got)}")
            for taps, got in (([], "[]"), (2, "2"), ([0.5], "[0.5"), ([LAYERS + 1], "[4"), ([3, -1], "[3, -1"))
        ),
        ("llama", {"inner_pooling": "mean"}, "must be 'own' for a causal language model, got 'mean'"),
        ("bert", {"inner_pooling": "first"}, "inner_pooling must be one of 'own', 'mean', got 'first'"),
    ],
)
def test_arguments_out_of_range(name: str, arguments: dict[str, Any], message: str) -> None:
    model = build(name)
    with pytest.raises(InputError, match=message):
        attach_layer_losses(model, **arguments)
    attach_layer_losses(model)  # nothing half-attached stays


@pytest.mark.parametrize("name", KINDS)
def test_labels_and_weights_that_cannot_be_used(name: str) -> None:
    model, inputs = build(name), inputs_of(name)
    handle, labels = attach_layer_losses(model), inputs.pop("labels")
    classes, which = (VOCABULARY, ", but for a sequence's first,") if name == "llama" else (3, "")
    cases = [
        *((labels.clone().index_fill_(0, torch.tensor(1), wrong), f"got {wrong}") for wrong in (classes, -1)),
        (torch.full_like(labels, -100), f"labels hold nothing to learn from: all of them{which} are -100"),
        (labels.double(), "labels must be an integer tensor"),
        (labels.tolist(), "labels must be an integer tensor"),
        (labels[:-1], "labels have shape"),
    ]
    for wrong, message in cases:
        with pytest.raises(InputError, match=message):
            model(**inputs, labels=wrong)
        assert handle._reader._states is None
    wrong_weights: list[Any] = [[1.0], "one", torch.ones(3)]
    for weights in wrong_weights:
        handle.weights = weights
        with pytest.raises(InputError, match=r"^weights of the handle"):
            model(**inputs, labels=labels)
    with pytest.raises(AttributeError, match="weigths"):
        handle.weigths = None  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InputError, match="takes no depth_weights: set weights on the handle"):
        model(**inputs, labels=labels, depth_weights=WEIGHTS)
    with pytest.raises(InputError, match="ignore_index must be -100, got 1: give the labels"):
        model(**inputs, labels=labels, ignore_index=1)


def test_a_layer_that_is_skipped() -> None:
    model = build("opt-projected", layerdrop=1.0)
    attach_layer_losses(model)
    with pytest.raises(InputError, match=r"layer 1 did not run.*layerdrop"):
        model.train()(**tokens())
    sizes: dict[str, Any] = {"hidden_size": 16, "embedding_size": 16, "intermediate_size": 24, "num_labels": 3}
    sizes |= {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.SqueezeBertForSequenceClassification(transformers.SqueezeBertConfig(**sizes))
    handle = attach_layer_losses(model)
    with pytest.raises(InputError, match=r"layer 1 did not run in this forward, or without its hooks, .* out of taps"):
        model(**inputs_of("bert"))  # it calls the forward of its layers
    handle.remove()
    attach_layer_losses(model, [-1])
    assert len(model(**inputs_of("bert")).layer_losses) == 1


def set_in(path: str, value: Any) -> Any:
    """Return a change of a model: the attribute at `path` becomes `value(what it was)`."""
    *owners, name = path.split(".")

    def change(model: Any) -> None:
        for owner in owners:
            model = getattr(model, owner)
        setattr(model, name, value(getattr(model, name)))

    return change


CHANGES: dict[str, tuple[str, Any]] = {
    "more tokens, tied head": ("llama-tied", lambda model: model.resize_token_embeddings(VOCABULARY + 20)),
    "another head": ("llama", lambda model: model.resize_token_embeddings(VOCABULARY + 1)),
    "dtype": ("llama", lambda model: model.float()),
    "checkpointing": ("llama", lambda model: model.train().gradient_checkpointing_enable()),
    "a layer in a wrapper": ("llama", lambda model: set_in("layers.1", checkpoint_wrapper)(model.model)),
    "order of the layers": ("llama", set_in("model.layers", lambda layers: nn.ModuleList(reversed(layers)))),
    "last norm": ("llama", set_in("model.norm", copy.deepcopy)),
    "base model": ("llama", set_in("model", lambda base: build("llama", hidden_act="relu").model)),
    "no softcap": ("gemma2-softcap", set_in("config.final_logit_softcapping", lambda cap: None)),
    "scale": ("granite-scaled", set_in("config.logits_scaling", lambda scale: 0.1)),
}


@pytest.mark.parametrize("forward_before", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_attaching_is_followed(name: str, forward_before: bool) -> None:
    family, change = CHANGES[name]
    model = build(family)
    handle = attach_layer_losses(model)
    if forward_before:
        model(**tokens())
    change(model)
    inputs = tokens()
    inputs["labels"] = torch.linspace(0, len(model.lm_head.weight) - 1, inputs["labels"].numel()).long().view(3, -1)
    inputs["input_ids"] = inputs["labels"].clamp(max=len(model.get_input_embeddings().weight) - 1)
    output = model(**inputs)
    handle.remove()
    plain = model(**inputs).loss
    for loss in (output.loss, output.layer_losses[-1]):
        torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0, check_dtype=False)
    attach_layer_losses(model)
    torch.testing.assert_close(model(**inputs).layer_losses, output.layer_losses, rtol=0, atol=0)


def test_another_number_of_layers_is_refused() -> None:
    model = build("llama")
    attach_layer_losses(model, [0, -1])
    model(**tokens())
    model.model.layers = model.model.layers[:2]
    with pytest.raises(InputError, match="it holds 0 lists of 3 layers"):
        model(**tokens())
    model.config.num_hidden_layers = 2
    with pytest.raises(InputError, match=r"LlamaForCausalLM had 3 layers .* has 2 now: call remove.* attach after"):
        model(**tokens())


PEFT = {
    "adapter beside the head": ("llama", {"target_modules": ["q_proj"]}),
    "a copy of the head is trained": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "classifier": ("roberta", {"target_modules": ["query"]}),
    "a copy of a classifier's head": ("roberta", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
}


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("kind", PEFT)
def test_peft(kind: str, attached: str) -> None:
    name, options = PEFT[kind]
    model, inputs = build(name), inputs_of(name)
    wrapped = adapted(copy.deepcopy(model), **options)
    plain = wrapped.get_base_model()
    # What the wrapper calls in the place of a head that it holds twice.
    held = {name: child for name, child in plain.named_children() if hasattr(child, "modules_to_save")}
    for child_name, child in held.items():
        setattr(plain, child_name, child.modules_to_save["default"])
    answer = expected(name, plain, inputs)
    for child_name, child in held.items():
        setattr(plain, child_name, child)
    answer.gradients = {name: p.grad.clone() for name, p in wrapped.named_parameters() if p.requires_grad}
    if attached == "before":
        handle = attach_layer_losses(model)
        wrapped = adapted(model, **options)
    else:
        handle = attach_layer_losses(wrapped)
    handle.weights = WEIGHTS
    check(wrapped, inputs, answer)


def with_a_forward(model: Any, head: str) -> Any:
    forward = {"forward": lambda self, x: nn.Linear.forward(self, x)}
    model.get_submodule(head).__class__ = type("Adapted", (nn.Linear,), forward)
    return model


UNREADABLE: dict[str, tuple[Any, str]] = {
    "adapter": (
        lambda model, head: adapted(model, target_modules=[head]),
        "head must have no adapter.*modules_to_save",
    ),
    "offloaded": (
        lambda model, head: cpu_offload(model),
        "head must stay on a device, got .* on meta: do not offload it",
    ),
    "a forward of its own": (with_a_forward, "Adapted has a forward of its own"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_head_whose_weight_is_not_all_of_it_or_not_there_is_refused(kind: str, name: str) -> None:
    change, message = UNREADABLE[kind]
    model, inputs = change(build(name), "lm_head" if name == "llama" else "classifier"), inputs_of(name)
    handle = attach_layer_losses(model)
    for forward in (model, handle.depth_logits):
        with pytest.raises(InputError, match=message):
            forward(**inputs)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_two_threads_share_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name).eval()
    handle, inputs = attach_layer_losses(model), inputs_of(name)
    plain, alone = model(**unlabeled(inputs)).logits, model(**inputs).layer_losses
    inner_states = DepthReader._inner_states

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.05)
        return inner_states(*arguments)

    monkeypatch.setattr(DepthReader, "_inner_states", slowly)
    with ThreadPoolExecutor(2) as pool:
        losses = [pool.submit(lambda: model(**inputs).layer_losses) for _ in range(3)]
        logits = [pool.submit(lambda: model(**unlabeled(inputs)).logits) for _ in range(3)]
        assert all(torch.equal(each.result(), alone) for each in losses)
        assert all(torch.equal(each.result(), plain) for each in logits)
    handle.remove()
    assert "forward" not in vars(model)
