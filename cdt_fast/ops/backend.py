"""Which implementation of an op runs: plain torch, or a Triton kernel where one fits."""

from __future__ import annotations

from types import TracebackType

from cdt_fast import kernels
from cdt_fast.checks import check_choice
from cdt_fast.errors import InputError

BACKENDS = ("auto", "triton", "torch")
_setting = "auto"


class use_backend:
    """Choose the implementation of every op: `ops.use_backend("torch")`, or `with ops.use_backend("torch"): …`.

    The call sets it for the whole process; leaving a `with` block restores what was set before.

    Args:
        backend: "auto" (a Triton kernel where one fits, else torch), "torch", or "triton" (an error where no kernel
            can run).

    Raises:
        InputError: an unknown name, or "triton" where no kernel can run; the message says why.
    """

    def __init__(self, backend: str) -> None:
        global _setting
        check_choice("backend", backend, BACKENDS)
        reason = kernels.unavailable()
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


def explain() -> str:
    """Which implementation runs now, and why, in one line."""
    if _setting == "torch":
        return "torch (chosen by use_backend)"
    reason = kernels.unavailable()
    return "triton" if reason is None else f"torch ({reason})"
