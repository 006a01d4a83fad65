"""Tiny transformers with random weights, and the losses of their depths written out with `output_hidden_states`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

VOCABULARY, CLASSES, LAYERS = 101, 3, 3
WEIGHTS = [0.5, -0.3, 0.0, 1.2]
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
# transformers computes its own loss in float32.
OWN_LOSS: dict[str, Any] = {"rtol": 1e-6, "atol": 0, "check_dtype": False}

Read = Callable[[Any, Tensor, dict[str, Tensor], bool], Tensor]  # (model, state, inputs, whether it is the last one)
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
_SIZES |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4}
_FEW_KEYS: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_CAPPED: dict[str, Any] = {**_FEW_KEYS, "head_dim": 8, "final_logit_softcapping": 0.5}
_GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32}
_DISTIL: dict[str, Any] = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48}
_ROBERTA: dict[str, Any] = {**_SIZES, "max_position_embeddings": 40}
_VIT: dict[str, Any] = {**{k: v for k, v in _SIZES.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4}
_EXPERTS: dict[str, Any] = {**_FEW_KEYS, "num_experts_per_tok": 2, "output_router_logits": True}


@dataclass(frozen=True)
class Family:
    """A configuration, and how its hidden states are read: a language model's as features, a classifier's as logits."""

    config: str
    settings: dict[str, Any]
    read: Read
    dtype: torch.dtype = torch.float64

    @property
    def exact(self) -> dict[str, Any]:
        return EXACT if self.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}


def _normed(*names: str) -> Read:
    """Apply these modules; the last state has passed them."""

    def read(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
        for name in names:
            state = state if last else model.get_submodule(name)(state)
        return state

    return read


LANGUAGE_MODELS = {
    "llama": Family("LlamaConfig", _FEW_KEYS, _normed("model.norm")),
    "llama-tied": Family("LlamaConfig", {**_FEW_KEYS, "tie_word_embeddings": True}, _normed("model.norm")),
    "gemma2-softcap": Family("Gemma2Config", _CAPPED, _normed("model.norm")),
    "granite-scaled": Family("GraniteConfig", {**_FEW_KEYS, "logits_scaling": 2.0}, _normed("model.norm")),
    "gpt2": Family("GPT2Config", _GPT, _normed("transformer.ln_f")),
    "opt-projected": Family(
        "OPTConfig",
        {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16},
        _normed("model.decoder.final_layer_norm", "model.decoder.project_out"),
        torch.float32,  # its masks overflow in float64
    ),
    "phi-bias": Family("PhiConfig", _SIZES, _normed("model.final_layernorm")),
}
MIXTURES = {
    "mixtral": Family("MixtralConfig", {**_EXPERTS, "num_local_experts": 4}, _normed("model.norm")),
    "jetmoe": Family("JetMoeConfig", {**_EXPERTS, "kv_channels": 8, "num_local_experts": 4}, _normed("model.norm")),
}


def _bert(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier(torch.tanh(model.bert.pooler.dense(state[:, 0])))


def _distilbert(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier(torch.relu(model.pre_classifier(state[:, 0])))


def _roberta(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier.out_proj(torch.tanh(model.classifier.dense(state[:, 0])))


def _llama(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    state = state if last else model.model.norm(state)
    return model.score(state[torch.arange(len(state)), inputs["attention_mask"].sum(1) - 1])


def _vit(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier((state if last else model.vit.layernorm(state))[:, 0])


CLASSIFIERS = {
    "bert": Family("BertConfig", _SIZES, _bert),
    "distilbert": Family("DistilBertConfig", _DISTIL, _distilbert),
    "roberta": Family("RobertaConfig", _ROBERTA, _roberta),
    "llama-classifier": Family("LlamaConfig", _FEW_KEYS, _llama),
    "vit": Family("ViTConfig", _VIT, _vit),
}
FAMILIES = {**LANGUAGE_MODELS, **MIXTURES, **CLASSIFIERS}
KINDS = ("llama", "bert")  # one that reads tokens, and one that reads rows


def build(name: str, **changes: Any) -> Any:
    """Return a model in the dtype of the family, without dropout."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    family, head = FAMILIES[name], "AutoModelForCausalLM"
    if not hasattr(transformers, family.config):
        pytest.skip(f"transformers {transformers.__version__} has no {family.config}")
    # The defaults are tokens of the real vocabularies, out of range here.
    special = {"bos_token_id": 2, "eos_token_id": 2, "cls_token_id": 2, "sep_token_id": 2, "pad_token_id": 1}
    if name in CLASSIFIERS:
        head = "AutoModelForImageClassification" if name == "vit" else "AutoModelForSequenceClassification"
        special["num_labels"] = CLASSES
    config = getattr(transformers, family.config)(**{**family.settings, **special, **changes})
    config._experts_implementation = "eager"  # torch's grouped product knows no float64
    # Eager attention: that of torch has a dropout which is no module.
    model = getattr(transformers, head).from_config(config, attn_implementation="eager").to(family.dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # away from the small and equal values they start at
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def adapted(model: Any, **options: Any) -> Any:
    """Add a low-rank adapter that is not zero at first; `options` say on what."""
    peft: Any = pytest.importorskip("peft", reason="the package 'peft' is not installed")
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options)).double().eval()


