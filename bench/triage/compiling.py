"""Kernels compiled side by side before the stages that launch them: each then finds its own in Triton's cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cdt_fast.bench.triage import works
from cdt_fast.bench.triage.hot_kernels import HOT, Hot
from cdt_fast.bench.triage.stages import Context, one_part
from cdt_fast.kernels.aot.__main__ import compiled
from cdt_fast.kernels.aot.compile import Configuration
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.cards import GpuSpec
from cdt_fast.kernels.launch import recording

CANDIDATES = "compile blocks"
# Seconds in which what has been begun is compiled, and nothing else is begun.
_ENOUGH = 10.0


def _defaults(context: Context) -> Iterator[dict[str, Any]]:
    """What the checks and timings will launch."""
    card = context.card
    wanted: dict[Configuration, dict[str, Any]] = {}
    for name, prepare in works.own_steps(context.device, context.size):
        step = works.on_kernels(prepare())
        with recording(card) as launches:
            step()
        for launch in launches:
            wanted.setdefault(Configuration.of(launch, card), {"first_for": name})
    yield {"specializations": len(wanted), "processes": _processes()}
    yield from _compiled(wanted, card, context)


def _candidates(context: Context) -> Iterator[dict[str, Any]]:
    """The blocks of the sweep, those next to a default first."""
    card = context.card
    wanted: dict[Configuration, dict[str, Any]] = {}
    queues = [(hot, hot.candidates(card, context.size)) for hot in HOT]
    # In turns: a stage that is cut off has something of every kernel.
    for place in range(max(len(queue) for _, queue in queues)):
        for hot, queue in queues:
            if place < len(queue):
                launch = hot.described(card, context.size, queue[place])
                named = {"kernel": hot.name, "blocks": hot.fields(queue[place])}
                wanted.setdefault(Configuration.of(launch, card), named)
    yield {"candidates": len(wanted), "processes": _processes()}
    yield from _compiled(wanted, card, context)


def _compiled(
    wanted: Mapping[Configuration, Mapping[str, Any]], card: GpuSpec, context: Context
) -> Iterator[dict[str, Any]]:
    for done, (configuration, found) in enumerate(compiled(list(wanted), _processes()), 1):
        faults = found.faults(card, spill_allowed=True)
        yield {
            "function": configuration.kernel,
            **wanted[configuration],
            "status": "failed" if faults else "compiled",
            "reason": "; ".join(faults),
            "registers": found.registers,
            "spilled_bytes": found.local_bytes,
            "shared_memory_bytes": found.shared_bytes,
            "redundancy": found.redundancy,
            "compile_seconds": found.seconds,
        }
        if context.left() < _ENOUGH:
            yield {"left_out": len(wanted) - done}
            break


defaults, candidates = one_part("defaults", _defaults), one_part("candidates", _candidates)


def compiled_blocks(lines: Sequence[Mapping[str, Any]], hot: Hot) -> list[Blocks]:
    """The blocks of a kernel that were compiled and fit the card, those without spills first."""
    found = [line for line in lines if line.get("kernel") == hot.name and line.get("status") == "compiled"]
    return [Blocks(**line["blocks"]) for line in sorted(found, key=lambda line: line["spilled_bytes"] > 0)]


def _processes() -> int:
    return max(1, min(16, os.cpu_count() or 1))
