"""A launch of a kernel, that can run or be compiled, and the sizes of tiles that launchers compute."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.cards import GpuSpec, dot_precision, interpreting, planning_for

_SIZES = tuple(size.upper() for size in Blocks._fields)


@cache
def _names(kernel: Any) -> frozenset[str]:
    return frozenset(kernel.arg_names)


class KernelError(RuntimeError):
    """A kernel that the compiler refuses for the card, or that asks for more than the card has: it has not run."""


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel: everything that Triton needs to run it, or to compile it for a card that is not here.

    Attributes:
        kernel: the `@triton.jit` function.
        grid: the number of blocks along up to three axes.
        blocks: the shape of a block; those of its sizes that the kernel takes, in capitals, join the constants.
        arguments: what the kernel takes at run time, by name: tensors, tuples of tensors, integers, floats, None. The
            strides that it takes as `<name>_row_stride` and `<name>_column_stride` join them; every tensor without a
            row stride has to be contiguous.
        constants: what it takes as `tl.constexpr`, by name; `PRECISION` of its products follows from the first tensor.
        record: the op's; those of its fields that the kernel takes, maybe in capitals, are arguments and constants too.
        work: counts the sums and products of its products of tiles, whole tiles with what lies beyond the edges; None:
            it multiplies none.
        passes: how often a tensor crosses the memory's bus, by name; the others do once.

    Raises:
        ValueError: a tensor is not contiguous that the kernel would read as if it were.
    """

    kernel: Any
    grid: tuple[int, ...]
    blocks: Blocks
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    record: Any = None
    work: Callable[[Launch], float] | None = None
    passes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = _names(self.kernel)
        arguments: dict[str, Any] = {}
        constants: dict[str, Any] = {}
        for name, value in {} if self.record is None else vars(self.record).items():
            if name in taken:
                arguments[name] = value
            elif (constant := name.upper()) in taken:
                constants[constant] = value
        arguments |= self.arguments
        constants |= self.constants
        if "PRECISION" in taken and "PRECISION" not in constants:
            constants["PRECISION"] = dot_precision(_first_tensor(arguments).dtype)
        for name, value in list(arguments.items()):
            if (rows := f"{name}_row_stride") in taken:
                arguments[rows], columns = (None, None) if value is None else value.stride()
                if (of_columns := f"{name}_column_stride") in taken:
                    arguments[of_columns] = columns
                continue
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor) and not tensor.is_contiguous():
                    shape, steps = tuple(tensor.shape), tensor.stride()
                    raise ValueError(
                        f"{self.kernel.__name__} takes a contiguous {name}, got shape {shape} with strides {steps}"
                    )
        for size, number in zip(_SIZES, self.blocks, strict=True):
            if size in taken:
                constants[size] = number
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "constants", constants)

    def run(self) -> None:
        """Launch on the device of the arguments; a grid with a zero in it is no launch at all.

        Raises:
            KernelError: it cannot run on the card; nothing has.
        """
        if _recorded is not None:
            _recorded.append(self)
        elif 0 not in self.grid:
            with _device_of(self.arguments):
                try:
                    # Triton's default for the fusion of products and sums differs between versions.
                    self.kernel[self.grid](
                        **self.arguments,
                        **self.constants,
                        num_warps=self.blocks.warps,
                        num_stages=self.blocks.stages,
                        enable_fp_fusion=True,
                    )
                except Exception as error:
                    if not _of_the_compiler(error):
                        raise
                    reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
                    raise KernelError(
                        f"{self.kernel.__name__} does not run on {_card_name()}: {reason.strip()}"
                    ) from error

    @property
    def flop(self) -> float:
        """The sums and products that it executes."""
        return 0.0 if self.work is None else self.work(self)

    @property
    def traffic(self) -> int:
        """The bytes that cross the memory's bus: each tensor as often as `passes` says; what is read again from a cache
        is not counted."""
        passes: dict[int, tuple[int, Tensor]] = {}
        for name, value in self.arguments.items():
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor):
                    known, _ = passes.get(id(tensor), (0, tensor))
                    passes[id(tensor)] = max(known, self.passes.get(name, 1)), tensor
        return sum(times * stored_bytes(tensor) for times, tensor in passes.values())


def stored_bytes(tensor: Tensor) -> int:
    """Of its elements, those that an expanded dimension repeats counted once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size if step or not size else 1 for size, step in sizes)


# What Triton's passes, ptxas and the loading of the code say where the card is the reason; of CUDA nothing else.
_REFUSALS = re.compile(
    r"PassManager::run failed|PTX codegen error|failed to translate|out of resource"
    r"|no kernel image|device kernel image is invalid|too many resources requested"
)


def _of_the_compiler(error: Exception) -> bool:
    from triton.compiler.errors import CompilationError
    from triton.runtime import errors

    if interpreting():
        return False
    kinds = tuple(getattr(errors, name) for name in ("OutOfResources", "PTXASError") if hasattr(errors, name))
    return isinstance(error, (CompilationError, *kinds)) or _REFUSALS.search(str(error)) is not None


def _card_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "this card"


def _device_of(arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    tensor = _first_tensor(arguments)
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _first_tensor(arguments: Mapping[str, Any]) -> Tensor:
    return next(value for value in arguments.values() if isinstance(value, Tensor))


def ceil_div(count: int, size: int) -> int:
    """How many blocks of `size` cover `count`."""
    return -(-count // size)


def whole_tiles(count: int, size: int) -> int:
    """`count`, with what lies beyond it in the last tile of `size`."""
    return size * ceil_div(count, size)


def block_width(width: int) -> int:
    """The tile that holds `width` columns whole: a power of two, and at least the 16 that a product of tiles takes."""
    return max(16, 1 << (width - 1).bit_length()) if width else 16


_recorded: list[Launch] | None = None
_recorded_aligned = True


@contextlib.contextmanager
def recording(card: GpuSpec, aligned: bool = True) -> Iterator[list[Launch]]:
    """Collect the launches that the launchers would make on `card`, and make none: call them with meta tensors.

    Not `aligned`, the launchers take the tensors for views that start anywhere.
    """
    global _recorded, _recorded_aligned
    before = _recorded, _recorded_aligned
    _recorded, _recorded_aligned = launches, _ = [], aligned
    try:
        with planning_for(card):
            yield launches
    finally:
        _recorded, _recorded_aligned = before


def is_aligned(*tensors: Tensor) -> bool:
    """Whether rows of the contiguous tensors start on multiples of 16 bytes: else loads are narrow, and the compiler
    passes what they load through more shared memory."""
    return _recorded_aligned and all(
        tensor.storage_offset() * tensor.element_size() % 16 == 0 and tensor.shape[-1] * tensor.element_size() % 16 == 0
        for tensor in tensors
    )
