"""Which implementation of an op runs: plain torch, or a Triton kernel where one fits."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from cdt_fast import kernels
from cdt_fast.checks import check_choice
from cdt_fast.errors import InputError

BACKENDS = ("auto", "triton", "torch")
_setting = "auto"


class use_backend:
    """Choose the implementation of every op: `ops.use_backend("torch")`, or `with ops.use_backend("torch"): …`.

    The call sets it for the whole process; leaving a `with` block restores what was set before.

    Args:
        backend: "auto" (a Triton kernel where one fits and is the faster one, else torch), "torch", or "triton" (an
            error where no kernel can run).

    Raises:
        InputError: an unknown name, or "triton" where no kernel can run; the message says why.
    """

    def __init__(self, backend: str) -> None:
        global _setting
        check_choice("backend", backend, BACKENDS)
        reason = kernels.unavailable_reason()
        if backend == "triton" and reason is not None:
            raise InputError(f"backend 'triton' cannot be used here: {reason}. 'auto' and 'torch' can")
        self._previous, _setting = _setting, backend

    def __enter__(self) -> use_backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _setting
        _setting = self._previous


def runs_on_triton(
    op: str, tensor: Tensor, refusal: Callable[[], str | None] | None = None, *, multiplies: bool = False
) -> bool:
    """Whether `op` runs its Triton kernels on tensors like `tensor`, else plain torch; the one place that decides.

    Args:
        op: the public name of the op, for the error.
        tensor: an argument, of the device and the dtype that the products run in.
        refusal: why the op's own kernels cannot take these arguments, or None where they can. Asked last.
        multiplies: whether the kernels multiply matrices. Without tensor cores cuBLAS does it faster, and only "triton"
            chooses the kernels.

    Raises:
        InputError: the backend is "triton" and a kernel cannot run; the message says why.
    """
    if _setting == "torch":
        return False
    reason = kernels.unsupported_reason(tensor.device, tensor.dtype) or (None if refusal is None else refusal())
    if reason is None:
        return _setting == "triton" or not (multiplies and kernels.without_tensor_cores(tensor.dtype))
    if _setting == "triton":
        raise InputError(f"backend 'triton' cannot run {op} here: {reason}. 'auto' and 'torch' can")
    return False


def explain() -> str:
    """Which implementation runs now, and why, in one line."""
    if _setting == "torch":
        return "torch (chosen by use_backend)"
    reason = kernels.unavailable_reason()
    if reason is not None:
        return f"torch ({reason})"
    if kernels.interpreting():
        return "triton (in its interpreter, on the CPU)"
    refused = kernels.unsupported_reason(torch.device("cuda", torch.cuda.current_device()), torch.float32)
    if refused is not None:
        return f"torch ({refused})"
    from cdt_fast.kernels.launch import card_of

    card = card_of(torch.empty(0, device="cuda"))
    without = "; products of float32 on torch, as TF32 is off" if kernels.without_tensor_cores(torch.float32) else ""
    return f"triton (blocks for {card.family} cards, {card.shared_memory // 1024} KiB of shared memory{without})"
