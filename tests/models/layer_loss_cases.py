"""Tiny transformers with random weights, and the losses of their depths written out with `output_hidden_states`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, CLASSES, LAYERS = 101, 3, 3
WEIGHTS = [0.5, -0.3, 0.0, 1.2]
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_FEW_KEYS: dict[str, Any] = {**_SHAPE, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32}
_OPT: dict[str, Any] = {**_SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 16}
_DISTIL: dict[str, Any] = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48}
_ROBERTA: dict[str, Any] = {**_SHAPE, "max_position_embeddings": 40}
_GEMMA: dict[str, Any] = {**_FEW_KEYS, "head_dim": 8, "final_logit_softcapping": 0.5}
_VIT: dict[str, Any] = {**{k: v for k, v in _SHAPE.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4}


@dataclass(frozen=True)
class Family:
    """A configuration, and how its hidden states are read: a language model's as features, a classifier's as logits.

    `read(model, state, inputs, last)`; the last state has passed the final norm where there is one.
    """

    config: str
    settings: dict[str, Any]
    read: Callable[[Any, Tensor, dict[str, Tensor], bool], Tensor]
    dtype: torch.dtype = torch.float64


def _normed(path: str) -> Callable[[Any, Tensor, dict[str, Tensor], bool], Tensor]:
    def read(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
        for name in path.split("+"):
            state = state if last else model.get_submodule(name)(state)
        return state

    return read


def _last_token(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.arange(len(inputs["input_ids"])), inputs["attention_mask"].sum(1) - 1


LANGUAGE_MODELS = {
    "llama": Family("LlamaConfig", _FEW_KEYS, _normed("model.norm")),
    "llama-tied": Family("LlamaConfig", {**_FEW_KEYS, "tie_word_embeddings": True}, _normed("model.norm")),
    "qwen2": Family("Qwen2Config", _FEW_KEYS, _normed("model.norm")),
    "mistral": Family("MistralConfig", _FEW_KEYS, _normed("model.norm")),
    "gemma2-softcap": Family("Gemma2Config", _GEMMA, _normed("model.norm")),
    "granite-scaled": Family("GraniteConfig", {**_FEW_KEYS, "logits_scaling": 2.0}, _normed("model.norm")),
    "gpt2": Family("GPT2Config", _GPT, _normed("transformer.ln_f")),
    "gpt-neox": Family("GPTNeoXConfig", _SHAPE, _normed("gpt_neox.final_layer_norm")),
    "opt-projected": Family(
        "OPTConfig",
        _OPT,
        _normed("model.decoder.final_layer_norm+model.decoder.project_out"),
        torch.float32,  # its masks in transformers 4.48 overflow in float64
    ),
    "phi-bias": Family("PhiConfig", _SHAPE, _normed("model.final_layernorm")),
}

_EXPERTS: dict[str, Any] = {**_FEW_KEYS, "num_experts_per_tok": 2, "output_router_logits": True}
_QWEN: dict[str, Any] = {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
MIXTURES = {
    "mixtral": Family("MixtralConfig", {**_EXPERTS, "num_local_experts": 4}, _normed("model.norm")),
    "qwen2-moe": Family("Qwen2MoeConfig", {**_QWEN, "shared_expert_intermediate_size": 24}, _normed("model.norm")),
    "qwen3-moe": Family("Qwen3MoeConfig", {**_QWEN, "head_dim": 8}, _normed("model.norm")),
    "jetmoe": Family(
        "JetMoeConfig",
        {**_EXPERTS, "num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4},
        _normed("model.norm"),
    ),
}


def _bert(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier(torch.tanh(model.bert.pooler.dense(state[:, 0])))


def _distilbert(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier(torch.relu(model.pre_classifier(state[:, 0])))


def _roberta(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier.out_proj(torch.tanh(model.classifier.dense(state[:, 0])))


def _electra(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier.out_proj(nn.functional.gelu(model.classifier.dense(state[:, 0])))


def _deberta(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier(nn.functional.gelu(model.pooler.dense(state[:, 0])))


def _modernbert(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    state = state if last else model.model.final_norm(state)
    mask = inputs["attention_mask"].unsqueeze(-1)
    return model.classifier(model.head((state * mask).sum(1) / mask.sum(1)))


def _llama(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    state = state if last else model.model.norm(state)
    return model.score(state[_last_token(inputs)])


def _vit(model: Any, state: Tensor, inputs: dict[str, Tensor], last: bool) -> Tensor:
    return model.classifier((state if last else model.vit.layernorm(state))[:, 0])


CLASSIFIERS = {
    "bert": Family("BertConfig", _SHAPE, _bert),
    "distilbert": Family("DistilBertConfig", _DISTIL, _distilbert),
    "roberta": Family("RobertaConfig", _ROBERTA, _roberta),
    "electra": Family("ElectraConfig", {**_SHAPE, "embedding_size": 16}, _electra),
    "deberta-v2": Family("DebertaV2Config", {**_SHAPE, "pooler_hidden_size": 32}, _deberta),
    "mpnet": Family("MPNetConfig", _SHAPE, _roberta),
    "modernbert": Family("ModernBertConfig", {**_SHAPE, "classifier_pooling": "mean"}, _modernbert),
    "llama": Family("LlamaConfig", _FEW_KEYS, _llama),
    "vit": Family("ViTConfig", _VIT, _vit),
}


def language_model(name: str = "llama", **changes: Any) -> Any:
    """In the dtype of the family, without dropout."""
    return _make({**LANGUAGE_MODELS, **MIXTURES}[name], "AutoModelForCausalLM", **changes)


def classifier(name: str = "bert", **changes: Any) -> Any:
    """In the dtype of the family, without dropout."""
    head = "AutoModelForImageClassification" if name == "vit" else "AutoModelForSequenceClassification"
    return _make(CLASSIFIERS[name], head, **{"num_labels": CLASSES, "pad_token_id": 1, **changes})


def _make(family: Family, head: str, **changes: Any) -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    # The defaults are tokens of the real vocabularies, out of range here.
    special = {"bos_token_id": 2, "eos_token_id": 2, "cls_token_id": 2, "sep_token_id": 2, "pad_token_id": 1}
    config = getattr(transformers, family.config)(**{**family.settings, **special, **changes})
    config._experts_implementation = "eager"  # torch's grouped product knows no float64
    # Eager attention: that of torch has a dropout which is no module, and in transformers 4.48 masks that overflow.
    model = getattr(transformers, head).from_config(config, attn_implementation="eager").to(family.dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # away from the small and equal values they start at
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def tokens(batch: int = 3, length: int = 7, seed: int = 1) -> dict[str, Tensor]:
    """Inputs and labels of a language model; the first row is padded on the right, and its prompt does not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    labels = ids.clone()
    labels[0, -2:] = -100
    labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def rows(name: str = "bert", batch: int = 4, length: int = 7) -> dict[str, Tensor]:
    """Inputs and labels of a classifier; the first row is padded, and the last one does not count."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(batch) % CLASSES
    labels[-1] = -100
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64), "labels": labels}
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    ids[0, -2:] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def eager_losses(model: Any, family: Family, inputs: dict[str, Tensor], labels_shifted: bool) -> Tensor:
    """The mean cross-entropy of every depth `[L+1]`, with all logits held; differentiable."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    base = model.base_model(**given, output_hidden_states=True)
    # Which of the two the last of hidden_states is, before the final norm or after it, differs between models.
    states = [*base.hidden_states[:-1], base.last_hidden_state]
    losses = []
    for depth, state in enumerate(states):
        logits, labels = family.read(model, state, inputs, depth == len(states) - 1), inputs["labels"]
        if labels_shifted:
            logits, labels = model.get_output_embeddings()(logits)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            logits = logits / getattr(model.config, "logits_scaling", 1.0)
            if getattr(model.config, "final_logit_softcapping", None) is not None:
                cap = model.config.final_logit_softcapping
                logits = cap * torch.tanh(logits / cap)
        losses.append(nn.functional.cross_entropy(logits, labels, ignore_index=-100))
    return torch.stack(losses)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of all parameters, by name; zeros where there is none."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def expected(
    model: Any, family: Family, inputs: dict[str, Tensor], weights: Sequence[float], labels_shifted: bool
) -> tuple[Tensor, Tensor, int, dict[str, Tensor]]:
    """Mean losses, weighted loss, count and gradients of the eager loop."""
    labels = inputs["labels"][:, 1:] if labels_shifted else inputs["labels"]
    count = int((labels != -100).sum())
    losses = eager_losses(model, family, inputs, labels_shifted)
    loss = torch.dot(torch.tensor(weights, dtype=losses.dtype), losses)
    return losses.detach(), loss.detach(), count, gradients(model, loss)
