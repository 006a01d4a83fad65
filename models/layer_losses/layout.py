"""The modules of a transformers model: its layers, what follows the last one, and the head that all depths share."""

import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.ops.common import describe

# Endings of class names, and whether such a model reads tokens.
_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForTokenClassification")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_ENDINGS = dict.fromkeys(_CLASSIFIERS, False) | dict.fromkeys(_LANGUAGE_MODELS, True)
# What may stand between the last layer and the head: a norm, a projection. The first forward shows whether it does.
_TAIL = (
    *("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "final_norm", "layernorm", "layer_norm"),
    *("ln", "LayerNorm", "output_layernorm", "embedding_norm", "emb_layer_norm_after", "out_norm", "post_layernorm"),
    "project_out",
)
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma 2, RecurrentGemma, xLSTM
# Cohere (which keeps a copy of its own), Falcon-H1 and Granite; the last one divides.
_SCALES = (("logit_scale", 1), ("lm_head_multiplier", 1), ("logits_scaling", -1))

_Modules = tuple[nn.Module, ...]


@dataclass(frozen=True)
class Layout:
    """The modules of a model, and how it turns the output of the last layer into a loss."""

    reads_tokens: bool  # a causal language model; else a classifier
    labels_tokens: bool  # a language model or a classifier of tokens, with a label a token; else one with one a row
    model: nn.Module  # the module whose forward has `labels`
    base: nn.Module  # the part of it that returns hidden states
    layers: _Modules
    tail: _Modules  # what `base` may apply to the output of the last layer; a reader's: what it does, in this order
    head: nn.Module  # the linear map to the logits, as `model` calls it
    classes: int  # V, the number of its outputs
    scale: float  # the factor of the logits
    softcap: float | None  # c of `c · tanh(logits / c)`
    shifts_labels: bool  # the target of a token is the label of the next one; else, and for a classifier, its own
    loss_function: Any  # of transformers or the user's own: another one is to be compared again

    def features(self, state: Tensor) -> Tensor:
        """Return a state as `base` returns the last one."""
        for module in self.tail:
            state = module(state)
        return state

    def logits(self, logits: Tensor) -> Tensor:
        """Return what the model makes of the logits of its head."""
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def unsupported(model: Any, reason: str) -> InputError:
    """Return the error for a model whose depths cannot be read."""
    return InputError(f"no layer losses for a {type(model).__name__}: {reason}")


def find_layout(wrapped: Any) -> Layout:
    """Return the layout of a transformers model, also of one in a wrapper of torch, accelerate or peft."""
    model = _unwrapped(wrapped)
    names = [ancestor.__name__ for ancestor in type(model).__mro__]  # FSDP2 makes a subclass of each model
    kinds = [reads for name in names for ending, reads in _ENDINGS.items() if name.endswith(ending)]
    config, base = getattr(model, "config", None), getattr(model, "base_model", None)
    if not kinds or config is None or not isinstance(base, nn.Module):
        raise unsupported(model, f"only transformers' {', '.join(f'…{ending}' for ending in _ENDINGS)} are supported")
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(model, "it has an encoder and a decoder, whose layers do not refine one and the same state")
    reads_tokens, part = kinds[0], config
    # Of a model with parts for texts and for pictures, the part that is read.
    if any(name.endswith("ForImageClassification") for name in names):
        part = getattr(config, "vision_config", config)
    elif hasattr(config, "get_text_config"):
        part = config.get_text_config()
    # The decoder alone of Bart and others: their num_hidden_layers is that of the encoder.
    counts = (*(("decoder_layers", "num_decoder_layers") if reads_tokens else ()), "num_hidden_layers")
    path, layers = _layers(model, base, next((getattr(part, name) for name in counts if hasattr(part, name)), None))
    if base is model:  # its own prefix names no part of it
        base = path[1]
    head = _head_of_language_model(model) if reads_tokens else _head_of_classifier(model, base, config)
    owned = [child for owner in reversed(path) for child in owner.named_children()]
    caps = [getattr(part, name, None) for name in _SOFTCAPS if reads_tokens]
    scales = [(getattr(model, name, getattr(part, name, None)), power) for name, power in _SCALES if reads_tokens]
    return Layout(
        reads_tokens=reads_tokens,
        labels_tokens=reads_tokens or any(name.endswith("ForTokenClassification") for name in names),
        model=model,
        base=base,
        layers=layers,
        tail=tuple(child for name, child in owned if name in _TAIL),
        head=head,
        classes=outputs_of(in_use(head)),
        scale=math.prod((float(scale) ** power for scale, power in scales if isinstance(scale, Real)), start=1.0),
        softcap=next((float(cap) for cap in caps if cap is not None), None),
        shifts_labels=reads_tokens and _shifts_labels(type(model)),
        loss_function=getattr(model, "loss_function", None),
    )


def _unwrapped(model: Any) -> Any:
    while True:
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):  # peft
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module) and not hasattr(type(model), "config_class"):
            model = model.module  # DDP, FSDP
        else:
            return model


