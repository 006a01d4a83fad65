"""The stages of a triage, in their order, how one runs in this process, and the file that all of them write."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cdt_fast.bench.case import Unavailable
from cdt_fast.kernels.cards import GpuSpec, card_of

# What a part finds, one mapping a line; and a stage's parts by name, each done when its turn comes.
Work = Callable[[], Iterable[Mapping[str, Any]]]
Parts = Iterator[tuple[str, Work]]


@dataclass(frozen=True)
class Stage:
    """A process of the triage."""

    name: str  # unique
    limit: float  # the seconds after which it is killed
    where: str  # module and function in this package that give its parts


# The launchers of the kernels whose blocks are swept (`hot_kernels.HOT`).
SWEPT = ("unrolled_forward", "unrolled_backward", "cross_entropy", "streaming_backward", "streaming_forward")
# Those of one row run side by side: nothing is timed in them, or they are alone.
PLAN: tuple[tuple[Stage, ...], ...] = (
    (Stage("machine", 20, "machine:parts"),),
    (Stage("compile", 40, "compiling:defaults"),),
    (
        Stage("check step", 30, "works:check_step"),
        Stage("check cross-entropy", 30, "works:check_cross_entropy"),
        Stage("check attention", 30, "works:check_attention"),
        Stage("racecheck", 30, "tools:racecheck"),
        Stage("memcheck", 30, "tools:memcheck"),
    ),
    (Stage("step", 45, "works:time_step"),),
    (Stage("cross-entropy", 25, "works:time_cross_entropy"),),
    (Stage("attention", 20, "works:time_attention"),),
    (Stage("torch.compile", 30, "works:time_compiler"),),
    (Stage("compile blocks", 120, "compiling:candidates"),),
    *((Stage(f"sweep {kernel}", 20, f"sweep:{kernel}"),) for kernel in SWEPT),
    (Stage("ncu", 60, "tools:ncu"),),
)
# Started by tools, under a sanitizer or profiler.
PROGRAMS = {"once": "works:once", "hot": "sweep:hot"}
NAMES = [stage.name for row in PLAN for stage in row]

# How a stage's process says that it goes on in another one: its context on the card is lost.
LOST = 75
FAILED = 1
_BEGINS = "part "


class Lines:
    """The file of a triage: one JSON object a line, to which every process of a run adds as soon as it knows something.

    Args:
        path: where it is, or will be.
        run: what tells the lines of a run from those of others in the same file.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run

    def add(self, stage: str, part: str, fields: Mapping[str, Any]) -> None:
        """Write one line; when this returns it is on the disk. Processes may do so at the same time."""
        line = json.dumps(_plain({"run": self.run, "stage": stage, "part": part, **fields}), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:  # one write: no other line comes in between
            file.write(line.encode())
            os.fsync(file.fileno())

    def read(self, stage: str | None = None) -> list[dict[str, Any]]:
        """The lines of this run that are whole, all or those of a stage."""
        found = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    fields = json.loads(line)
                except json.JSONDecodeError:  # the end of an earlier run that was cut off
                    continue
                if isinstance(fields, dict) and fields.get("run") == self.run and stage in (None, fields.get("stage")):
                    found.append(fields)
        return found


def _plain(value: Any) -> Any:
    """`value` with words in place of the numbers that are not JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


@dataclass(frozen=True)
class Context:
    """What a part may need to know."""

    device: torch.device  # where it computes
    size: str  # "gpu" or "toy": which shapes
    lines: Lines  # where results go, and those of earlier stages are
    command: Sequence[str]  # starts this program again
    deadline: float = math.inf  # when this process is killed, by the monotonic clock

    @property
    def card(self) -> GpuSpec:
        """The device, as the launchers know it."""
        return card_of(torch.empty(0, device=self.device))

    def left(self) -> float:
        """The seconds until then."""
        return self.deadline - time.monotonic()


def one_part(name: str, work: Callable[[Context], Iterable[Mapping[str, Any]]]) -> Callable[[Context], Parts]:
    """A stage of one part."""
    return lambda context: iter([(name, functools.partial(work, context))])


def run_here(name: str, context: Context, skip: int) -> int:
    """Do the parts of a stage one after the other, but for the first `skip`; the exit status of the process.

    A part that fails is a line and does not stop the next, unless nothing works any more in this process.
    """
    stages = {stage.name: stage.where for row in PLAN for stage in row} | PROGRAMS
    module, function = stages[name].split(":")
    begin, status = time.perf_counter(), 0
    # The parts of an earlier process of this stage are made again, and not done again.
    parts: Parts = getattr(importlib.import_module(f"cdt_fast.bench.triage.{module}"), function)(context)
    for number, (part, work) in enumerate(parts):
        if number < skip:
            continue
        print(f"{_BEGINS}{number}: {part}", flush=True)
        try:
            for fields in work():
                context.lines.add(name, part, {**fields, "after_seconds": round(time.perf_counter() - begin, 2)})
        except Unavailable as reason:
            context.lines.add(name, part, {"status": "unavailable", "reason": str(reason)})
        except Exception as error:
            traceback.print_exc(limit=-4, file=sys.stdout)
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            context.lines.add(name, part, {"status": "failed", "reason": words})
            status = FAILED
            if _lost(context):
                return LOST
        gc.collect()
    return status


def parts_begun(output: str) -> int:
    """How many parts a process had begun, by what it printed."""
    begun = [line for line in output.splitlines() if line.startswith(_BEGINS)]
    return int(begun[-1].removeprefix(_BEGINS).split(":")[0]) + 1 if begun else 0


def _lost(context: Context) -> bool:
    """Whether the card answers no more in this process: after an access outside of its memory nothing does."""
    if context.device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(context.device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False
