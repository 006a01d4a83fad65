"""One case: every implementation is checked, then timed in round robin with the others, and its peak memory taken."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.ceilings import Ceilings, floor_seconds
from cdt_fast.bench.clock import Rounds, calls_a_reading, round_robin, seconds

# Peak memory of an implementation of a case: bytes, or the reason why there is no figure.
PeakMemory = Callable[[Case, Implementation, Any], "int | str"]

_LONGEST_REASON = 300

# Seconds: the gate's own run of an implementation tells well enough how long one takes, if that is so long.
_LONG = 1.0


class Refused(Exception):
    """An implementation that the gate does not let through; the message is the reason."""


@dataclass
class _Timed:
    """What takes its turn in a round, an implementation or a probe, and what has been measured of it."""

    step: Callable[[], Any] | None = None  # None once it cannot run
    calls: int = 1
    once: float = 0.0
    difference: float | None = None
    status: str = "timed"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)

    def drop(self, status: str, reason: str) -> None:
        self.status, self.reason, self.step = status, " ".join(reason.split())[:_LONGEST_REASON], None


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

    def open(self, candidate: Implementation) -> tuple[Step, float, float]:
        """Prepare one and run it once; its step, by how much it differs, and the seconds until the host resumed.

        Raises:
            Refused: it differs by more than rounding.
            Unavailable: it cannot run here.
            Exception: whatever the implementation itself raises.
        """
        step = candidate.prepare()
        started = time.perf_counter()
        actual = step()
        spent = time.perf_counter() - started
        formula = candidate.expected or self._case.expected
        if formula not in self._known:
            self._known[formula] = formula()
        difference = disagreement(actual, self._known[formula])
        if not difference <= self._case.tolerance:
            raise Refused(
                f"differs from the formula by {difference:.1e}, more than {self._case.tolerance:.0e}: not timed"
            )
        return step, difference, spent


def measure(case: Case, device: torch.device, rounds: Rounds, ceilings: Ceilings, peak: PeakMemory) -> dict[str, Any]:
    """Times, ratios, peak memory and share of the floor of every implementation to do a case, in words and numbers.

    What could not run, or was wrong, has a status, a reason and no figure. The probes of the ceilings take turns with
    the implementations where the case has a floor.
    """
    gate = Gate(case)
    taken = {one.name: _admitted(gate, one, device) for one in case.implementations}
    del gate  # what was expected is not part of any implementation's peak
    running = [one for one in taken.values() if one.step is not None]
    probes = [ceilings.product(case.dtype), ceilings.copy()] if running and (case.flop or case.moved) else []
    probed = [_Timed(probe.step, probe.calls, probe.work / probe.rate) for probe in probes]
    _time_round_robin([*running, *probed], device, rounds)
    result: dict[str, Any] = {
        "suite": case.suite,
        "case": case.name,
        "shape": dict(case.shape),
        "dtype": case.dtype,
        "note": case.note,
        "flop": case.flop,
        "moved_bytes": case.moved,
        "tolerance": case.tolerance,
        "floor_seconds": None,
    }
    floors: list[float] = []
    if probes:
        both = zip(probes, probed, strict=True)
        product, copy = ([probe.work / spent for spent in one.seconds] for probe, one in both)
        flop_rate, byte_rate = statistics.median(product), statistics.median(copy)
        result["floor_seconds"] = floor_seconds(case.flop, case.moved, flop_rate, byte_rate)
        result |= {"flop_per_second": flop_rate, "bytes_per_second": byte_rate}
        # A round at a time: a drift of the machine slows the probes of a round as it slows the work.
        floors = [floor_seconds(case.flop, case.moved, *rates) for rates in zip(product, copy, strict=True)]
    timed = [one for one in case.implementations if taken[one.name].status == "timed"]
    eager = next((one.name for one in case.implementations if one.role == "eager"), None)
    peers = [one.name for one in timed if one.role == "peer"]
    best = min(peers, key=lambda name: statistics.median(taken[name].seconds), default=None)
    result["best_peer"] = best
    peaks: dict[str, int | str] = {}
    if case.with_memory:
        # On a CPU each is a process of its own, which does little but import and prepare.
        with ThreadPoolExecutor(2 if device.type == "cpu" else 1) as workers:
            found = workers.map(lambda one: peak(case, one, taken[one.name].step), timed)
            peaks = dict(zip((one.name for one in timed), found, strict=True))
    result["implementations"] = {}
    for candidate in case.implementations:
        one = taken[candidate.name]
        figures = {"role": candidate.role, "status": one.status, "reason": one.reason, "difference": one.difference}
        if one.status == "timed":
            figures |= {
                "median_seconds": statistics.median(one.seconds),
                "spread_seconds": [min(one.seconds), max(one.seconds)],
                "seconds": one.seconds,
                "calls": one.calls,
            }
            for name, other in (("over_eager", eager), ("over_best_peer", best)):
                beside = taken[other].seconds if other and taken[other].status == "timed" else None
                figures[name] = median_ratio(beside, one.seconds) if beside else None
            if floors:
                figures["share_of_floor"] = median_ratio(floors, one.seconds)
            found = peaks.get(candidate.name, "not measured for this case")
            known = isinstance(found, int)
            figures |= {"peak_bytes": found if known else None, "peak_reason": "" if known else found}
        result["implementations"][candidate.name] = figures
    return result


def _admitted(gate: Gate, candidate: Implementation, device: torch.device) -> _Timed:
    one = _Timed()
    try:
        one.step, one.difference, one.once = gate.open(candidate)
        if one.once < _LONG or device.type == "cuda":  # on a GPU the host does not wait
            one.once = seconds(one.step, device)
        one.calls = calls_a_reading(one.once, device)
    except Unavailable as reason:
        one.drop("unavailable", str(reason))
    except Refused as reason:
        one.drop("wrong", str(reason))
    except Exception as error:  # an implementation that cannot do it is a result, too
        one.drop("failed", f"{type(error).__name__}: {error}")
    if one.step is None and device.type == "cuda":
        torch.cuda.empty_cache()  # one that ran out of memory must not leave too little for the next
    return one


def _time_round_robin(taken: Sequence[_Timed], device: torch.device, rounds: Rounds) -> None:
    """Fill in the seconds of all."""
    count = rounds.fitting(sum(one.calls * one.once for one in taken))
    for order in round_robin(taken, count if taken else 0):
        for one in order:
            if one.step is None:
                continue
            try:
                one.seconds.append(seconds(one.step, device, one.calls))
            except Exception as error:
                one.drop("failed", f"{type(error).__name__}: {error}")


def median_ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """The median over the rounds of another implementation's time over this one's: above 1, this one is faster."""
    return statistics.median(other / one for other, one in zip(others, own, strict=True))
