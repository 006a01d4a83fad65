"""Shared by the ops: GPUs and block shapes, the choice of a backend, argument checks, padding, shrinkage."""

import contextlib
import functools
import importlib
import importlib.util
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion

from cdt_fast.checks import InputError, check_choice, check_non_negative, check_number

Backend = Literal["torch", "triton"]
Setting = Literal["auto", "triton", "torch"]
Reduction = Literal["mean", "sum"]
LayerNonlinearity = Literal["soft_threshold", "relu"]
# "identity" also stands for S_0 and T_0: an output of zero then says nothing about its gradient.
Nonlinearity = Literal["soft_threshold", "relu", "identity"]
Function = TypeVar("Function", bound=Callable[..., Any])
Weights = Tensor | Sequence[float] | None  # of the depths
Shape = Sequence[int | None]

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LayerwiseLosses(NamedTuple):
    """The losses of all depths, and their weighted sum."""

    total: Tensor  # []
    per_depth: Tensor  # [depths]


LONGEST = 64  # tokens of a sequence that one tile of a kernel can hold
WIDEST = 256  # columns of a token that one tile of a kernel can hold


# GPUs


@dataclass(frozen=True)
class GpuSpec:
    """The limits of a GPU that decide block shapes."""

    capability: int  # compute capability times ten: 86 for an RTX 3090
    shared_memory: int  # bytes that one block can ask for
    processors: int  # streaming multiprocessors
    memory: int = 24 * 2**30  # bytes

    @property
    def family(self) -> str:
        """The column of the block tables: "ampere" (A100: 163 KiB), "hopper" (data center cards from H100 on: 227 KiB),
        or "consumer" (99 KiB), whose blocks fit every GPU."""
        if self.shared_memory >= 200 * 1024 and 90 <= self.capability < 120:
            return "hopper"
        return "ampere" if self.shared_memory >= 160 * 1024 and self.capability < 90 else "consumer"


CARDS = {
    "A100": GpuSpec(80, 166_912, 108, 80 * 2**30),
    "RTX 3090": GpuSpec(86, 101_376, 82),
    "RTX 4090": GpuSpec(89, 101_376, 128),
    "H200": GpuSpec(90, 232_448, 132, 141 * 2**30),
    "B200": GpuSpec(100, 232_448, 148, 180 * 2**30),
    "B300": GpuSpec(103, 232_448, 148, 270 * 2**30),
    "RTX 5090": GpuSpec(120, 101_376, 170, 32 * 2**30),
}
SMALLEST = CARDS["RTX 3090"]
Blocks = Mapping[str, int]
# Block shapes by GPU family for 16 bits and by "float32"; of a nested mapping the first size that is large enough.
BlockTable = Mapping[str, Blocks | Mapping[int, Blocks]]


