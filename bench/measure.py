"""One case: every implementation is checked, then timed in round robin with the others, and its peak memory taken."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cdt_fast.bench.case import Case, Implementation, Step, Unavailable

Name = TypeVar("Name")
# Peak memory of an implementation of a case: bytes, or the reason why there is no figure.
PeakMemory = Callable[[Case, Implementation, Any], "int | str"]

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
class _Timed:
    """What has been measured of an implementation."""

    step: Step | None = None  # None once it cannot run
    calls: int = 1  # of the step in a reading
    once: float = 0.0  # seconds of a call
    difference: float | None = None
    status: str = "timed"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)

    def drop(self, status: str, reason: str) -> None:
        self.status, self.reason, self.step = status, " ".join(reason.split())[:MAX_REASON], None


def seconds(step: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Mean time of `calls` calls, by the GPU's own clock if there is one."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - started) / calls
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(calls):
        step()
    stop.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop) / 1e3 / calls


def calls_per_reading(once: float, device: torch.device) -> int:
    """How often a step of `once` seconds is called for one reading."""
    return min(MAX_CALLS[device.type], max(1, math.ceil(SHORTEST_READING[device.type] / max(once, 1e-9))))


def round_robin(names: Sequence[Name], rounds: int) -> Iterator[list[Name]]:
    """The order of each round: every name once, each round begins one further on.

    A drift of the machine's speed then cancels in the ratios of a round, and no implementation is always the first.
    """
    for number in range(rounds if names else 0):
        first = number % len(names)
        yield [*names[first:], *names[:first]]


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


class Gate:
    """Lets an implementation of a case through if it computes what the case's formula does."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._known: dict[Step, list[Tensor]] = {}

    def open(self, candidate: Implementation) -> tuple[Step, float]:
        """Prepare an implementation and run it once; returns its step, and by how much it differs.

        Raises:
            Refused: it differs by more than rounding.
            Unavailable: it cannot run here.
            Exception: whatever the implementation itself raises.
        """
        step = candidate.prepare()
        actual = step()
        formula = candidate.expected or self._case.expected
        if formula not in self._known:
            self._known[formula] = formula()
        difference = disagreement(actual, self._known[formula])
        if not difference <= self._case.tolerance:
            raise Refused(
                f"differs from the formula by {difference:.1e}, more than {self._case.tolerance:.0e}: not timed"
            )
        return step, difference


def measure(case: Case, device: torch.device, rounds: Rounds, peak: PeakMemory) -> dict[str, Any]:
    """Times, ratios and peak memory of every implementation of a case, as the results file has them.

    One that could not run, or was wrong, has a status and a reason, and no figure.
    """
    gate = Gate(case)
    taken = {one.name: _admitted(gate, one, device) for one in case.implementations}
    del gate  # what was expected is not part of any implementation's peak
    running = [one for one in taken.values() if one.step is not None]
    for order in round_robin(running, rounds.fitting(sum(one.calls * one.once for one in running))):
        for one in order:
            if one.step is None:
                continue
            try:
                one.seconds.append(seconds(one.step, device, one.calls))
            except Exception as error:
                one.drop("failed", f"{type(error).__name__}: {error}")
    timed = [one for one in case.implementations if taken[one.name].status == "timed"]
    eager = next((one.name for one in timed if one.role == "eager"), None)
    peers = [one.name for one in timed if one.role == "peer"]
    best = min(peers, key=lambda name: statistics.median(taken[name].seconds), default=None)
    peaks: dict[str, int | str] = {}
    if case.with_memory:
        # On a CPU each is a process of its own, which does little but import and prepare.
        with ThreadPoolExecutor(2 if device.type == "cpu" else 1) as workers:
            found = workers.map(lambda one: peak(case, one, taken[one.name].step), timed)
            peaks = dict(zip((one.name for one in timed), found, strict=True))
    implementations: dict[str, Any] = {}
    for candidate in case.implementations:
        one = taken[candidate.name]
        figures = {"role": candidate.role, "status": one.status, "reason": one.reason, "difference": one.difference}
        if one.status == "timed":
            known = peaks.get(candidate.name, "not measured for this case")
            figures |= {
                "median_seconds": statistics.median(one.seconds),
                "spread_seconds": [min(one.seconds), max(one.seconds)],
                "seconds": one.seconds,
                "calls": one.calls,
                "over_eager": median_ratio(taken[eager].seconds, one.seconds) if eager else None,
                "over_best_peer": median_ratio(taken[best].seconds, one.seconds) if best else None,
                "peak_bytes": known if isinstance(known, int) else None,
                "peak_reason": "" if isinstance(known, int) else known,
            }
        implementations[candidate.name] = figures
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


def _admitted(gate: Gate, candidate: Implementation, device: torch.device) -> _Timed:
    one = _Timed()
    try:
        one.step, one.difference = gate.open(candidate)
        one.once = seconds(one.step, device)
        one.calls = calls_per_reading(one.once, device)
    except Unavailable as reason:
        one.drop("unavailable", str(reason))
    except Refused as reason:
        one.drop("wrong", str(reason))
    except Exception as error:  # an implementation that cannot do it is a result, too
        one.drop("failed", f"{type(error).__name__}: {error}")
    if one.step is None and device.type == "cuda":
        torch.cuda.empty_cache()  # one that ran out of memory must not leave too little for the next
    return one


def median_ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """The median over the rounds of another implementation's time over this one's: above 1, this one is faster."""
    return statistics.median(other / one for other, one in zip(others, own, strict=True))
