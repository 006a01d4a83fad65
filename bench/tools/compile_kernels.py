"""Compile the kernels for GPUs that are not here: `python -m cdt_fast.bench.tools.compile_kernels`.

The ops run on meta tensors, which have shapes and no memory. The launches that they would make on a card are recorded,
and each specialization is compiled for that card with the installed Triton. The exit status is 1 if one does not
compile, needs more shared memory than the card has, or spills more than four registers in 16 bits.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cdt_fast import ops
from cdt_fast.files import write_text
from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_
from cdt_fast.models import DUST
from cdt_fast.ops import common
from cdt_fast.ops.common import CARDS, KERNEL_DTYPES, GpuSpec
from cdt_fast.tables import as_markdown

# An RTX 4090 takes the machine code of an RTX 3090, a B300 that of a B200.
REPORTED = [name for name in CARDS if name not in ("RTX 4090", "B300")]
MODES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "TF32": torch.float32, "float32": torch.float32}
DOCUMENT = Path("docs/gpus.md")
HARMLESS_SPILL = 16  # bytes a thread: four registers
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
LOADS = re.compile(
    r"ld\.global(?:\.[\w:]+?)*?(?:\.v(?P<count>\d))?\.[bfsu](?P<bits>\d+)|cp\.async\.c.*\], 0x(?P<bytes>[0-9a-f]+)"
)
# Constants that are added to addresses in shared memory: the upper half says how the tile there is swizzled.
DESCRIPTORS = re.compile(r"(?:add\.s64|or\.b64)\s+%rd\d+, (%rd\d+), (-?\d+);")


class Launch(NamedTuple):
    kernel: Any  # the `@triton.jit` function
    arguments: Mapping[str, Any]  # by the kernel's parameters, constants included
    options: Mapping[str, Any]  # num_warps, num_stages, …


class OperatorsOnMeta(TorchDispatchMode):
    """Run the implementation of our operators on meta tensors, where torch would ask for their shapes alone."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace != "cdt_fast":
            return function(*args, **(kwargs or {}))
        with self:
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
            return torch.library.get_kernel(function, "CUDA").call_boxed(keys, *args, **(kwargs or {}))


@contextlib.contextmanager
def recording(card: GpuSpec, mode: OperatorsOnMeta | None = None, precision: str = "tf32") -> Iterator[list[Launch]]:
    """Collect what the ops would launch for meta tensors on `card`, and launch nothing; `mode` runs torch's own
    operations, `precision` is that of float32 products."""
    launches: list[Launch] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        options = {name: given.pop(name) for name in list(given) if name not in kernel.arg_names}
        bound = kernel.signature.bind(*args, **given)
        bound.apply_defaults()
        launches.append(Launch(kernel, bound.arguments, options))

    answers = {
        "unsupported_reason": lambda device, dtype: None if dtype in KERNEL_DTYPES else f"not for {dtype}",
        "unavailable_reason": lambda: None,
        "spec_of": lambda device: card,
        "dot_precision": lambda dtype: precision if dtype == torch.float32 else "ieee",
    }
    with (
        mock.patch.object(JITFunction, "run", note),
        mock.patch.multiple(common, **answers),
        ops.use_backend("triton"),
        mode or OperatorsOnMeta(),
    ):
        yield launches


