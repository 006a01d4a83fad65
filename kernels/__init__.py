"""Triton kernels and their launchers, a file a kernel family; installed as `cdt_fast.kernels`.

A kernel's module needs Triton, and nothing else of `cdt_fast` but what is in this folder. Importing the package itself
needs neither Triton nor a GPU, and asks neither; `unavailable_reason` and `unsupported_reason` ask when called.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from typing import TypeVar

import torch

OLDEST_TRITON = (3, 4)
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Answer = TypeVar("Answer", bound=Callable[..., object])


def _constant(function: Answer) -> Answer:
    """`torch.compiler.assume_constant_result`, without the import of the compiler and of Triton that comes with it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def interpreting() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter: `TRITON_INTERPRET=1` when Triton was first imported."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@_constant
def unavailable_reason() -> str | None:
    """Why no kernel can run on this machine, or None where kernels can."""
    return _unavailable_reason()


@functools.cache
def _unavailable_reason() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    import triton

    version = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
    if version < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {triton.__version__} is too old: {oldest} or newer is needed"
    if interpreting():
        import numpy

        # Its loops over a range convert arrays of one element to a number, which NumPy has refused since.
        if version < (3, 7) and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
            return (
                f"Triton {triton.__version__}'s interpreter needs NumPy below 2.4, and {numpy.__version__} is installed"
            )
        return None
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs, and this torch is built for AMD's"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    return None


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel can run on tensors of this device and dtype, or None where kernels can."""
    reason = unavailable_reason()
    if reason is not None:
        return reason
    expected = "cpu" if interpreting() else "cuda"
    if device.type != expected:
        return f"the tensors are on {device} and the kernels run on {expected}"
    if dtype not in DTYPES:
        return f"the kernels compute in float32, float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if interpreting():
        # Measured: products of bfloat16 tiles are off by 1e10 there, without a word.
        return "Triton's interpreter computes bfloat16 products wrongly" if dtype == torch.bfloat16 else None
    return _too_old(device)


@_constant
def without_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether the kernels multiply numbers of this dtype one by one: float32, where torch's setting forbids TF32.

    The compiler then reads a transposed factor from one bank of shared memory: the products wait for it several times
    as long as they take. It is asked where kernels can run.
    """
    from cdt_fast.kernels.launch import dot_precision

    return dtype == torch.float32 and dot_precision(dtype) == "ieee" and not interpreting()


@_constant
def _too_old(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST_CAPABILITY:
        return None
    return f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; 8.0 is needed"
