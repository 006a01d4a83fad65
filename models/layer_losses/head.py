"""The linear map of a head as one weight and bias, also where an adapter or a sharding is around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from cdt_fast.checks import InputError


def linear_maps(module: nn.Module) -> Iterator[nn.Module]:
    """The linear maps inside of `module`, in the order of their registration; one with an adapter counts as one."""
    module = in_use(module)
    if is_linear(module):
        yield module
        return
    for child in module.children():
        yield from linear_maps(child)


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is x Wᵀ + b, with or without a low-rank adapter."""
    return isinstance(getattr(module, "base_layer", module), nn.Linear)


def in_use(module: nn.Module) -> nn.Module:
    """`module`, or the copy that peft trains in its place (`modules_to_save`)."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):  # what else has an original_module (peft's trained tokens) changes it
        return module
    if getattr(module, "disable_adapters", False):
        return module.original_module  # type: ignore[return-value]
    active = getattr(module, "active_adapters", None) or list(copies)
    return copies[active[0] if active[0] in copies else next(iter(copies))]


def outputs_of(linear: nn.Module) -> int:
    """V, the number of its outputs."""
    base: Any = getattr(linear, "base_layer", linear)
    # The weight goes before what the module says of it, but where it is sharded flat or quantized.
    matrix = base.weight.dim() == 2 and base.weight.is_floating_point()
    return base.weight.shape[0] if matrix else base.out_features


def effective_linear(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight `[V, d]` and bias `[V]` of a linear map, whole and differentiable, whatever is around it.

    A low-rank adapter adds `s · B A`, a sharded weight is gathered.

    Raises:
        InputError: the weight is quantized, or the adapter is no plain product of two matrices.
    """
    base: Any = getattr(linear, "base_layer", linear)
    weight, bias = _gathered(base.weight), None if base.bias is None else _gathered(base.bias)
    if not weight.is_floating_point() or weight.dim() != 2:
        raise InputError(
            f"the head's weight must be a floating-point matrix, got {tuple(weight.shape)} {weight.dtype} in "
            f"{type(base).__name__}: leave the head out of the quantization"
        )
    if base is linear or getattr(linear, "disable_adapters", False) or getattr(linear, "merged", False):
        return weight, bias
    adapted: Any = linear
    if not isinstance(getattr(adapted, "lora_A", None), nn.ModuleDict):
        raise InputError(
            f"the adapter of the head is a {type(adapted).__name__}: use plain LoRA there, or leave the head out"
        )
    for name in (name for name in adapted.active_adapters if name in adapted.lora_A):
        if name in (getattr(adapted, "lora_variant", None) or {}) or getattr(adapted, "use_dora", {}).get(name):
            raise InputError(
                f"the adapter {name!r} of the head is no plain LoRA: use plain LoRA there, or leave the head out"
            )
        dropout = adapted.lora_dropout[name] if name in getattr(adapted, "lora_dropout", {}) else None
        if isinstance(dropout, nn.Dropout) and dropout.p > 0 and dropout.training:
            raise InputError(
                f"the adapter {name!r} of the head has a dropout of {dropout.p}, which acts on its input and is no "
                "part of one shared weight: set lora_dropout=0, or leave the head out of the adapter"
            )
        down, up, scaling = adapted.lora_A[name], adapted.lora_B[name], adapted.scaling[name]
        weight = weight + (scaling * (_gathered(up.weight) @ _gathered(down.weight))).to(weight.dtype)
        if up.bias is not None:
            of_adapter = (scaling * _gathered(up.bias)).to(weight.dtype)
            bias = of_adapter if bias is None else bias + of_adapter
    return weight, bias


def _gathered(parameter: Any) -> Tensor:
    """A DTensor gathered, any other tensor as it is."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