def inputs_of(name: str) -> dict[str, Tensor]:
    return rows(name) if name in CLASSIFIERS else tokens()


def tokens(batch: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Return a language model's inputs and labels; the first row is padded, and its prompt does not count."""
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, -2:] = 0
    labels[0, -2:] = labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def rows(name: str = "bert", batch: int = 4, length: int = 7) -> dict[str, Tensor]:
    """Return inputs and labels of a classifier; the first row is padded, and the last one does not count."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(batch) % CLASSES
    labels[-1] = -100
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64), "labels": labels}
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:], ids[0, -2:] = 0, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def eager_losses(name: str, model: Any, inputs: dict[str, Tensor], read: Read | None = None) -> Tensor:
    """Return the mean cross-entropy of every depth `[L+1]`, with all logits held; differentiable."""
    base = model.base_model(**unlabeled(inputs), output_hidden_states=True)
    # Which of the two the last of hidden_states is, before the final norm or after it, differs between models.
    states = [*base.hidden_states[:-1], base.last_hidden_state]
    losses = []
    for depth, state in enumerate(states):
        logits = (read or FAMILIES[name].read)(model, state, inputs, depth == len(states) - 1)
        labels = inputs["labels"]
        if name not in CLASSIFIERS:
            logits, labels = model.get_output_embeddings()(logits)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            logits = logits / getattr(model.config, "logits_scaling", 1.0)
            cap = getattr(model.config, "final_logit_softcapping", None)
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
        losses.append(nn.functional.cross_entropy(logits, labels, ignore_index=-100))
    return torch.stack(losses)


def unlabeled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if name != "labels"}


def counted(name: str, inputs: dict[str, Tensor]) -> int:
    labels = inputs["labels"] if name in CLASSIFIERS else inputs["labels"][:, 1:]
    return int((labels != -100).sum())


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters, by name; zeros where there is none."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


@dataclass
class Expected:
    """Losses, weighted loss, count and gradients of the eager loop over the depths."""

    losses: Tensor
    loss: Tensor
    count: int
    gradients: dict[str, Tensor]


def expected(
    name: str,
    model: Any,
    inputs: dict[str, Tensor],
    weights: Sequence[float] = WEIGHTS,
    *,
    read: Read | None = None,
    more: Tensor | float = 0.0,
) -> Expected:
    """Return what the eager loop gives; `more` is added to the weighted loss."""
    losses = eager_losses(name, model, inputs, read)
    loss = torch.dot(torch.tensor(weights, dtype=losses.dtype), losses) + more
    return Expected(losses.detach(), loss.detach(), counted(name, inputs), gradients(model, loss))


def check(model: Any, inputs: dict[str, Tensor], answer: Expected, tolerance: dict[str, Any] = EXACT) -> Any:
    """Return the output of the model; its losses and gradients are those that are expected."""
    output = model(**inputs)
    assert not output.layer_losses.requires_grad
    assert output.layer_loss_count == answer.count
    torch.testing.assert_close(output.layer_losses, answer.losses, **tolerance)
    torch.testing.assert_close(output.loss.detach(), answer.loss, **tolerance)
    found = gradients(model, output.loss)
    for name, gradient in answer.gradients.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
    return output
