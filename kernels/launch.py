"""What every launcher needs beside its kernels: the card it plans for, and a launch that can run or be compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdt_fast.kernels import interpreting


@dataclass(frozen=True)
class GpuSpec:
    """What decides the shape of a block on a GPU.

    Attributes:
        capability: compute capability times ten: 86 for an RTX 3090.
        shared_memory: the most bytes of shared memory that one block can ask for.
    """

    capability: int
    shared_memory: int

    @property
    def family(self) -> str:
        """The row of the block tables: "consumer" (99 KiB), "ampere" (A100: 163 KiB) or "hopper" (227 KiB, wgmma)."""
        if self.capability >= 90 and self.shared_memory >= 200 * 1024:
            return "hopper"
        return "ampere" if self.shared_memory >= 160 * 1024 else "consumer"


# The targets that the kernels are compiled for without a GPU, by the name of a card.
CARDS = {
    "A100": GpuSpec(80, 166_912),
    "RTX 3090": GpuSpec(86, 101_376),
    "RTX 4090": GpuSpec(89, 101_376),
    "H200": GpuSpec(90, 232_448),
    "RTX 5090": GpuSpec(120, 101_376),
}


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel: everything that Triton needs to run it, or to compile it for a card that is not here.

    Attributes:
        kernel: the `@triton.jit` function.
        grid: the number of blocks along up to three axes.
        arguments: what the kernel takes at run time, by name: tensors, tuples of tensors, integers, floats.
        constants: what it takes as `tl.constexpr`, by name.
        warps, stages: warps of a block, and stages of the software pipeline.
        strided: the tensors whose strides the kernel takes too; every other one has to be contiguous.

    Raises:
        ValueError: a tensor is not contiguous that the kernel would read as if it were.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int
    stages: int
    strided: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in self.arguments.items():
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor) and name not in self.strided and not tensor.is_contiguous():
                    shape, strides = tuple(tensor.shape), tensor.stride()
                    raise ValueError(
                        f"{self.kernel.__name__} takes a contiguous {name}, got shape {shape} with strides {strides}"
                    )

    def run(self) -> None:
        """Launch on the device of the arguments; a grid with a zero in it is no launch at all."""
        if _recorder is not None:
            _recorder.launches.append(self)
        elif 0 not in self.grid:
            with _device_of(self.arguments):
                # Triton's default for the fusion of products and sums differs between versions.
                self.kernel[self.grid](
                    **self.arguments,
                    **self.constants,
                    num_warps=self.warps,
                    num_stages=self.stages,
                    enable_fp_fusion=True,
                )


def _device_of(arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    tensor = next(value for value in arguments.values() if isinstance(value, Tensor))
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def card_of(tensor: Tensor) -> GpuSpec:
    """The card that the tensor is on; under Triton's interpreter that of an RTX 3090, whose blocks are the smallest."""
    if _recorder is not None:
        return _recorder.card
    return CARDS["RTX 3090"] if interpreting() else _card(tensor.device)


@functools.cache
def _card(device: torch.device) -> GpuSpec:
    properties = torch.cuda.get_device_properties(device)
    return GpuSpec(10 * properties.major + properties.minor, properties.shared_memory_per_block_optin)


def ceil_div(count: int, size: int) -> int:
    """How many blocks of `size` cover `count`."""
    return -(-count // size)


def block_width(width: int) -> int:
    """The tile that holds `width` columns whole: a power of two, and at least the 16 that a product of tiles takes."""
    return max(16, 1 << (width - 1).bit_length()) if width else 16


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of a product of tiles: TF32 for float32 where torch's own setting allows it, else IEEE."""
    if dtype != torch.float32:
        return "ieee"
    # torch 2.9 has a setting of its own for it, and refuses the older question once that one has been set.
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    allowed = torch.backends.cuda.matmul.allow_tf32 if setting is None else setting == "tf32"
    return "tf32" if allowed else "ieee"


def math_mode(tensor: Tensor) -> str:
    """The row of the block tables: "16 bits", or how products of float32 are made, "tf32" or "ieee"."""
    return "16 bits" if tensor.element_size() == 2 else dot_precision(tensor.dtype)


@dataclass
class _Recorder:
    card: GpuSpec
    launches: list[Launch]


_recorder: _Recorder | None = None


@contextlib.contextmanager
def recording(card: GpuSpec) -> Iterator[list[Launch]]:
    """Collect the launches that the launchers would make on `card`, and make none: call them with meta tensors."""
    global _recorder
    before, _recorder = _recorder, _Recorder(card, [])
    try:
        yield _recorder.launches
    finally:
        _recorder = before
