"""The device and the precision of a training, from its settings and the machine."""

import ctypes
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.ops.products import cpu_has_bf16_products
from cdt_fast.training.settings import RunSettings
from cdt_fast.training.task import Task, Workload

_PRODUCTS = {"bf16": "products in bfloat16, weights and sums in float32", "fp32": "float32", "ieee": "IEEE float32"}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


@dataclass(frozen=True)
class Execution:
    """The device and the precision of a training."""

    device: torch.device
    precision: str  # of the matrix products: "bf16", "fp32" (TF32 on a GPU) or "ieee"
    captured: bool  # a step is launched as one CUDA graph

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype that products are cast to; None: that of the weights."""
        return torch.bfloat16 if self.precision == "bf16" else None

    def describe(self, workload: Workload) -> str:
        """Say in a line what runs, and why; on a GPU, in a second one, what the first steps wait for."""
        on_gpu = self.device.type == "cuda"
        place = f"cuda, {torch.cuda.get_device_name(self.device)}" if on_gpu else str(self.device)
        products = "float32 (TF32 products)" if on_gpu and self.precision == "fp32" else _PRODUCTS[self.precision]
        kernels = workload.kernels(self.device, self.autocast or torch.float32)
        step = "; a step is one CUDA graph" if self.captured else "; each kernel is launched" if on_gpu else ""
        compiling = "\nthe first steps compile the kernels that were not compiled here before: minutes, once" * on_gpu
        return f"computes on {place}: {products}; {kernels}{step}{compiling}"


def resolve_execution(settings: RunSettings, task: Task) -> Execution:
    """Choose what the settings leave open, and set torch's precision of float32 products to match. InputError: the
    device is cuda, and this machine has no such GPU."""
    wanted, there = settings.training.device, torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise InputError("[training] device is cuda, but torch finds no CUDA GPU here")
    on_gpu = there and wanted != "cpu"
    device = torch.device("cuda" if on_gpu else "cpu")
    precision = precision_of(settings, device, task.BF16_ON_CPU)
    torch.backends.cuda.matmul.allow_tf32 = precision == "fp32" and on_gpu
    return Execution(device, precision, on_gpu and task.FIXED_SHAPES)


def precision_of(settings: RunSettings, device: torch.device, bf16_on_cpu: bool) -> str:
    """Return the precision of matrix products on a device: as the settings say, or what "auto" takes there."""
    if settings.training.precision != "auto":
        return settings.training.precision
    on_cpu = bf16_on_cpu and cpu_has_bf16_products()
    narrow = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else on_cpu
    return "bf16" if narrow else "fp32"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`, without waiting for the copy."""
    # From pageable memory the copy would synchronize with the host.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def disable_malloc_trim(of_threads: bool = False) -> bool:
    """Make glibc reuse the memory of freed tensors, and say whether that could be set (glibc on Linux). `of_threads`:
    of those that new threads of Python make, too; small allocations of many threads then wait for each other."""
    # By default tensors of 32 MiB and more are mapped anew, whose page faults can cost more than the product in them.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    wanted = {_M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: 2**31 - 1}
    if of_threads:  # else those have arenas, where the thresholds do not hold
        wanted[_M_ARENA_MAX] = 1
    return mallopt is not None and all(mallopt(*each) for each in wanted.items())