def _constant(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, without importing the compiler and Triton with it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def interpreting() -> bool:
    """Return whether kernels run on the CPU in Triton's interpreter (`TRITON_INTERPRET=1` at Triton's import)."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@functools.cache
def unavailable_reason() -> str | None:
    """Return why no kernel can run on this machine, or None if kernels can run."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if interpreting():
        return None
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs, and this torch is built for AMD's"
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU"


@_constant
def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernel can run on tensors of this device and dtype, or None if kernels can run."""
    reason = unavailable_reason()
    if reason is not None:
        return reason
    expected = "cpu" if interpreting() else "cuda"
    if device.type != expected:
        return f"the tensors are on {device} and the kernels run on {expected}"
    if dtype not in KERNEL_DTYPES:
        return f"the kernels compute in float32, float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if interpreting():
        # Products of bfloat16 tiles were off by 1e10 there, silently.
        return "Triton's interpreter computes bfloat16 products wrongly" if dtype == torch.bfloat16 else None
    spec = spec_of(device)
    if spec.capability >= 80 and spec.shared_memory >= SMALLEST.shared_memory:
        return None
    found = f"compute capability {spec.capability / 10} and {spec.shared_memory // 1024} KiB of shared memory a block"
    needed = SMALLEST.shared_memory // 1024
    return f"{torch.cuda.get_device_name(device)} has {found}; 8.0 and {needed} are needed"


@functools.cache
def spec_of(device: torch.device) -> GpuSpec:
    """Return the limits of the GPU `device`."""
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    limits = properties.shared_memory_per_block_optin, properties.multi_processor_count, properties.total_memory
    return GpuSpec(capability, *limits)


def card_of(tensor: Tensor) -> GpuSpec:
    """Return the GPU that the tensor is on; in Triton's interpreter an RTX 3090, whose blocks are the smallest."""
    return SMALLEST if interpreting() else spec_of(tensor.device)


@_constant
def is_hopper(device: torch.device) -> bool:
    """Return whether the GPU `device` is an H100 or H200, whose products are of instructions of their own."""
    return device.type == "cuda" and not interpreting() and 90 <= spec_of(device).capability < 100


def blocks_for(table: BlockTable, tensor: Tensor, size: int = 0, multiplies: bool = True) -> dict[str, Any]:
    """Return the block shape and launch options of a kernel for tensors like `tensor`, on the GPU that it is on."""
    blackwell = 100 <= card_of(tensor).capability < 120
    family = "b200" if blackwell and "b200" in table else card_of(tensor).family
    row: Any = table[family if tensor.element_size() == 2 else "float32"]
    if not isinstance(next(iter(row)), str):
        row = next((blocks for largest, blocks in row.items() if size <= largest), None)
        if row is None:
            raise ValueError(f"no block of this kernel holds {size}")
    # Triton's default for fusing products and sums differs between versions.
    precision = {"PRECISION": dot_precision(tensor.dtype)} if multiplies else {}
    # For a B200, the compiler of Triton 3.5 fails on pipelined loops with two products.
    fails = blackwell and TorchVersion(importlib.import_module("triton").__version__) < "3.6"
    return {"enable_fp_fusion": True, **precision, **row, **({"num_stages": 1} if fails else {})}


def dot_precision(dtype: torch.dtype) -> str:
    """Return the `input_precision` of a product of tiles: TF32 for float32 if torch's setting allows it, else IEEE."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@_constant
def without_tensor_cores(dtype: torch.dtype) -> bool:
    """Return whether kernels multiply this dtype without tensor cores: float32, if torch's setting forbids TF32."""
    return dtype == torch.float32 and dot_precision(dtype) == "ieee" and not interpreting()


# Backend

_LEAST_FACTOR = 2.0**-12  # of the kernels in float16
_setting: Setting = "auto"
_worked: set[tuple[str, torch.dtype, torch.device]] = set()  # ops of which a kernel has run in a dtype on a device
_disabled: set[tuple[str, torch.dtype, torch.device]] = set()  # ops of which one failed there
_COMPILER_ERRORS = re.compile(
    r"CompilationError|OutOfResources|PTXASError|PassManager::run failed|PTX codegen error|failed to translate"
    r"|out of resource|no kernel image|device kernel image is invalid|too many resources requested"
)
# What is missing if a kernel's first launch fails: a pattern of the error's type and message, and the remedy.
_REMEDIES = {
    "C compiler": "install gcc, or set CC to a C compiler",
    "CalledProcessError": "see what the compiler printed: if Python.h is missing, install python3-dev",
    "libcuda|ldconfig": "set TRITON_LIBCUDA_PATH to the folder of libcuda.so.1, in WSL /usr/lib/wsl/lib",
    "^OSError|^ImportError|^PermissionError": "set TRITON_CACHE_DIR to a folder to write to and load libraries from",
    "unsupported toolchain|kernel image": "install a newer NVIDIA driver",
}


class use_backend:
    """Choose the implementation of every op: `ops.use_backend("torch")`, or `with ops.use_backend("torch"): …`.

    The call sets it for the whole process; leaving a `with` block restores what was set before. "auto" takes a Triton
    kernel where one fits and is the faster one, else torch. InputError: another name, or "triton" where none can run.
    """

    def __init__(self, backend: Setting) -> None:
        global _setting
        check_choice("backend", backend, get_args(Setting))
        if backend == "triton" and (reason := unavailable_reason()) is not None:
            raise InputError(f"backend 'triton' cannot be used here: {reason}. 'auto' and 'torch' can")
        self._previous: Setting = _setting
        _setting = backend

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        global _setting
        _setting = self._previous


def choose_backend(op: str, *tensors: Tensor, multiplies: bool = False) -> Backend:
    """Decide whether `op` runs its Triton kernels on these tensors, or plain torch; without tensor cores kernels that
    multiply matrices (`multiplies`) only under "triton": cuBLAS is faster there."""
    if _setting == "torch":
        return "torch"
    for tensor in tensors:
        reason = unsupported_reason(tensor.device, tensor.dtype)
        if reason is not None and _setting == "triton":
            raise InputError(f"backend 'triton' cannot run {op} here: {reason}. 'auto' and 'torch' can")
        failed = _setting == "auto" and (op, tensor.dtype, tensor.device) in _disabled
        if reason is not None or failed or (_setting == "auto" and multiplies and without_tensor_cores(tensor.dtype)):
            return "torch"
    return "triton"


def underflows(dtype: torch.dtype, *factors: float) -> bool:
    """Return whether kernels would lose what these factors multiply: they round products with them to the dtype, which
    plain torch multiplies after rounding. Float16 holds too few numbers that small."""
    return dtype == torch.float16 and any(0 < abs(factor) < _LEAST_FACTOR for factor in factors)


@contextlib.contextmanager
def or_plain_torch(op: str, tensor: Tensor) -> Iterator[Any]:
    """Yield the module of the kernels of `op`: if one fails, go on behind the block, where plain torch stands, and
    replaces them from now on, with one warning, for the dtype and device of `tensor`. Until they have worked there
    once, any error counts; then only the compiler's. All else is raised, and every error under "triton"."""
    key = op, tensor.dtype, tensor.device
    try:
        yield importlib.import_module(f"cdt_fast.kernels.{op}")
    except Exception as error:
        # Triton's is a RuntimeError.
        memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
        first = key not in _worked and not memory and not isinstance(error, (InputError, TypeError))
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        if _setting == "triton" or interpreting() or not (first or _COMPILER_ERRORS.search(f"{kinds}: {error}")):
            raise
        if key not in _disabled:
            _disabled.add(key)
            where = f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
            text = f"{op} runs on plain torch from now on, in {where}: its kernels failed: {words_of(error)}"
            warnings.warn(text, RuntimeWarning, 3)
    else:
        _worked.update([key] * bool(tensor.numel()))  # of an empty tensor nothing is launched


def words_of(error: BaseException) -> str:
    """Return the last line of an error of Triton's, and the remedy if there is one."""
    words = f"{type(error).__name__}: {error}"
    reason = next(line.strip(" .") for line in reversed(words.splitlines()) if line.strip())
    remedy = next((text for pattern, text in _REMEDIES.items() if re.search(pattern, words)), "")
    return reason + f". To run them, {remedy}" * bool(remedy)


def explain() -> str:
    """Return which implementation runs now, and why, in one line."""
    if _setting == "torch":
        return "torch (chosen by use_backend)"
    device = torch.device("cuda")
    reason = unavailable_reason() or (None if interpreting() else unsupported_reason(device, torch.float32))
    if reason is not None:
        return f"torch ({reason})"
    if interpreting():
        return "triton (in its interpreter, on the CPU)"
    card = spec_of(device)
    without = "; products of float32 on torch, as TF32 is off" if without_tensor_cores(torch.float32) else ""
    return f"triton (blocks for {card.family} cards, {card.shared_memory // 1024} KiB of shared memory{without})"


# How an op is called


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Return whether only autograd observes the call: no compiler, no dispatch mode, no subclass of Tensor. An op then
    skips torch's dispatcher, which takes several times as long as the rest of a call."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and _functorch.peek_interpreter_stack() is None
        and all(type(tensor) in _PLAIN and tensor.device.type != "meta" for tensor in tensors if tensor is not None)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


@_constant
def _inside_transform() -> bool:
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def refuse_transforms(op: str, *tensors: Tensor | None) -> None:
    """Raise InputError if a tensor takes part in a transform of torch.func or carries a forward-mode tangent."""
    if _inside_transform() and any(_is_transformed(tensor) for tensor in tensors if tensor is not None):
        raise InputError(
            f"{op} has no derivative in forward mode or inside a transform of torch.func: differentiate it by autograd "
            f"(loss.backward()), or use its formula, {op}_reference"
        )


def _is_transformed(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling() or _functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


@_constant  # torch 2.11 compiles no call of it
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def in_autocast(tensor: Tensor) -> bool:
    """Return whether autocast is on for the device of the tensor."""
    kind = tensor.device.type
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off for the device of the tensor."""
    return torch.autocast(tensor.device.type, enabled=False) if in_autocast(tensor) else contextlib.nullcontext()


def outside_autocast(function: Function) -> Function:
    """Decorate an implementation: autocast is off, and the device of its first argument is the current one."""

    @functools.wraps(function)
    def call(first: Any, *arguments: Any) -> Any:
        tensor = first if isinstance(first, Tensor) else first[0]
        if not tensor.is_cuda and not in_autocast(tensor):
            return function(first, *arguments)
        with torch.cuda.device_of(tensor), without_autocast(tensor):
            return function(first, *arguments)

    return call  # type: ignore[return-value]


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that products run in: autocast's if it is on, else that of `tensor`."""
    if tensor.dtype != torch.float64 and in_autocast(tensor):
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype


# Argument checks


def describe(value: Any) -> str:
    """Describe a value for an error message."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{layout} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def check_tensor(name: str, value: Any, rank: int, layout: str, shape: Shape | None = None, meaning: str = "") -> None:
    """Require a dense floating-point tensor of at least `rank` dimensions, and with `shape` what `check_shape` does;
    `layout` is its shape, in words."""
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    if hasattr(value, "device_mesh"):  # without an import of the classes of torch.distributed
        raise InputError(f"{name} is a DTensor: give its full_tensor(), or its to_local() where a rank's part is meant")
    if not dense or value.dtype not in (torch.float64, *KERNEL_DTYPES) or value.dim() < rank:
        raise InputError(f"{name} must be a dense floating-point tensor {layout}, got {describe(value)}")
    if shape is not None:
        check_shape(name, value, shape, meaning)


def check_shape(name: str, value: Tensor, shape: Shape, meaning: str) -> None:
    """Require the shape `shape`, of any size where it has None; `meaning` explains it."""
    expected = tuple(value.shape[n - len(shape)] if size is None else size for n, size in enumerate(shape))
    if tuple(value.shape) != expected:
        raise InputError(f"{name} must have shape {expected} ({meaning}), got {tuple(value.shape)}")


def check_together(**tensors: Tensor | None) -> None:
    """Require one device, and outside of autocast one dtype, for all the tensors given."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(given.items()))
    for name, tensor in given.items():
        if tensor.device != first.device:
            raise InputError(f"{name} is on {tensor.device} but {first_name} is on {first.device}: move one of them")
        if tensor.dtype != first.dtype and not in_autocast(first):
            raise InputError(
                f"{name} is {tensor.dtype} but {first_name} is {first.dtype}: convert one of them, or use autocast"
            )


def check_factor(name: str, value: Any, *, non_negative: bool = False, dtype: torch.dtype = torch.float64) -> float:
    """Require a finite real number: a Python or NumPy number, or a tensor of one element on the CPU. If `dtype` is
    narrower than float64, the op multiplies by a float32, which must hold the number."""
    if isinstance(value, Tensor):
        # A tensor on the device would have to be waited for, and its gradient would be lost silently.
        if value.numel() != 1 or value.device.type != "cpu" or value.requires_grad:
            raise InputError(f"{name} must be a number, got a tensor: {describe(value)}")
        value = value.item()
    factor = check_non_negative(name, value) if non_negative else check_number(name, value)
    if dtype != torch.float64 and abs(factor) > torch.finfo(torch.float32).max:
        raise InputError(f"{name} must be a number that float32 holds, got {factor!r}")
    return factor


def check_lista(codes: Tensor | None, signal: Tensor, dictionary: Tensor, nonlinearity: Any, rank: int = 1) -> None:
    """Check what `lista_step` (rank 1) and `unrolled_layer` (rank 2, codes may be None) have in common."""
    tokens = "[..., T, " if rank == 2 else "[..., "
    if codes is not None or rank == 1:
        check_tensor("codes", codes, rank, f"{tokens}m]")
    leading = None if codes is None else (*codes.shape[:-1], None)
    check_tensor("signal", signal, rank, f"{tokens}n]", leading, "the tokens of codes by the signal's width")
    shape = signal.shape[-1], None if codes is None else codes.shape[-1]
    check_tensor("dictionary", dictionary, 2, "[n, m]", shape, "width of signal by width of codes")
    check_together(codes=codes, signal=signal, dictionary=dictionary)
    check_choice("nonlinearity", nonlinearity, get_args(LayerNonlinearity))


def check_lengths(lengths: Tensor | None, tokens: Tensor) -> None:
    """Require None, or an integer tensor of shape `tokens.shape[:-2]` on the device of `tokens` `[..., T, width]`."""
    if lengths is None:
        return
    integers = (torch.int16, torch.int32, torch.int64, torch.uint8, torch.int8)
    if not isinstance(lengths, Tensor) or lengths.dtype not in integers:
        raise InputError(f"lengths must be an integer tensor with one length a sequence, got {describe(lengths)}")
    check_shape("lengths", lengths, tuple(tokens.shape[:-2]), "one length a sequence")
    if lengths.device != tokens.device:
        raise InputError(f"lengths is on {lengths.device} but the tokens are on {tokens.device}: move one of them")


def check_depths(name: str, tensors: Any, shape: Sequence[int] | None, meaning: str) -> None:
    """Require a list of at least one floating-point tensor, all of `shape` or, with None, of that of the first."""
    if not isinstance(tensors, Sequence) or not tensors:
        raise InputError(f"{name} must be a list of one tensor a depth, got {describe(tensors)}")
    for depth, tensor in enumerate(tensors):
        own = tensors[0].shape if shape is None and depth else shape
        check_tensor(f"{name}[{depth}]", tensor, 1, "[..., d]" if shape is None else "[..., n]", own, meaning)


def weights_of_depths(depth_weights: Weights, depths: int, name: str = "depth_weights") -> Tensor | None:
    """Return the weights of the depths as a tensor `[depths]`, or None without weights."""
    if depth_weights is None:
        return None
    listed = depth_weights if isinstance(depth_weights, Sequence) else ()
    if any(isinstance(weight, Tensor) and weight.requires_grad for weight in listed):
        raise InputError(f"{name} must be numbers or one tensor (torch.stack), got tensors that require a gradient")
    try:
        # Numbers in float64: `as_tensor` would round a list of them to float32.
        dtype = depth_weights.dtype if isinstance(depth_weights, Tensor) else torch.float64
        weights = torch.as_tensor(depth_weights, dtype=dtype, device=getattr(depth_weights, "device", "cpu"))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{name} must be {depths} numbers, got {describe(depth_weights)}") from error
    check_shape(name, weights, (depths,), "one weight for each depth")
    return weights


def on_device(numbers: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Move a few numbers; from a CPU to a GPU as arguments of a kernel, since a CUDA graph takes no copy from there."""
    unknown = torch.compiler.is_compiling() or type(numbers) not in _PLAIN  # as of a fake tensor
    if device.type == "cpu" or numbers.device.type != "cpu" or numbers.requires_grad or unknown:
        return numbers.to(device, dtype, non_blocking=True)
    moved = torch.zeros(len(numbers), dtype=dtype, device=device)
    torch._foreach_add_(list(moved.unbind()), numbers.tolist())
    return moved


def zero_weight_mask(factors: Tensor) -> list[bool]:
    """Return which factors are known to be zero; on a GPU none is known, as the host does not wait for it."""
    return (factors == 0).tolist() if factors.device.type == "cpu" else [False] * len(factors)


def detach_zero_weighted(tensors: Sequence[Tensor], weights: Tensor | None) -> list[Tensor]:
    """Detach the depths whose weight is known to be zero (in plain eager mode alone), so that they get no gradient."""
    if weights is None or not is_plain_eager(weights, *tensors):
        return list(tensors)
    zeros = zero_weight_mask(weights)
    return [tensor.detach() if zero else tensor for tensor, zero in zip(tensors, zeros, strict=True)]


# Tokens and padding. Sizes are multiplied by Python: torch.Size.numel() makes constants of an exported graph's.


def rows_of(tokens: Tensor) -> Tensor:
    """Reshape `[..., width]` to `[rows, width]`, also where the width is 0 (and `reshape(-1, 0)` is ambiguous)."""
    return tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])


def sequences(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn `[..., T, width]` into contiguous `[B, T, width]` of `dtype`, also where a size is 0 (-1 is ambiguous)."""
    if tokens.dim() == 3 and tokens.dtype == dtype and tokens.is_contiguous():
        return tokens
    *leading, count, width = tokens.shape
    return tokens.to(dtype).reshape(math.prod(leading), count, width).contiguous()


def length_of_each(lengths: Tensor | None) -> Tensor | None:
    """Turn `[...]` into contiguous `[B]` of at least int32: fewer bits may not hold the number of tokens."""
    if lengths is None:
        return None
    return lengths.to(torch.promote_types(lengths.dtype, torch.int32)).reshape(-1).contiguous()


def padding_mask(lengths: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Return `[..., T]`, true at the padding of `tokens` `[..., T, width]`, or None without lengths."""
    if lengths is None:
        return None
    return torch.arange(tokens.shape[-2], device=tokens.device) >= lengths.unsqueeze(-1)


def without_padding(tokens: Tensor, padding: Tensor | None) -> Tensor:
    """Copy `tokens` with zeros at the padding: whatever stands there, NaN too, reaches no result and no gradient."""
    return tokens if padding is None else clear_padding_(tokens.clone(memory_format=torch.contiguous_format), padding)


def clear_padding_(tokens: Tensor, padding: Tensor | None) -> Tensor:
    """Do as `without_padding`, in place, for contiguous tokens."""
    if padding is None or tokens.device.type != "cpu" or not is_plain_eager(tokens):
        return tokens if padding is None else tokens.masked_fill_(padding.unsqueeze(-1), 0.0)
    # A broadcast mask is looked up number by number, at five times the cost of a copy.
    rows_of(tokens).index_fill_(0, padding.flatten().nonzero().squeeze(1), 0.0)
    return tokens


# Shrinkage


def effective_nonlinearity(nonlinearity: Nonlinearity, threshold: float) -> Nonlinearity:
    """Return the nonlinearity that runs: "identity" for `S_0`."""
    return "identity" if nonlinearity == "soft_threshold" and threshold == 0.0 else nonlinearity


def shrink_reference(x: Tensor, threshold: float | Tensor, nonlinearity: str) -> Tensor:
    """Apply the formula of a layer's nonlinearity: `S_θ`, ReLU, or nothing at all."""
    if nonlinearity == "soft_threshold":
        shrunk = torch.sign(x) * torch.relu(torch.abs(x) - threshold)
        # torch differentiates sign and |x| at 0 to 0; S_0 is the identity, whose gradient there is 1.
        return torch.where((x == 0) & (threshold == 0), x, shrunk)
    return torch.relu(x) if nonlinearity == "relu" else x


def shrink_(x: Tensor, threshold: float, nonlinearity: Nonlinearity) -> Tensor:
    """Apply an effective nonlinearity in place."""
    if nonlinearity == "relu":
        return x.relu_()
    return x if nonlinearity == "identity" else torch.ops.aten.softshrink.out(x, held(threshold, x.dtype), out=x)


def shrink_backward(grad: Tensor, output: Tensor, nonlinearity: Nonlinearity, out: Tensor | None = None) -> Tensor:
    """Return the gradient through `shrink_`, which passes where output ≠ 0, in `out`, maybe `grad`, or new memory."""
    grad_input = torch.empty_like(output) if out is None else out
    if nonlinearity == "identity":
        return grad_input.copy_(grad)
    # One kernel of torch's: the output of each nonlinearity is zero exactly where its gradient is.
    return torch.ops.aten.softshrink_backward.grad_input(grad, output, 0.0, grad_input=grad_input)


def held(threshold: float, dtype: torch.dtype) -> float:
    """Return the threshold, or the largest number of the dtype, which torch takes and which shrinks all to zero too."""
    return min(threshold, torch.finfo(dtype).max)


def budget(of_bytes: Mapping[str, int], tensor: Tensor) -> int:
    """Return the number for the device of the tensor, of those for "cpu" and "cuda"."""
    return of_bytes["cpu" if tensor.device.type == "cpu" else "cuda"]
