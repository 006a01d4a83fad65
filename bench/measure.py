"""One case: every implementation is checked, then timed in round robin with the others, and its peak memory taken."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.ceilings import Ceilings, Probe, shares_of_floor
from cdt_fast.bench.clock import Rounds, calls_a_reading, round_robin, seconds

# Peak memory of an implementation of a case: bytes, or the reason why there is no figure.
PeakMemory = Callable[[Case, Implementation, Step], "int | str"]

_LONGEST_REASON = 300

# Seconds: the gate's own run of an implementation tells well enough how long one takes, if that is so long.
_LONG = 1.0

# On a CPU each is a process of its own, which does little but import and prepare, and whose memory nobody else counts.
_PEAKS_AT_ONCE = {"cpu": 2, "cuda": 1}


class Refused(Exception):
    """An implementation that the gate does not let through; the message is the reason."""


@dataclass
class _Taken:
    """An implementation and what has been measured of it."""

    implementation: Implementation
    step: Step | None = None
    difference: float | None = None
    status: str = "timed"
    reason: str = ""
    calls: int = 1
    turn: float = 0.0
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
        wide = torch.promote_types(other.dtype, torch.float32)
        size = other.to(wide).square().mean().sqrt().item()
        difference = (one.to(other.device, wide) - other.to(wide)).square().mean().sqrt().item()
        if not other.numel() or difference == 0.0:
            continue
        relative = difference / size if size else math.inf
        worst = relative if math.isnan(relative) else max(worst, relative)
        if math.isnan(worst):
            return math.inf
    return worst


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
        difference = disagreement(actual, self._expected(candidate.expected or self._case.expected))
        if not difference <= self._case.tolerance:
            raise Refused(
                f"differs from the formula by {difference:.1e}, more than {self._case.tolerance:.0e}: not timed"
            )
        return step, difference, spent

    def _expected(self, step: Step) -> list[Tensor]:
        if step not in self._known:
            try:
                self._known[step] = step()
            except Exception as error:
                raise Refused(f"nothing to compare with: the formula gave {_one_line(error)}") from error
        return self._known[step]


def measure(case: Case, device: torch.device, rounds: Rounds, ceilings: Ceilings, peak: PeakMemory) -> dict[str, Any]:
    """Times, ratios, peak memory and share of the floor of every implementation to do a case.

    Args:
        case: the work.
        device: where it runs.
        rounds: how many are timed.
        ceilings: of the device; their probes take turns with the implementations where the case has a floor.
        peak: measures the peak memory of an implementation that has been timed.

    Returns:
        Words and numbers only. What could not run, or was wrong, has a status, a reason and no figure.
    """
    gate = Gate(case)
    taken = [_admitted(gate, candidate, device) for candidate in case.implementations]
    del gate  # what was expected is not part of any implementation's peak
    runs = any(one.step is not None for one in taken)
    bounded = runs and bool(case.flop or case.moved)
    probes = {"product": ceilings.product(case.dtype), "copy": ceilings.copy()} if bounded else {}
    probed = _time_round_robin(taken, probes, device, rounds)
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
        "implementations": {},
    }
    if probes:
        medians = {name: probes[name].work / statistics.median(probed[name]) for name in probes}
        floor = max(case.flop / medians["product"], case.moved / medians["copy"])
        result |= {"floor_seconds": floor, "flop_per_second": medians["product"], "bytes_per_second": medians["copy"]}
    timed = [one for one in taken if one.status == "timed"]
    eager = next((one for one in taken if one.implementation.role == "eager"), None)
    peers = [one for one in timed if one.implementation.role == "peer"]
    best = min(peers, key=lambda one: statistics.median(one.seconds), default=None)
    result["best_peer"] = None if best is None else best.implementation.name
    peaks = _peaks(case, timed, peak, at_once=_PEAKS_AT_ONCE[device.type])
    for one in taken:
        figures: dict[str, Any] = {
            "role": one.implementation.role,
            "status": one.status,
            "reason": one.reason,
            "difference": one.difference,
        }
        if one.status == "timed":
            figures |= _times(one, eager, best)
            if probes:
                beside = {name: (probes[name].work, probed[name]) for name in probes}
                shares = shares_of_floor(one.seconds, case.flop, case.moved, beside["product"], beside["copy"])
                figures["share_of_floor"] = statistics.median(shares)
            figures |= peaks[one.implementation.name]
        result["implementations"][one.implementation.name] = figures
    return result


def _admitted(gate: Gate, candidate: Implementation, device: torch.device) -> _Taken:
    one = _Taken(candidate)
    try:
        one.step, one.difference, once = gate.open(candidate)
        if once < _LONG or device.type == "cuda":  # on a GPU the host does not wait
            once = seconds(one.step, device)
        one.calls = calls_a_reading(once, device)
        one.turn = one.calls * once
    except Unavailable as reason:
        one.drop("unavailable", str(reason))
    except Refused as reason:
        one.drop("wrong", str(reason))
    except Exception as error:  # an implementation that cannot do it is a result, too
        one.drop("failed", _one_line(error))
    if one.step is None and device.type == "cuda":
        torch.cuda.empty_cache()  # one that ran out of memory must not leave too little for the next
    return one


def _time_round_robin(
    taken: Sequence[_Taken], probes: Mapping[str, Probe], device: torch.device, rounds: Rounds
) -> dict[str, list[float]]:
    """Fill in the seconds of every implementation; the seconds of the probes, by name."""
    candidates = {f"implementation {number}": one for number, one in enumerate(taken) if one.step is not None}
    round_seconds = sum(one.turn for one in candidates.values())
    round_seconds += sum(probe.calls * probe.work / probe.rate for probe in probes.values())
    probed: dict[str, list[float]] = {name: [] for name in probes}
    for order in round_robin([*candidates, *probes], rounds.fitting(round_seconds) if candidates else 0):
        for name in order:
            if name in probed:
                probed[name].append(seconds(probes[name].step, device, probes[name].calls))
                continue
            one = candidates[name]
            if one.step is None:
                continue
            try:
                one.seconds.append(seconds(one.step, device, one.calls))
            except Exception as error:
                one.drop("failed", _one_line(error))
    return probed


def _times(one: _Taken, eager: _Taken | None, best: _Taken | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "median_seconds": statistics.median(one.seconds),
        "spread_seconds": [min(one.seconds), max(one.seconds)],
        "seconds": one.seconds,
        "calls": one.calls,
    }
    for name, other in (("over_eager", eager), ("over_best_peer", best)):
        known = other is not None and other.status == "timed"
        figures[name] = median_ratio(other.seconds, one.seconds) if other is not None and known else None
    return figures


def median_ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """The median over the rounds of another implementation's time over this one's: above 1, this one is faster."""
    return statistics.median(other / one for other, one in zip(others, own, strict=True))


def _peaks(case: Case, timed: Sequence[_Taken], peak: PeakMemory, at_once: int) -> dict[str, dict[str, Any]]:
    """Peak memory of the implementations, or the reason why there is no figure, by their names."""

    def one_peak(one: _Taken) -> dict[str, Any]:
        if not case.with_memory or one.step is None:
            return {"peak_bytes": None, "peak_reason": "not measured for this case"}
        bytes_or_reason = peak(case, one.implementation, one.step)
        measured = isinstance(bytes_or_reason, int)
        return {"peak_bytes": bytes_or_reason if measured else None, "peak_reason": "" if measured else bytes_or_reason}

    with ThreadPoolExecutor(at_once) as workers:
        return dict(zip((one.implementation.name for one in timed), workers.map(one_peak, timed), strict=True))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