def call_ops(dtype: torch.dtype, with_flags: bool = True) -> None:
    """Call the ops, forward and backward, so that every kernel is reached as in a default training; in bfloat16 also
    with each flag that changes the code."""

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def differentiate(function: Callable[..., Any], *args: Any, **options: Any) -> None:
        outputs = [one for one in tree_leaves(function(*args, **options)) if one is not None and one.requires_grad]
        torch.autograd.backward(outputs, [torch.empty_like(one) for one in outputs])

    every, short = with_flags and dtype == torch.bfloat16, dtype.itemsize == 2
    lengths, targets = torch.empty(2, 3200, dtype=torch.int64, device="meta")
    weights, numbers = torch.empty(6, device="meta"), {"step": 0.1, "threshold": 0.1}
    shapes = [(3200, 20, 256), (512, 64, 64), (64, 1024, 64), (64, 1024, 128), (64, 1024, 256)]
    # Shorter sequences, and rows that are not aligned.
    for batch, tokens, width in shapes + [(64, 160, 64), (64, 160, 128), (64, 1024, 97), (64, 1024, 225)] * every:
        z = tensor(batch, tokens, width)
        flags = {"values": tensor(batch, tokens, width), "lengths": lengths[:batch], "energy": True}
        alone = ({name: flag} for name, flag in flags.items())
        for given in [{}, flags, *alone] if every else [{}]:
            differentiate(ops.symmetric_attention, z, **given)
    for width, nonlinearity in itertools.product((256, 64)[: 1 + with_flags], ("soft_threshold", "relu")[: 1 + every]):
        step = tensor(64_000, 1024), tensor(64_000, width), tensor(width, 1024)
        differentiate(ops.lista_step, *step, **numbers, nonlinearity=nonlinearity)
    differentiate(ops.residual_linear, tensor(16_000, 768), tensor(768, 768), tensor(16_000, 768))
    for vocabulary in (128_256, 50_257, 32_000, 10)[: 4 if every else 1]:
        depths = [tensor(3200, 64) for _ in range(3)], tensor(vocabulary, 64), targets
        differentiate(lambda *depths: ops.layerwise_cross_entropy(*depths)[1], *depths)
        for flags in ({}, {"softcap": 30.0, "label_smoothing": 0.1})[: 1 + every]:
            differentiate(ops.layerwise_cross_entropy, *depths, depth_weights=weights[:3], **flags)
    if every:
        vectors = torch.empty(3, 3200, device="meta")
        shard: dict[str, Any] = {"first": 64_128, "classes": 128_256, "log_sums": vectors[0]}
        for losses, scales in ((vectors[1], None), (None, vectors[2])):
            cross_entropy_(tensor(3200, 64_128), 64_128, targets, losses, scales, -100, None, 0.0, **shard)
    depths = [tensor(64_000, 256) for _ in range(6)]
    differentiate(ops.layerwise_reconstruction_loss, depths, depths[0].detach(), depth_weights=weights)
    # Under autocast the target stays in float32. 225 pixels: rows that are not aligned.
    sizes = (256, torch.float32), (256, dtype), (64, torch.float32), (225, dtype)
    for width, target_dtype in sizes[: 4 if with_flags else 1] if short else ():
        dictionary, target = tensor(width, 1024), torch.empty(3200, 20, width, dtype=target_dtype, device="meta")
        projection, signal = tensor(3200, 20, width), tensor(3200, 20, width).detach()
        given: dict[str, Any] = {**numbers, "projection": projection, "target": target}
        flags = ({}, {"lengths": lengths}, {"next_dictionary": tensor(width, 1024)}) if every and width == 256 else ()
        for more, codes in itertools.product(flags, (tensor(3200, 20, 1024), None)):
            differentiate(ops.unrolled_layer, codes, signal, dictionary, **given, **more)
        differentiate(DUST(width, 1024, 3).to("meta", dtype).layer_losses, signal, target, weights[:4])
    scalars = {name: tensor() for name in ("scale", "self_bias", "sharpness")}
    for atoms, part in itertools.product((512, 256)[: 1 + every] if short else (), (slice(2), slice(1), slice(1, 2))):
        for dictionary in (tensor(256, atoms), tensor(256, atoms).detach())[: 1 + every]:
            layer = tensor(3200, 5, 256), tensor(3200, 5, 256), dictionary, tensor(atoms)
            differentiate(lambda *layer, part=part: ops.denoising_layer(*layer, **scalars)[part], *layer)


class Driver:
    """The answers that Triton wants of a driver before it compiles for a card."""

    def __init__(self, card: GpuSpec) -> None:
        self.card = card

    def get_current_device(self) -> int:
        # No device has so high a number: nothing compiled here is taken for what the first device can run.
        return self.card.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card.capability, 32)


class Compiled(NamedTuple):
    """The result of compiling one specialization."""

    card: str
    kernel: str
    mode: str
    registers: int = 0  # of a thread
    spilled: int = 0  # bytes of local memory of a thread
    shared: int = 0  # bytes of shared memory of a block
    load_bits: int = 0  # that a thread reads at once from global memory, in most of its loads
    mixed: bool = False  # whether products for Hopper read one place as tiles of two kinds
    error: str = ""  # the compiler's message if it failed

    def faults(self) -> list[str]:
        """Describe what is wrong with it on its card."""
        card, faults = CARDS[self.card], [f"does not compile: {self.error}"] if self.error else []
        if self.mixed:
            faults.append("reads one place as tiles of two kinds, of which ptxas 12.8 makes code that reads another")
        if self.spilled > HARMLESS_SPILL and MODES[self.mode].itemsize == 2:
            faults.append(f"spills {self.spilled} bytes a thread")
        if self.shared > card.shared_memory:
            faults.append(f"needs {self.shared:,} bytes of shared memory, the card has {card.shared_memory:,}")
        return faults


@contextlib.contextmanager
def compiling_for(card: GpuSpec) -> Iterator[None]:
    """Let Triton believe that `card` is there."""
    with mock.patch.dict(vars(driver)):
        driver.set_active(Driver(card))  # type: ignore[arg-type]
        yield


def reads_two_kinds(ptx: str) -> bool:
    """Return whether two descriptors of tiles have the same address, but not the same swizzling."""
    halves = ((base, *divmod(int(text) % 2**64, 2**32)) for base, text in DESCRIPTORS.findall(ptx))
    kinds = {(base, low, high) for base, high, low in halves if high}
    return len(kinds) > len({one[:2] for one in kinds})


