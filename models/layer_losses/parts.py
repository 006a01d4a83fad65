"""Which modules of a transformers model are its layers, what reads its last layer, and what it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.heads import in_use, is_linear, linear_maps, size_of_linear

LANGUAGE_MODEL = "causal language model"
CLASSIFIER = "classifier"
SUPPORTED = (
    "supported are transformers' …ForSequenceClassification, …ForImageClassification, …ForCausalLM and …LMHeadModel "
    "models"
)

_KINDS = {
    "ForSequenceClassification": CLASSIFIER,
    "ForImageClassification": CLASSIFIER,
    "ForCausalLM": LANGUAGE_MODEL,
    "LMHeadModel": LANGUAGE_MODEL,
}
# What may stand between the last layer and the head, in the order in which it is applied. That nothing else stands
# there is checked with values, in the first forward.
_TAIL = (
    (
        *("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "final_norm", "layernorm", "layer_norm"),
        *("ln", "LayerNorm", "output_layernorm", "embedding_norm", "emb_layer_norm_after", "out_norm"),
    ),
    ("project_out",),
)
_PROBLEMS = (None, "single_label_classification")
_SHIFT_TOKENS = 5


@dataclass(frozen=True)
class ModelParts:
    """The modules that matter.

    Attributes:
        kind: LANGUAGE_MODEL or CLASSIFIER.
        model: the one whose forward has `labels`.
        base: the part of it that returns hidden states.
        layers: L modules, one a layer.
        tail: what `base` applies to the output of the last layer, in this order.
        head: the linear map to the logits, as `model` calls it.
        classes: V, the number of its outputs.
        scale: what the model multiplies the logits by.
        softcap: c of `c · tanh(logits / c)`, or None.
        shifts_labels: the target of a token is the label of the next one; else, and for a classifier, its own.
    """

    kind: str
    model: nn.Module
    base: nn.Module
    layers: tuple[nn.Module, ...]
    tail: tuple[nn.Module, ...]
    head: nn.Module
    classes: int
    scale: float
    softcap: float | None
    shifts_labels: bool

    def read(self, state: Tensor) -> Tensor:
        """A state as the head is given the last one."""
        for module in self.tail:
            state = module(state)
        return state

    def capped(self, logits: Tensor) -> Tensor:
        """What the model makes of the logits of its head."""
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def pool(self, state: Tensor) -> Tensor | None:
        """What `base` pools from a last state; None where that is no module of its own and no head needs it."""
        pooler: Any = getattr(self.base, "pooler", None)
        return pooler(state) if isinstance(pooler, nn.Module) else None


def unsupported(model: Any, reason: str) -> InputError:
    """The error for a model whose depths cannot be read."""
    return InputError(f"no layer losses for a {type(model).__name__}: {reason}")


def find_parts(wrapped: Any) -> ModelParts:
    """The parts of a model, also of one in a wrapper of torch, accelerate or peft.

    Raises:
        InputError: it is no model of transformers with a head that is known; the message names its class.
    """
    model = _unwrapped(wrapped)
    kind = _kind(model)
    config: Any = getattr(model, "config", None)
    base: Any = getattr(model, "base_model", None)
    if kind is None or config is None or not isinstance(base, nn.Module):
        raise unsupported(model, f"it has no loss of labels that its depths could have too; {SUPPORTED}")
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(model, "it has an encoder and a decoder, whose layers do not refine one and the same state")
    modules = _modules(kind, model)
    readout = _readout(kind, model, modules["head"])
    shifted = kind == LANGUAGE_MODEL and shifts_labels(model, modules["head"], readout["classes"])
    return ModelParts(kind=kind, model=model, **modules, **readout, shifts_labels=shifted)


def parts_now(parts: ModelParts) -> ModelParts:
    """The same parts with the classes (which `resize_token_embeddings` changes), scale and softcap of the model now.

    Raises:
        InputError: another base model, layer, norm or head stands in the place of one that was there when the losses
            were attached. One in a wrapper (torch.compile's, checkpointing's) is still that one, but for norm and head.
    """
    name = type(parts.model).__name__
    remedy = "call remove() before that, and attach after"
    try:
        now = _modules(parts.kind, parts.model)
    except InputError as error:
        raise InputError(f"this {name} was changed after attach_layer_losses ({error}): {remedy}") from error
    same = {
        "base model": _holds(now["base"], parts.base),
        "list of layers": len(now["layers"]) == len(parts.layers) and all(map(_holds, now["layers"], parts.layers)),
        "last norm": now["tail"] == parts.tail,
        "head": now["head"] is parts.head,
    }
    for what, is_same in same.items():
        if not is_same:
            raise InputError(
                f"the {what} of this {name} was replaced after attach_layer_losses (peft does so, for an adapter on "
                f"it and in merge_and_unload): {remedy}"
            )
    return replace(parts, **_readout(parts.kind, parts.model, parts.head))


def _holds(wrapper: nn.Module, module: nn.Module) -> bool:
    return wrapper is module or any(module is inner for inner in wrapper.modules())


def _modules(kind: str, model: Any) -> dict[str, Any]:
    """The fields of `ModelParts` that are modules of `model`."""
    base = model.base_model
    path, layers = _layers(model, base, _number_of_layers(kind, _config_of_layers(model, model.config)))
    if base is model:  # its own prefix names no part of it
        base = path[1]
    head = _head_of_classifier(model, base, model.config) if kind == CLASSIFIER else _head_of_language_model(model)
    return {"base": base, "layers": layers, "tail": tuple(_tail(path)), "head": head}


def _readout(kind: str, model: Any, head: nn.Module) -> dict[str, Any]:
    """The fields of `ModelParts` that are numbers."""
    reads_tokens, config = kind == LANGUAGE_MODEL, _config_of_layers(model, model.config)
    return {
        "classes": size_of_linear(in_use(head))[0],
        "scale": _scale(model, config) if reads_tokens else 1.0,
        "softcap": _softcap(config) if reads_tokens else None,
    }


def check_taps(taps: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """The depths to read, counted from 0, the input of the first layer, to L, the output of the last.

    Raises:
        InputError: there is none, one is out of range, or they do not increase.
    """
    if taps is None:
        return tuple(range(layers + 1))
    if isinstance(taps, str) or not isinstance(taps, Sequence) or not taps:
        raise InputError(f"taps must be a list of depths between 0 and {layers}, or None for all, got {taps!r}")
    for tap in taps:
        if not isinstance(tap, Integral) or isinstance(tap, bool) or not -layers - 1 <= tap <= layers:
            raise InputError(
                f"taps must be depths between 0 and {layers}, the number of layers, or from -1 to {-layers - 1}, "
                f"counted from the last, got {tap!r}"
            )
    depths = [int(tap) % (layers + 1) for tap in taps]
    if any(first >= second for first, second in itertools.pairwise(depths)):
        raise InputError(f"taps must be increasing depths without repetition, got {list(taps)}")
    return tuple(depths)


def _unwrapped(model: Any) -> Any:
    while True:
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):  # peft
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module) and not hasattr(model, "config_class"):  # DDP, FSDP
            model = model.module
        else:
            return model


def _kind(model: Any) -> str | None:
    # The classes that it inherits from count too: FSDP2 makes a subclass of each model that it shards.
    for ancestor in type(model).__mro__:
        for ending, kind in _KINDS.items():
            if ancestor.__name__.endswith(ending):
                return kind
    return None


def _layers(
    model: nn.Module, base: nn.Module, expected: int | None
) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """The modules from `base` down to the one that owns the layers, and the layers."""
    if expected is None:
        raise unsupported(model, "its configuration states no num_hidden_layers: it is no plain stack of layers")
    lists = [(path, layers) for path, layers in _lists(base, ()) if len(layers) == expected]
    if len(lists) != 1:
        raise unsupported(
            model,
            f"it holds {len(lists)} lists of {expected} layers (num_hidden_layers), and which modules its depths lie "
            "between is known for one alone",
        )
    path, layers = lists[0]
    if base is model and len(path) == 1:
        raise unsupported(model, "its layers are its own children, and not those of a base model")
    return path, tuple(layers)


def _config_of_layers(model: nn.Module, config: Any) -> Any:
    """The configuration of the part that is read, where a model has parts for texts and for pictures."""
    if any(ancestor.__name__.endswith("ForImageClassification") for ancestor in type(model).__mro__):
        return getattr(config, "vision_config", config)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _number_of_layers(kind: str, config: Any) -> int | None:
    # The decoder alone of Bart and others: their num_hidden_layers is that of the encoder.
    names = ("decoder_layers", "num_decoder_layers") if kind == LANGUAGE_MODEL else ()
    return next((getattr(config, name) for name in (*names, "num_hidden_layers") if hasattr(config, name)), None)


def _lists(module: nn.Module, path: tuple[nn.Module, ...]) -> Iterator[tuple[tuple[nn.Module, ...], nn.ModuleList]]:
    path = (*path, module)
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield path, child  # lists inside of its items are experts or parts of a layer
        else:
            yield from _lists(child, path)


def _tail(path: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for names in _TAIL:
        for owner in reversed(path):
            yield from (child for name, child in owner.named_children() if name in names)


def _head_of_language_model(model: Any) -> nn.Module:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise unsupported(model, "it has no output embeddings")
    if not is_linear(in_use(head)):
        raise unsupported(model, f"its head is a {type(in_use(head)).__name__}, and not one linear map")
    if head not in model.children():
        owners = [type(child).__name__ for child in model.children() if head in child.modules()]
        raise unsupported(model, f"its head ({', '.join(owners)}) is more than one linear map")
    return head


def _head_of_classifier(model: nn.Module, base: nn.Module, config: Any) -> nn.Module:
    problem = getattr(config, "problem_type", None)
    if config.num_labels < 2 or problem not in _PROBLEMS:
        raise unsupported(
            model,
            f"it has num_labels={config.num_labels} and problem_type={problem!r}; expected classification with one "
            "label a row and at least 2 classes",
        )
    linear = [
        module
        for child in model.children()
        if child is not base
        for module in linear_maps(child)
        if size_of_linear(module)[0] == config.num_labels
    ]
    if not linear:
        raise unsupported(model, f"it has no linear map to its {config.num_labels} classes outside of its base model")
    return linear[-1]  # a dense layer of the same size stands before it


def _softcap(config: Any) -> float | None:
    """What Gemma 2 and RecurrentGemma bound their logits by, under the names that they have for it."""
    caps = (
        getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    )
    return next((float(cap) for cap in caps if cap is not None), None)


def _scale(model: nn.Module, config: Any) -> float:
    """What Cohere, Granite and Falcon-H1 multiply their logits by; Cohere keeps a copy of its own."""
    scale = 1.0
    for name, power in (("logit_scale", 1), ("lm_head_multiplier", 1), ("logits_scaling", -1)):
        value = getattr(model, name, getattr(config, name, None))
        if isinstance(value, Real):
            scale *= float(value) ** power
    return scale


def shifts_labels(model: Any, head: nn.Module, classes: int) -> bool:
    """Whether the target of a token is the label of the next one, as in most models, or its own, as in Bart's decoder.

    The forward of the model's class runs on a copy whose parts are stand-ins: they return zeros, and the head returns
    logits that tell the two apart. No parameter is read, so that the model may be sharded or on the meta device.
    Where that forward asks for more than stand-ins can give, the answer is yes; the first forward with labels compares
    the losses.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, _SHIFT_TOKENS, classes, generator=generator)
    labels = torch.arange(_SHIFT_TOKENS).remainder(classes).unsqueeze(0)
    twin = object.__new__(type(model))  # not copy.copy: FSDP2's classes cannot be copied
    parts = {name: part and _StandIn(part, head, logits) for name, part in model._modules.items()}
    vars(twin).update({**vars(model), "_modules": parts})
    try:
        with torch.no_grad():
            output = type(model).forward(twin, input_ids=torch.zeros_like(labels), labels=labels, return_dict=True)
        loss, logits = output["loss"].float(), output["logits"].float()
    except Exception:  # any: the code is not ours
        return True
    own = nn.functional.cross_entropy(logits[0], labels[0])
    shifted = nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
    return bool((loss - shifted).abs() <= (loss - own).abs())


class _StandIn:
    """In the place of a module, with its attributes and parts: answers with logits for the head, else with zeros."""

    def __init__(self, module: nn.Module, head: nn.Module, logits: Tensor) -> None:
        self._module, self._head, self._logits = module, head, logits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._logits if self._module is self._head else _Output((self._logits.new_zeros(1, _SHIFT_TOKENS, 1),))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _StandIn(value, self._head, self._logits) if isinstance(value, nn.Module) else value


class _Output(tuple[Tensor]):
    """Of a base model: states alone, under the names and the numbers by which a forward may ask for them."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
