"""One case: every implementation is checked, then timed in round robin with the others, and its peak memory taken."""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from cdt_fast.bench.case import Case, Implementation, Step, Unavailable

Name = TypeVar("Name")

MAX_REASON = 300  # characters
# Steps shorter than this are called several times a reading: what a reading costs itself must not count, nor, on a GPU,
# what its clock rate does from one millisecond to the next.
SHORTEST_READING = {"cpu": 0.005, "cuda": 0.05}  # seconds
MAX_CALLS = {"cpu": 100, "cuda": 1000}


class Refused(Exception):
    """An implementation does not compute what the formula does; the message is the difference."""


class Rounds(NamedTuple):
    """How many rounds of a case are timed: as many as fit into `seconds`, within these bounds."""

    least: int
    most: int
    seconds: float

    def fitting(self, round_seconds: float) -> int:
        """The number of rounds if one takes `round_seconds`."""
        return min(self.most, max(self.least, int(self.seconds / max(round_seconds, 1e-9))))


@dataclass
class _Measured:
    """What has been measured of an implementation."""

    role: str
    step: Step | None = None  # None once it cannot run
    calls: int = 1  # of the step in a reading
    once: float = 0.0  # seconds of a call
    difference: float | None = None
    status: str = "timed"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)

    def drop(self, error: Exception) -> None:
        """Take it out of the race; the error becomes its status and reason."""
        known = {Unavailable: "unavailable", Refused: "wrong"}
        reason = str(error) if type(error) in known else f"{type(error).__name__}: {error}"
        self.status, self.reason = known.get(type(error), "failed"), " ".join(reason.split())[:MAX_REASON]
        self.step = None


def measure(case: Case, device: torch.device, rounds: Rounds) -> dict[str, Any]:
    """Times, ratios and peak memory of every implementation of a case, as the results file has them.

    One that could not run, or was wrong, has a status and a reason, and no figure.
    """
    formula = functools.cache(case.expected)
    found = {one.name: _admitted(one, formula, case.tolerance, device) for one in case.implementations}
    del formula  # what was expected is not part of any implementation's peak
    running = [one for one in found.values() if one.step]
    for order in round_robin(running, rounds.fitting(sum(one.calls * one.once for one in running))):
        for one in order:
            try:
                if one.step:
                    one.seconds.append(seconds(one.step, device, one.calls))
            except Exception as error:
                one.drop(error)
    eager = next((one for one in found.values() if one.step and one.role == "eager"), None)
    peers = {name: statistics.median(one.seconds) for name, one in found.items() if one.step and one.role == "peer"}
    best = min(peers, key=peers.__getitem__, default=None)
    implementations: dict[str, Any] = {}
    for name, one in found.items():
        figures = {"role": one.role, "status": one.status, "reason": one.reason, "difference": one.difference}
        if one.step:
            # A CUDA graph allocates once and holds its memory, which a step does not show.
            graph = device.type == "cuda" and name.startswith("torch.compile, max-autotune")
            figures |= {
                "median_seconds": statistics.median(one.seconds),
                "spread_seconds": [min(one.seconds), max(one.seconds)],
                "seconds": one.seconds,
                "calls": one.calls,
                "over_eager": median_ratio(eager.seconds, one.seconds) if eager else None,
                "over_best_peer": median_ratio(found[best].seconds, one.seconds) if best else None,
                "peak_bytes": None if graph else peak_memory(one.step, device),
            }
        implementations[name] = figures
    return {
        "suite": case.suite,
        "case": case.name,
        "shape": dict(case.shape),
        "dtype": case.dtype,
        "note": case.note,
        "tolerance": case.tolerance,
        "best_peer": best,
        "implementations": implementations,
    }


def _admitted(candidate: Implementation, formula: Step, tolerance: float, device: torch.device) -> _Measured:
    one = _Measured(candidate.role)
    try:
        one.step, one.difference = checked(candidate, formula, tolerance)
        one.once = seconds(one.step, device)
        one.calls = calls_per_reading(one.once, device)
    except Exception as error:  # an implementation that cannot do it is a result, too
        one.drop(error)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # one that ran out of memory must not leave too little for the next
    return one


def checked(candidate: Implementation, formula: Step, tolerance: float) -> tuple[Step, float]:
    """Prepare an implementation and run it once; returns its step, and by how much it differs from the formula.

    Raises:
        Refused: it differs by more than rounding.
        Unavailable: it cannot run here.
        Exception: whatever the implementation itself raises.
    """
    step = candidate.prepare()
    difference = disagreement(step(), formula())
    if not difference <= tolerance:
        raise Refused(f"differs from the formula by {difference:.1e}, more than {tolerance:.0e}: not timed")
    return step, difference


def disagreement(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest root mean square difference of a tensor, relative to the root mean square of the expected one.

    Raises:
        Refused: their number or their shapes differ.
    """
    if [tuple(one.shape) for one in actual] != [tuple(one.shape) for one in expected]:
        raise Refused(f"gives {len(actual)} tensors or other shapes than the formula's {len(expected)}")
    worst = 0.0
    for one, other in zip(actual, expected, strict=True):
        truth = other.to(torch.promote_types(other.dtype, torch.float32))
        difference = _root_mean_square(one.to(truth) - truth) if other.numel() else 0.0
        if difference:
            relative = difference / (_root_mean_square(truth) or math.nan)
            worst = max(worst, relative if math.isfinite(relative) else math.inf)
    return worst


def _root_mean_square(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item()


def round_robin(names: Sequence[Name], rounds: int) -> Iterator[list[Name]]:
    """The order of each round: every name once, each round begins one further on.

    A drift of the machine's speed then cancels in the ratios of a round, and no implementation is always the first.
    """
    for number in range(rounds if names else 0):
        first = number % len(names)
        yield [*names[first:], *names[:first]]


def calls_per_reading(once: float, device: torch.device) -> int:
    """How often a step of `once` seconds is called for one reading."""
    return min(MAX_CALLS[device.type], max(1, math.ceil(SHORTEST_READING[device.type] / max(once, 1e-9))))


def seconds(step: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Mean time of `calls` calls, until the device is done with the last."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        step()
    wait()
    return (time.perf_counter() - started) / calls


def median_ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """The median over the rounds of another implementation's time over this one's: above 1, this one is faster."""
    return statistics.median(other / one for other, one in zip(others, own, strict=True))


def peak_memory(step: Callable[[], object], device: torch.device) -> int:
    """Bytes that torch allocates at the peak of a step beyond what rests between two steps: inputs, parameters,
    gradients and the optimizer's state are there before, whatever computes the step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler announces itself on stderr
    profiled: Any = profile(profile_memory=True)
    with profiled:
        step()  # the profiler does not see that memory from before it is freed: the second step frees the first one's
        step()
    events = profiled.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    held = list(itertools.accumulate((change for _, change in changes), initial=0))
    return max(held) - held[-1]
