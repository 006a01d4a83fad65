"""Which implementation of an op runs: plain torch, or a Triton kernel where one fits.

The public function of an op asks once, and hands the answer on with its arguments: to the operator, to the shapes that
torch.compile is told, and to the gradient. torch.compile guards the setting that it has read there: a function that was
compiled is compiled anew after `use_backend`.
"""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from cdt_fast.checks import check_choice
from cdt_fast.errors import InputError
from cdt_fast.kernels import cards
from cdt_fast.kernels.arguments import Backend
from cdt_fast.kernels.launch import KernelError

Setting = Literal["auto", "triton", "torch"]
_setting: Setting = "auto"


# Ops of which a kernel did not run on the card: plain torch takes their place under "auto" from then on.
_given_up: set[str] = set()


class use_backend:
    """Choose the implementation of every op: `ops.use_backend("torch")`, or `with ops.use_backend("torch"): …`.

    The call sets it for the whole process; leaving a `with` block restores what was set before.

    Args:
        backend: "auto" (a Triton kernel where one fits and is the faster one, else torch), "torch", or "triton" (an
            error where no kernel can run).

    Raises:
        InputError: an unknown name, or "triton" where no kernel can run; the message says why.
    """

    def __init__(self, backend: Setting) -> None:
        global _setting
        check_choice("backend", backend, get_args(Setting))
        reason = cards.unavailable_reason()
        if backend == "triton" and reason is not None:
            raise InputError(f"backend 'triton' cannot be used here: {reason}. 'auto' and 'torch' can")
        self._previous: Setting = _setting
        _setting = backend

    def __enter__(self) -> use_backend:
        return self

    def __exit__(self, *error: object) -> None:
        global _setting
        _setting = self._previous


def choose_backend(op: str, *tensors: Tensor, multiplies: bool = False) -> Backend:
    """Whether `op` runs its Triton kernels on these tensors, or plain torch; the one place that decides.

    Where the kernels multiply matrices and there are no tensor cores cuBLAS is faster: then only "triton" chooses them.
    """
    if _setting == "torch" or (_setting == "auto" and op in _given_up):
        return "torch"
    for tensor in tensors:
        reason = cards.unsupported_reason(tensor.device, tensor.dtype)
        if reason is None:
            continue
        if _setting == "triton":
            raise InputError(f"backend 'triton' cannot run {op} here: {reason}. 'auto' and 'torch' can")
        return "torch"
    if _setting == "auto" and multiplies and any(cards.without_tensor_cores(tensor.dtype) for tensor in tensors):
        return "torch"
    return "triton"


def give_up(op: str, error: KernelError) -> bool:
    """Whether plain torch takes the place of the kernels of `op`, one of which does not run on the card: under "auto",
    with one warning."""
    if _setting == "triton":
        return False
    if op not in _given_up:
        _given_up.add(op)
        warnings.warn(f"{op} is computed by plain torch from now on: {error}", RuntimeWarning, stacklevel=2)
    return True


def explain() -> str:
    """Which implementation runs now, and why, in one line."""
    if _setting == "torch":
        return "torch (chosen by use_backend)"
    reason = cards.unavailable_reason()
    if reason is not None:
        return f"torch ({reason})"
    if cards.interpreting():
        return "triton (in its interpreter, on the CPU)"
    refused = cards.unsupported_reason(torch.device("cuda", torch.cuda.current_device()), torch.float32)
    if refused is not None:
        return f"torch ({refused})"
    card = cards.spec_of(torch.device("cuda", torch.cuda.current_device()))
    without = "; products of float32 on torch, as TF32 is off" if cards.without_tensor_cores(torch.float32) else ""
    return f"triton (blocks for {card.family} cards, {card.shared_memory // 1024} KiB of shared memory{without})"
