"""The GPUs that the kernels are planned for: limits and families, and why kernels cannot run on one.

Importing this needs neither Triton nor a GPU, and asks neither; the functions ask when they are called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

OLDEST_TRITON = (3, 4)
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Answer = TypeVar("Answer", bound=Callable[..., object])


@dataclass(frozen=True)
class GpuSpec:
    """What decides the shape of a block on a GPU."""

    capability: int  # compute capability times ten: 86 for an RTX 3090
    shared_memory: int  # the most bytes that one block can ask for
    processors: int  # streaming multiprocessors

    @property
    def family(self) -> str:
        """The row of the block tables.

        "ampere" (A100, Orin: 163 KiB), "hopper" (H100, H200: 227 KiB, wgmma), "blackwell" (B200, B300, Thor: 227 KiB,
        tcgen05; where a table has no row of its own, hopper's) or "consumer" (99 KiB), whose blocks every other GPU
        takes too, also one that nobody knows yet.
        """
        if self.shared_memory >= 200 * 1024 and 90 <= self.capability < 120:
            return "hopper" if self.capability < 100 else "blackwell"
        return "ampere" if self.shared_memory >= 160 * 1024 and self.capability < 90 else "consumer"


# The GPUs that the kernels are compiled for without one, by name.
CARDS = {
    "A100": GpuSpec(80, 166_912, 108),
    "RTX 3090": GpuSpec(86, 101_376, 82),
    "RTX 4090": GpuSpec(89, 101_376, 128),
    "H200": GpuSpec(90, 232_448, 132),
    "B200": GpuSpec(100, 232_448, 148),
    "B300": GpuSpec(103, 232_448, 148),
    "RTX 5090": GpuSpec(120, 101_376, 170),
}
SMALLEST = CARDS["RTX 3090"]


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
    planned = _planned is not None and device.type == "meta"
    reason = None if planned else unavailable_reason()
    if reason is not None:
        return reason
    expected = "meta" if planned else "cpu" if interpreting() else "cuda"
    if device.type != expected:
        return f"the tensors are on {device} and the kernels run on {expected}"
    if dtype not in DTYPES:
        return f"the kernels compute in float32, float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if planned:
        return None
    if interpreting():
        # Measured: products of bfloat16 tiles are off by 1e10 there, without a word.
        return "Triton's interpreter computes bfloat16 products wrongly" if dtype == torch.bfloat16 else None
    return _too_small_reason(device)


@_constant
def _too_small_reason(device: torch.device) -> str | None:
    return _refusal(device)


@functools.cache
def _refusal(device: torch.device) -> str | None:
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"{name} has compute capability {capability[0]}.{capability[1]}; 8.0 is needed"
    memory = spec_of(device).shared_memory
    if memory < SMALLEST.shared_memory:
        return f"{name} has {memory // 1024} KiB of shared memory a block; {SMALLEST.shared_memory // 1024} are needed"
    return None


@functools.cache
def spec_of(device: torch.device) -> GpuSpec:
    """The GPU `device`."""
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return GpuSpec(capability, properties.shared_memory_per_block_optin, properties.multi_processor_count)


_planned: GpuSpec | None = None


def card_of(tensor: Tensor) -> GpuSpec:
    """The GPU that the tensor is on; in Triton's interpreter an RTX 3090, whose blocks are the smallest."""
    if _planned is not None:
        return _planned
    return SMALLEST if interpreting() else spec_of(tensor.device)


@contextlib.contextmanager
def planning_for(card: GpuSpec) -> Iterator[None]:
    """Have `card_of` answer `card`, wherever the tensors are; those without memory (meta) are taken to be on it."""
    global _planned
    before, _planned = _planned, card
    try:
        yield
    finally:
        _planned = before


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of a product of tiles: TF32 for float32 where torch's own setting allows it, else IEEE."""
    if dtype != torch.float32:
        return "ieee"
    # torch 2.9 has a setting of its own for it, and refuses the older question once that one has been set.
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    allowed = torch.backends.cuda.matmul.allow_tf32 if setting is None else setting == "tf32"
    return "tf32" if allowed else "ieee"


def math_mode(dtype: torch.dtype) -> str:
    """The row of the block tables: "16 bits", or how products of float32 are made, "tf32" or "ieee"."""
    return "16 bits" if dtype.itemsize == 2 else dot_precision(dtype)


@_constant
def without_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether the kernels multiply numbers of this dtype one by one: float32, where torch's setting forbids TF32.

    The compiler then reads a transposed factor from one bank of shared memory: the products wait for it several times
    as long as they take. It is asked where kernels can run.
    """
    return dtype == torch.float32 and dot_precision(dtype) == "ieee" and not interpreting()
