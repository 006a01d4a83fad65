"""What the ops check: their arguments, each with one clear error, and autocast and transforms that are in force."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from cdt_fast.checks import check_choice, check_non_negative, check_number
from cdt_fast.errors import InputError

LARGEST_FACTOR = torch.finfo(torch.float32).max
# What a layer may have between its products.
LayerNonlinearity = Literal["soft_threshold", "hard_threshold", "relu"]
_LAYER_NONLINEARITIES = get_args(LayerNonlinearity)


def describe(value: Any) -> str:
    """A short description of a value for an error message."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{layout} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def check_tensor(name: str, value: Any, rank: int, layout: str) -> None:
    """Require a dense floating-point tensor of at least `rank` dimensions; `layout` is its shape, in words."""
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    if not dense or not value.is_floating_point() or value.dim() < rank:
        raise InputError(f"{name} must be a dense floating-point tensor {layout}, got {describe(value)}")


def check_shape(name: str, value: Tensor, shape: tuple[int, ...], layout: str) -> None:
    """Require the shape `shape`; `layout` says in names where it comes from."""
    if tuple(value.shape) != shape:
        raise InputError(f"{name} must have shape {shape} ({layout}), got {tuple(value.shape)}")


def check_together(**tensors: Tensor | None) -> None:
    """Require one device, and outside of autocast one dtype, for all the tensors given."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(given.items()))
    for name, tensor in given.items():
        if tensor.device != first.device:
            raise InputError(f"{name} is on {tensor.device} but {first_name} is on {first.device}: move one of them")
        if tensor.dtype != first.dtype and not in_autocast(first):
            raise InputError(
                f"{name} is {tensor.dtype} but {first_name} is {first.dtype}: convert one of them, or use autocast"
            )


def check_factor(name: str, value: Any, *, non_negative: bool = False, dtype: torch.dtype = torch.float64) -> float:
    """Require a finite real number: a Python or NumPy number, or a tensor of one element on the CPU.

    In less than float64 it is multiplied with as a float32: then it has to be one that float32 holds.
    """
    if isinstance(value, Tensor):
        # A tensor on the device would have to be waited for, and its gradient would be lost without a word.
        if value.numel() != 1 or value.device.type != "cpu" or value.requires_grad:
            raise InputError(f"{name} must be a number, got a tensor: {describe(value)}")
        value = value.item()
    factor = check_non_negative(name, value) if non_negative else check_number(name, value)
    if dtype != torch.float64 and abs(factor) > LARGEST_FACTOR:
        raise InputError(f"{name} must be a number that float32 holds, got {factor!r}")
    return factor


def check_flag(name: str, value: Any) -> bool:
    """Require True or False, NumPy's too."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise InputError(f"{name} must be True or False, got {describe(value)}")
    return bool(value)


def check_lista_arguments(
    codes: Tensor | None, signal: Tensor, dictionary: Tensor, nonlinearity: Any, rank: int = 1
) -> None:
    """The checks that `lista_step` and `unrolled_layer` share; `rank` is the least rank of codes and signal.

    Of `unrolled_layer`, of rank 2, codes may be None.
    """
    tokens = "[..., T, " if rank == 2 else "[..., "
    if codes is not None or rank == 1:
        check_tensor("codes", codes, rank, f"{tokens}m]")
    check_tensor("signal", signal, rank, f"{tokens}n]")
    check_tensor("dictionary", dictionary, 2, "[n, m]")
    if codes is None:
        check_shape("dictionary", dictionary, (signal.shape[-1], dictionary.shape[1]), "width of signal by any width")
    else:
        check_shape("dictionary", dictionary, (signal.shape[-1], codes.shape[-1]), "width of signal by width of codes")
        check_shape(
            "signal", signal, (*codes.shape[:-1], signal.shape[-1]), "the tokens of codes by the signal's width"
        )
    check_together(codes=codes, signal=signal, dictionary=dictionary)
    check_choice("nonlinearity", nonlinearity, _LAYER_NONLINEARITIES)


