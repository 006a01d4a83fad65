"""Compile what a launcher would launch for a card that is not here, and read the machine code that comes out.

Only the launch itself knows the key under which it looks for a compiled kernel in Triton's cache; so what is compiled
here goes the launch's way, up to where the driver would be called, with arguments that stand in for the launch's.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from cdt_fast.kernels.cards import GpuSpec
from cdt_fast.kernels.launch import Launch

# Products on the tensor cores: mma.sync, wgmma of sm_90, tcgen05 of sm_100.
TENSOR_CORE = re.compile(r"\b(?:UTC)?[HIQO]G?MMA\b")
LOCAL_MEMORY = re.compile(r"\b(?:STL|LDL)\b")
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
# Of a product in Triton's own language: the precision that was asked for, and the type of its left factor.
PRODUCT = re.compile(r"tt\.dot (?P<options>.*?): tensor<[\dx]*x(?P<type>\w+)[,>]")
# And after the optimization, where wgmma and tcgen05 have operations of their own.
# How the warps share a product of mma.sync or wgmma (the version), and the products of that layout: rows and columns.
WARPS = re.compile(
    r"(?P<layout>#\w+) = #ttg\.nvidia_mma<\{versionMajor = (?P<version>\d)"
    r".*?warpsPerCTA = \[(?P<rows>\d+), (?P<columns>\d+)\].*?instrShape = \[\d+, (?P<width>\d+)"
)
SHARED_PRODUCT = re.compile(
    r"\b(?:tt\.dot|ttng\.warp_group_dot) .*: .*<\d+x(?P<depth>\d+)x.* \* .*"
    r"-> tensor<(?P<rows>\d+)x(?P<columns>\d+)xf32, (?P<layout>#\w+)>"
)
ANY_PRODUCT = re.compile(r"\b(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b")


class Driver:
    """What Triton asks a driver for before it compiles for a card.

    Args:
        card: it answers as if this were there.
        device: the number of the device, under which Triton also keeps what it has compiled.
    """

    def __init__(self, card: GpuSpec, device: int = 0) -> None:
        self.card, self._device = card, device

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card.capability, 32)


@contextlib.contextmanager
def compiling_for(card: GpuSpec) -> Iterator[None]:
    """Let Triton believe that `card` is there."""
    before = dict(vars(driver))
    # No device has so high a number: what is compiled here must not be taken for what the first device can run.
    driver.set_active(Driver(card, device=card.capability))  # type: ignore[arg-type]
    try:
        yield
    finally:
        vars(driver).update(before)


@dataclass(frozen=True)
class Pointer:
    """A tensor of which Triton asks no more than the dtype and the address."""

    dtype: torch.dtype
    aligned: bool  # whether sixteen divides the address

    def data_ptr(self) -> int:
        return 0 if self.aligned else 8


def stand_in(value: Any, specialize: bool = True, divisible: bool = True) -> Any:
    """The same for all arguments that Triton compiles a kernel alike for, and specialized as they are.

    Args:
        value: of an argument at run time.
        specialize: whether integers that are one or divided by sixteen are told apart.
        divisible: whether the code may rely on what sixteen divides.
    """
    if isinstance(value, tuple):  # Triton specializes what it holds whatever is said of the argument
        return tuple(stand_in(element, divisible=divisible) for element in value)
    if isinstance(value, Tensor):
        # A meta tensor has no address; allocations start on a multiple of 512 bytes.
        return Pointer(value.dtype, divisible and value.storage_offset() * value.element_size() % 16 == 0)
    if isinstance(value, float):
        return 0.5
    if type(value) is not int:
        return True if isinstance(value, bool) else value
    if specialize and value == 1:
        return 1
    least = 0 if -(2**31) <= value < 2**31 else 2**32 if value < 2**63 else 2**63
    return least + (16 if specialize and divisible and value % 16 == 0 else 3)


@dataclass(frozen=True)
class Configuration:
    """One kernel with everything that decides its machine code; it can be sent to another process.

    Attributes:
        module, kernel: where the `@triton.jit` function is found.
        arguments: its constants, and what stands in for its other arguments, by name.
        warps, stages: warps of a block, and stages of the software pipeline.
        card: what it is compiled for.
    """

    module: str
    kernel: str
    arguments: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    card: GpuSpec

    @classmethod
    def of(cls, launch: Launch, card: GpuSpec, divisible: bool = True) -> Configuration:
        """What Triton would compile for the launch on the card; not `divisible`: for views that start anywhere, whose
        loads are narrow and mostly not pipelined.

        Raises:
            TypeError: the kernel takes other arguments.
        """
        function, blocks = launch.kernel.fn, launch.blocks
        try:
            given = launch.kernel.signature.bind(**launch.arguments, **launch.constants).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}") from error
        parameters = {one.name: one for one in launch.kernel.params}
        arguments = []
        for name, value in given.items():
            if not (one := parameters[name]).is_constexpr:
                value = stand_in(value, not one.do_not_specialize, divisible and not one.do_not_specialize_on_alignment)
            arguments.append((name, value))
        return cls(function.__module__, function.__name__, tuple(arguments), blocks.warps, blocks.stages, card)

    @property
    def function(self) -> Any:
        """The `@triton.jit` function."""
        return getattr(importlib.import_module(self.module), self.kernel)

    @property
    def digest(self) -> str:
        """What changes whenever the machine code may: source of the kernel, specialization, card, version of Triton."""
        options = (self.arguments, self.warps, self.stages, self.card.capability, triton.__version__)
        return hashlib.sha256(f"{self.function.cache_key} {options}".encode()).hexdigest()[:16]

    def compile(self) -> Any:
        """The compiled kernel, from Triton's cache where it is there; raises what Triton raises.

        It is filed under the key by which a launch on such a card, also of another process, looks for it.
        """
        with compiling_for(self.card):
            return self.function.warmup(
                grid=(1,), num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=True, **dict(self.arguments)
            )


@dataclass(frozen=True)
class Measurement:
    """What the machine code of a configuration takes.

    Attributes:
        registers: registers of a thread.
        local_bytes: local memory of a thread: what did not fit into registers.
        local_instructions: loads and stores of it in the code.
        shared_bytes: shared memory of a block.
        tensor_core_instructions: matrix instructions in the code.
        redundancy: of the products on the tensor cores, as often as they are written down, what is computed over what
            is needed: several warps compute the same where a tile is smaller than what they cover together.
        serialized: whether `ptxas` has each wgmma wait for the one before (its remarks C7510 to C7515).
        expects_tensor_core: whether a product in the source can only be fast there: 16-bit factors, or TF32.
        double_instructions: lines of the intermediate code that compute in double precision, where no argument has it.
        seconds: what compiling and reading took.
        error: the compiler's message where it failed; everything else is then zero.
    """

    registers: int = 0
    local_bytes: int = 0
    local_instructions: int = 0
    shared_bytes: int = 0
    tensor_core_instructions: int = 0
    redundancy: float = 1.0
    serialized: bool = False
    expects_tensor_core: bool = False
    double_instructions: int = 0
    seconds: float = 0.0
    error: str | None = None

    def faults(self, card: GpuSpec, spill_allowed: bool) -> list[str]:
        """What is wrong with it on the card, a line each; local memory counts unless it is allowed."""
        if self.error is not None:
            return [f"does not compile: {self.error}"]
        faults = []
        if self.local_bytes and not spill_allowed:
            faults.append(f"spills {self.local_bytes} bytes a thread")
        if self.shared_bytes > card.shared_memory:
            faults.append(f"needs {self.shared_bytes} bytes of shared memory of {card.shared_memory}")
        if self.expects_tensor_core and not self.tensor_core_instructions:
            faults.append("has products and no tensor-core instruction")
        if self.double_instructions:
            faults.append(f"has {self.double_instructions} double-precision instructions")
        return faults


def measure(configuration: Configuration) -> Measurement:
    """Compile the configuration and read its code; a compiler's failure is a result here, not an exception."""
    begin = time.perf_counter()
    try:
        compiled = configuration.compile()
        registers, local_bytes = _resources(compiled.asm["cubin"])
        code = _cuobjdump(compiled.asm["cubin"], "-sass")
    # Whatever stops a compilation belongs into its row: Triton raises its own types, MLIR RuntimeError, ptxas others.
    except Exception as error:
        message = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        return Measurement(
            error=f"{type(error).__name__}: {message.strip()}"[:300], seconds=time.perf_counter() - begin
        )
    wide = any(isinstance(one, Pointer) and one.dtype == torch.float64 for _, one in configuration.arguments)
    return Measurement(
        registers=registers,
        local_bytes=local_bytes,
        local_instructions=len(LOCAL_MEMORY.findall(code)),
        shared_bytes=compiled.metadata.shared,
        tensor_core_instructions=len(TENSOR_CORE.findall(code)),
        redundancy=_redundancy(compiled.asm["ttgir"]),
        serialized=_serialized(compiled.asm["ptx"]),
        expects_tensor_core=_expects_tensor_core(compiled.asm["ttir"], compiled.asm["ttgir"]),
        double_instructions=0 if wide else sum(".f64" in line for line in compiled.asm["ptx"].splitlines()),
        seconds=time.perf_counter() - begin,
    )