def _layers(model: nn.Module, base: nn.Module, expected: int | None) -> tuple[_Modules, _Modules]:
    """Return the modules from `base` down to the one that owns the layers, and the layers."""
    if expected is None:
        raise unsupported(model, "its configuration states no num_hidden_layers: it is no plain stack of layers")
    lists = [(path, layers) for path, layers in _lists(base, ()) if len(layers) == expected]
    if len(lists) != 1:
        held = f"it holds {len(lists)} lists of {expected} layers (num_hidden_layers)"
        raise unsupported(model, f"{held}, and which modules its depths lie between is known for one alone")
    path, layers = lists[0]
    if base is model and len(path) == 1:
        raise unsupported(model, "its layers are its own children, and not those of a base model")
    return path, tuple(layers)


def _lists(module: nn.Module, path: _Modules) -> Iterator[tuple[_Modules, nn.ModuleList]]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield (*path, module), child  # lists inside of its items are experts or parts of a layer
        else:
            yield from _lists(child, (*path, module))


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
    problem, classes = getattr(config, "problem_type", None), config.num_labels
    if classes < 2 or problem not in (None, "single_label_classification"):
        given, expected = f"num_labels={classes} and problem_type={problem!r}", "classification with one label a row"
        raise unsupported(model, f"it has {given}; expected {expected} and at least 2 classes")
    beside = (child for child in model.children() if child is not base)
    linear = [module for child in beside for module in linear_maps(child) if outputs_of(module) == classes]
    if not linear:
        raise unsupported(model, f"it has no linear map to its {classes} classes outside of its base model")
    return linear[-1]  # a dense layer of the same size stands before it


@functools.cache
def _shifts_labels(kind: type) -> bool:
    """Return whether the target of a token is the label of the next one, as in most models, or its own, as in Bart's.
    The forward's source says it: it calls transformers' `loss_function`, or leaves out the last logits (`:-1`)."""
    for ancestor in kind.__mro__:
        try:
            source = inspect.getsource(vars(ancestor)["forward"])
        except (KeyError, OSError, TypeError):  # it has none of its own, or without a source
            continue
        if "loss_function(" in source or "CrossEntropyLoss" in source:
            return "loss_function(" in source or ":-1" in source
    return True


def linear_maps(module: nn.Module) -> list[nn.Module]:
    """Return the linear maps inside of `module`, in the order of their registration."""
    module = in_use(module)
    if is_linear(module):
        return [module]
    return [linear for child in module.children() for linear in linear_maps(child)]


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is x Wᵀ + b, maybe with an adapter of peft around it."""
    return isinstance(getattr(module, "base_layer", module), nn.Linear)


def in_use(module: nn.Module) -> nn.Module:
    """Return `module`, or the copy that peft trains in its place (`modules_to_save`)."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):  # what else has an original_module (peft's trained tokens) changes it
        return module
    if getattr(module, "disable_adapters", False):
        return module.original_module  # type: ignore[return-value]
    active = getattr(module, "active_adapters", None) or list(copies)
    return copies[active[0] if active[0] in copies else next(iter(copies))]


def outputs_of(linear: nn.Module) -> int:
    """Return V, the number of outputs of a linear map."""
    base: Any = getattr(linear, "base_layer", linear)
    # The weight goes before what the module says of it, unless it is sharded flat or quantized.
    matrix = base.weight.dim() == 2 and base.weight.is_floating_point()
    return base.weight.shape[0] if matrix else base.out_features


def weight_and_bias(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight `[V, d]` and bias `[V]` of a linear map; where FSDP2 shards it, only within its call."""
    if hasattr(linear, "base_layer"):
        remedy = "leave it out of target_modules, or train a copy of it with modules_to_save"
        raise InputError(f"the head must have no adapter, as all depths share its weight: {remedy}")
    weight, bias = linear.weight, linear.bias
    if not weight.is_floating_point() or weight.dim() != 2:
        given = f"{describe(weight)} in {type(linear).__name__}"
        raise InputError(f"the head's weight must be a floating-point matrix, got {given}: do not quantize the head")
    if type(linear).forward is not nn.Linear.forward:
        raise InputError(f"the head must be a plain nn.Linear: {type(linear).__name__} has a forward of its own")
    if weight.is_meta:
        raise InputError(f"the head must stay on a device, got {describe(weight)}: do not offload it (device_map)")
    return weight, bias
