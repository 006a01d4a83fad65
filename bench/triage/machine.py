"""What is there: versions, limits, the rows of the block tables that the card takes, both ceilings, and one launch."""

from __future__ import annotations

import functools
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import torch

from cdt_fast import ops
from cdt_fast.bench.case import Unavailable
from cdt_fast.bench.ceilings import Ceilings
from cdt_fast.bench.clock import seconds
from cdt_fast.bench.machine import describe, version_of
from cdt_fast.bench.measure import disagreement
from cdt_fast.bench.triage.stages import Context, Parts
from cdt_fast.kernels.cards import CARDS, GpuSpec
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference

_LIMITS = (
    "L2_cache_size",
    "shared_memory_per_block_optin",
    "shared_memory_per_multiprocessor",
    "regs_per_multiprocessor",
    "max_threads_per_multi_processor",
)
_ASKED = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "temperature.gpu",
    "compute_mode",
    "mig.mode.current",
    "memory.used",
)
_PEERS = ("liger-kernel", "cut-cross-entropy")
TOOLS = ("ncu", "compute-sanitizer", "nvcc", "cuobjdump")
_CALLS = {"toy": 3, "gpu": 200}


def parts(context: Context) -> Parts:
    """The parts of the stage."""
    device, size = context.device, context.size
    ceilings = Ceilings(device, size)
    yield "versions and limits", functools.partial(_versions, device)
    yield "nvidia-smi", _asked_of_the_driver
    yield "block tables", lambda: _block_tables(context.card)
    yield "one launch", functools.partial(_one_launch, device, size)
    yield "copy", lambda: [{"bytes_per_second": ceilings.copy().rate}]
    for dtype in ("bfloat16", "float32"):
        yield f"product {dtype}", functools.partial(_product, ceilings, dtype)


def _versions(device: torch.device) -> Iterator[dict[str, Any]]:
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    yield {
        **describe(device, "as it comes"),
        **{name: getattr(properties, name) for name in _LIMITS if hasattr(properties, name)},
        "cudnn": torch.backends.cudnn.version(),
        "peers": {name: version_of(name) for name in _PEERS},
        "tools": {name: shutil.which(name) is not None for name in TOOLS},
    }


def _asked_of_the_driver() -> Iterator[dict[str, Any]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise Unavailable("nvidia-smi is not there")
    command = [program, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if said.returncode:
        raise Unavailable(f"nvidia-smi: {(said.stdout + said.stderr).strip()[:200]}")
    yield dict(zip(_ASKED, (one.strip() for one in said.stdout.splitlines()[0].split(",")), strict=False))


def _block_tables(card: GpuSpec) -> Iterator[dict[str, Any]]:
    known = [name for name, one in CARDS.items() if one.capability == card.capability]
    alike = ", ".join(name for name, one in CARDS.items() if one.family == card.family)
    yield {
        "capability": card.capability,
        "shared_memory_per_block_bytes": card.shared_memory,
        "family": card.family,
        "known": bool(known),
        "note": f"sm_{card.capability} is "
        + (
            f"that of {', '.join(known)}, which the kernels are compiled for"
            if known
            else "not among the cards that the kernels are compiled for"
        )
        + f"; it takes the rows of {card.family!r}, as {alike} do",
    }


def _one_launch(device: torch.device, size: str) -> Iterator[dict[str, Any]]:
    rows = {"toy": 16, "gpu": 8000}[size]
    found, target = (torch.randn(rows, 256, device=device).bfloat16() for _ in range(2))

    def step() -> list[torch.Tensor]:
        with torch.no_grad(), ops.use_backend("triton"):
            return [ops.layerwise_reconstruction_loss([found], target)[1]]

    begin = time.perf_counter()
    losses = step()
    difference = disagreement(losses, [layerwise_reconstruction_loss_reference([found.double()], target.double())])
    first = time.perf_counter() - begin
    host = host_seconds(step, device, _CALLS[size])
    yield {
        "kernel": "layerwise_reconstruction_loss",
        "relative_error": difference,
        "passed": difference < 1e-5,
        "first_call_seconds": first,
        "host_microseconds_a_call": 1e6 * host,
        "microseconds_a_call": 1e6 * seconds(step, device, _CALLS[size]),
    }


def _product(ceilings: Ceilings, dtype: str) -> Iterator[dict[str, Any]]:
    best = ceilings.product(dtype)
    every = ceilings.as_dict()["flop_per_second"][dtype]
    yield {"dtype": dtype, "flop_per_second": best.rate, "fastest": best.name, "flop_per_second_by_shape": every}


def host_seconds(step: Any, device: torch.device, calls: int) -> float:
    """What a call keeps the host busy: until it has been handed over, not until the card has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    spent = (time.perf_counter() - begin) / calls
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return spent