def check_lengths(lengths: Tensor | None, tokens: Tensor) -> None:
    """Require None, or an integer tensor of shape `tokens.shape[:-2]` on the device of `tokens` `[..., T, width]`."""
    if lengths is None:
        return
    integers = (torch.int16, torch.int32, torch.int64, torch.uint8, torch.int8)
    if not isinstance(lengths, Tensor) or lengths.dtype not in integers:
        raise InputError(f"lengths must be an integer tensor with one length a sequence, got {describe(lengths)}")
    check_shape("lengths", lengths, tuple(tokens.shape[:-2]), "one length a sequence")
    if lengths.device != tokens.device:
        raise InputError(f"lengths is on {lengths.device} but the tokens are on {tokens.device}: move one of them")


def length_of_each(lengths: Tensor | None) -> Tensor | None:
    """`[...]` → contiguous `[B]`, as the kernels read them, also where one length stands for all (stride 0).

    In at least int32: the number of tokens, which lengths are compared with, may be more than fewer bits hold.
    """
    if lengths is None:
        return None
    return lengths.to(torch.promote_types(lengths.dtype, torch.int32)).reshape(-1).contiguous()


def padding_mask(lengths: Tensor | None, tokens: Tensor) -> Tensor | None:
    """`[..., T]`, true at the tokens of `tokens` `[..., T, width]` that are padding, or None without lengths."""
    if lengths is None:
        return None
    return torch.arange(tokens.shape[-2], device=tokens.device) >= lengths.unsqueeze(-1)


def without_padding(tokens: Tensor, padding: Tensor | None) -> Tensor:
    """`tokens` with zeros at the padding, so that whatever stands there (NaN too) reaches no result and no gradient."""
    if padding is None:
        return tokens
    plain = type(tokens) is Tensor and not torch.compiler.is_compiling() and not inside_transform()
    if tokens.device.type == "cpu" and plain:
        # A mask that is broadcast is looked up number by number, at five times the cost of a copy.
        rows = tokens.reshape(padding.numel(), tokens.shape[-1])
        return rows.index_fill(0, padding.flatten().nonzero().squeeze(1), 0.0).view(tokens.shape)
    return tokens.masked_fill(padding.unsqueeze(-1), 0.0)


def clear_padding_(tokens: Tensor, padding: Tensor | None) -> Tensor:
    """`without_padding` in place of contiguous `tokens`: of a gradient, that 0 · NaN may have reached there."""
    if padding is None:
        return tokens
    if tokens.device.type == "cpu":  # as above
        rows = tokens.view(padding.numel(), tokens.shape[-1])
        rows.index_fill_(0, padding.flatten().nonzero().squeeze(1), 0.0)
        return tokens
    return tokens.masked_fill_(padding.unsqueeze(-1), 0.0)


def in_autocast(tensor: Tensor) -> bool:
    """Whether autocast is on for the device of the tensor; of a device that has none (meta) torch cannot be asked."""
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast off for the device of the tensor, in a backward too; where it is off already that costs nothing."""
    return torch.autocast(tensor.device.type, enabled=False) if in_autocast(tensor) else contextlib.nullcontext()


@torch.compiler.assume_constant_result  # torch.compile guards both by itself
def inside_transform() -> bool:
    """Whether a transform of torch.func or a level of forward mode is open: there an op is computed by its formula."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_transformed(tensor: Tensor) -> bool:
    """Whether the tensor is an argument of a transform or follows from one, or has a tangent."""
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype the products run in: autocast's where it is on, else that of `tensor`."""
    if tensor.dtype != torch.float64 and in_autocast(tensor):
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype


def sequences(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., T, width]` → contiguous `[B, T, width]` of `dtype`, also where a size is 0 (and -1 is ambiguous)."""
    if tokens.dim() == 3 and tokens.dtype == dtype and tokens.is_contiguous():
        return tokens
    *leading, count, width = tokens.shape
    return tokens.to(dtype).reshape(torch.Size(leading).numel(), count, width).contiguous()
