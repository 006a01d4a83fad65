"""A whole launch, and the place of Triton's driver that it takes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from cdt_fast.bench.tools.compile_kernels import Driver
from cdt_fast.ops import common
from cdt_fast.ops.common import KERNEL_DTYPES, GpuSpec

from .instructions import translate
from .machine import Step, Threads
from .memory import Argument, GlobalMemory
from .ptx import Fault, Program

# Threads and bytes of shared memory at a time: enough for NumPy's calls to be worth their while, and no more than
# stays in the caches.
THREADS_AT_A_TIME = 8192
BYTES_AT_A_TIME = 2**25
SCALARS = {"i1": "?", "i8": "b", "u8": "B", "i16": "h", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f"}


class Kernel:
    """A compiled kernel, ready to be emulated."""

    def __init__(self, ptx: str) -> None:
        self.program = Program.parse(ptx)
        self.steps: list[list[Step]] = [[translate(one) for one in block.body] for block in self.program.blocks]

    def launch(
        self, grid: tuple[int, int, int], values: list[bytes], arguments: list[Argument], shared_size: int
    ) -> None:
        """Run every block of the grid.

        Args:
            grid: blocks along each axis.
            values: the kernel's parameters, in order; further ones, which are Triton's own, are zero.
            arguments: the global memory that may be touched.
            shared_size: bytes of shared memory of a block.

        Raises:
            Fault: an access outside of the arguments, a race, or something the emulator does not know.
        """
        program, names = self.program, self.program.parameters
        parameters = dict.fromkeys(names, bytes(8)) | dict(zip(names, values, strict=False))
        memory = GlobalMemory(arguments, program.threads // 32)
        count = int(np.prod(grid))
        together = max(1, min(THREADS_AT_A_TIME // program.threads, BYTES_AT_A_TIME // max(shared_size, 1)))
        for first in range(0, count, together):
            blocks = np.arange(first, min(first + together, count))
            threads = Threads(program, self.steps, parameters, blocks, grid, memory, shared_size)
            try:
                with np.errstate(all="ignore"):
                    threads.run()
            except Fault as fault:
                raise Fault(f"{program.name}: {fault}") from None


class _Driver(Driver):
    """Of a card that is emulated on the CPU."""

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def install(card: GpuSpec) -> None:
    """From now on, in this process, kernels are compiled for `card` and run here, on tensors of the CPU."""
    driver.set_active(_Driver(card))  # type: ignore[arg-type]

    def prepare(self: Any) -> None:
        if self.module is not None:
            return
        if self.metadata.shared > card.shared_memory:
            raise OutOfResources(self.metadata.shared, card.shared_memory, "shared memory")
        self.module = self.function = Kernel(self.asm["ptx"])
        self._run = _launcher(self.module, list(self.src.signature.values()), self.metadata.shared)

    def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"the tensors are on {device} and the kernels are emulated on the CPU"
        if dtype not in KERNEL_DTYPES:
            return f"the kernels compute in float32, float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
        return None

    CompiledKernel._init_handles = prepare
    common.unavailable_reason = lambda: None  # type: ignore[assignment]
    common.unsupported_reason = unsupported_reason  # type: ignore[attr-defined]
    common.spec_of = lambda device: card  # type: ignore[assignment]


def _launcher(kernel: Kernel, types: list[Any], shared_size: int) -> Any:
    def run(x: int, y: int, z: int, stream: int, function: Any, packed: Any, data: Any, *more: Any) -> None:
        values, arguments = [], []
        # Two hooks come before the arguments.
        for value, kind in _flat(more[2:], types):
            if not kind.startswith("*"):
                values.append(struct.pack("<" + SCALARS[kind], value))
                continue
            values.append(struct.pack("<Q", 0 if value is None else value.data_ptr()))
            if value is not None and value.numel():
                start, end = _span(value)
                arguments.append(Argument(start, end, f"{tuple(value.shape)} {value.dtype}"))
        kernel.launch((x, y, z), values, arguments, shared_size)

    return run


def _flat(values: Any, types: Any) -> Iterator[tuple[Any, str]]:
    """The arguments that exist at run time, and their types; of tuples every element."""
    for value, kind in zip(values, types, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(value, kind)
        elif kind != "constexpr":
            yield value, kind


def _span(tensor: Tensor) -> tuple[int, int]:
    """From the first to behind the last byte; what lies between the rows of a view counts as its own."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
