"""The head's linear map as one weight and bias."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cdt_fast.checks import InputError


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
    """Return weight `[V, d]` and bias `[V]` of a linear map, differentiable and gathered where they are sharded.

    Raises:
        InputError: the map has an adapter, or its weight is quantized.
    """
    if hasattr(linear, "base_layer"):
        raise InputError(
            "the head must have no adapter, as all depths share its weight: leave it out of target_modules, or train "
            "a copy of it with modules_to_save"
        )
    weight, bias = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in (linear.weight, linear.bias))
    if not weight.is_floating_point() or weight.dim() != 2:
        raise InputError(
            f"the head's weight must be a floating-point matrix, got {tuple(weight.shape)} {weight.dtype} in "
            f"{type(linear).__name__}: leave the head out of the quantization"
        )
    return weight, bias