def _cuobjdump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    printed = _cuobjdump(cubin, "-res-usage")
    match = RESOURCES.search(printed)
    if match is None:
        raise RuntimeError(f"cuobjdump -res-usage printed no registers: {printed}")
    registers, stack, local = map(int, match.groups())
    return registers, stack + local


def _serialized(ptx: str) -> bool:
    """Whether `ptxas` remarks that it serializes wgmma; Triton runs it, and keeps what it says to itself."""
    if "wgmma.mma_async" not in ptx:
        return False
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
    return "wgmma.mma_async instructions are serialized" in said.stderr + said.stdout


def _expects_tensor_core(source: str, optimized: str) -> bool:
    """Whether a product of 16-bit or TF32 factors is there, and is left once what nobody reads has been taken out."""
    fast = any(
        product["type"] in ("f16", "bf16") or "inputPrecision = tf32" in product["options"]
        for product in PRODUCT.finditer(source)
    )
    return fast and ANY_PRODUCT.search(optimized) is not None


def _redundancy(optimized: str) -> float:
    """`Measurement.redundancy` from Triton's code for GPUs; 1 without products on the tensor cores."""
    layouts = {match["layout"]: match for match in WARPS.finditer(optimized)}
    computed = needed = 0.0
    for match in SHARED_PRODUCT.finditer(optimized):
        layout = layouts.get(match["layout"])
        if layout is None:
            continue
        rows, columns, size = int(match["rows"]), int(match["columns"]), int(match["depth"])
        width = 8 if layout["version"] == "2" else int(layout["width"])
        covered = max(rows, 16 * int(layout["rows"])) * max(columns, width * int(layout["columns"]))
        computed += covered * size
        needed += rows * columns * size
    return computed / needed if needed else 1.0