def key(card: str, launch: Launch) -> tuple[str, str]:
    """The name of the kernel, and the key under which Triton keeps it when it is compiled."""
    with compiling_for(CARDS[card]):
        *_, binder = launch.kernel.device_caches[CARDS[card].capability]
        _, specialization, options = binder(**launch.arguments, **launch.options)
    return launch.kernel.__name__, f"{specialization} {options}"


def specializations(card: str, modes: Sequence[str], part: str, flags: bool) -> list[tuple[str, str, Launch]]:
    """A launch of every specialization on a card in every mode, of the kernels whose name contains `part`."""
    found = {}
    for mode in modes:
        with recording(CARDS[card], precision="ieee" if mode == "float32" else "tf32") as launches:
            call_ops(MODES[mode], flags)
        found |= {(mode, *key(card, one)): (card, mode, one) for one in launches if part in one.kernel.__name__}
    return list(found.values())


def compiled(card: str, mode: str, launch: Launch) -> Compiled:
    """Compile one specialization for a card, and read its machine code."""
    name = launch.kernel.__name__.removesuffix("_kernel")
    try:
        with compiling_for(CARDS[card]):
            kernel = launch.kernel.warmup(grid=(1,), **launch.arguments, **launch.options)
    except Exception as error:  # Triton raises its own types, MLIR RuntimeError, ptxas others
        return Compiled(card, name, mode, error=f"{type(error).__name__}: {str(error).strip()[-200:]}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, *spilled = map(int, *RESOURCES.findall(printed))
    loaded: Counter[int] = Counter()  # bits in the code, by the width of a load
    for load in LOADS.finditer(kernel.asm["ptx"]):
        width = 8 * int(load["bytes"], 16) if load["bytes"] else int(load["bits"]) * int(load["count"] or 1)
        loaded[width] += width
    widest = max(loaded, key=loaded.__getitem__, default=0)
    mixed = CARDS[card].capability == 90 and reads_two_kinds(kernel.asm["ptx"])
    return Compiled(card, name, mode, registers, sum(spilled), kernel.metadata.shared, widest, mixed)


_work: list[tuple[str, str, Launch]] = []  # of the workers, who are forked


def _compile(number: int) -> Compiled:
    return compiled(*_work[number])


def table(results: Sequence[Compiled]) -> list[list[str]]:
    """A row for each kernel and mode: the worst of its specializations on each card."""
    cards = dict.fromkeys(one.card for one in results)
    rows = [["kernel", "", *(f"{card} ({CARDS[card].shared_memory // 1024} KiB)" for card in cards)]]
    for row in dict.fromkeys(one[1:3] for one in results):
        rows.append([*row, *(_worst([one for one in results if one[:3] == (card, *row)]) for card in cards)])
    return rows


def _worst(some: Sequence[Compiled]) -> str:
    if not some or any(one.error for one in some):
        return f"**{len(some)} do not compile**" if some else "–"
    spilled = max(one.spilled for one in some)
    shared = -(-max(one.shared for one in some) // 1024)
    words = f"{max(one.registers for one in some)}/{shared}/{min(one.load_bits for one in some)}"
    return f"{words} **spills {spilled}**" if spilled else words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a specialization has a fault."""
    parser = argparse.ArgumentParser(prog="python -m cdt_fast.bench.tools.compile_kernels", description=__doc__)
    parser.add_argument("--card", choices=CARDS, nargs="+", default=REPORTED, help="default: one of each kind")
    parser.add_argument("--mode", choices=MODES, nargs="+", default=list(MODES), help="default: all")
    parser.add_argument("--kernel", default="", help="a part of the names of the kernels to compile (all)")
    parser.add_argument("--default", action="store_true", help="in bfloat16 no more than in the other modes")
    parser.add_argument("--write", action="store_true", help=f"put the rows of the first mode into {DOCUMENT}")
    options = parser.parse_args(arguments)
    given = options.mode, options.kernel, not options.default
    _work[:] = (one for card in options.card for one in specializations(card, *given))
    # Forked: the workers import and record nothing. The last kernels take longest, and Python's collector a tenth.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork"), gc.disable) as pool:
        results = [*pool.map(_compile, range(len(_work))[::-1])][::-1]
    faults = [f"{one.kernel}, {one.mode}, {one.card}: {fault}" for one in results for fault in one.faults()]
    rows = table(results)
    text = f"{len(results)} specializations compiled with Triton {triton.__version__}, faults: {len(faults) or 'none'}."
    print(as_markdown(rows), "", text, *dict.fromkeys(faults), sep="\n")
    if options.write:
        first = as_markdown([[row[0], *row[2:]] for row in rows if row[1] in ("", options.mode[0])])
        place = re.compile(r"(?<=<!-- compile_kernels -->\n).*(?=<!-- end -->)", re.DOTALL)
        write_text(DOCUMENT, place.sub(f"\n{text}\n\n{first}\n\n", DOCUMENT.read_text("utf-8")))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
