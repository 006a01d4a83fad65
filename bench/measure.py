"""One case: every implementation is checked, then timed in round robin with the others, and its peak memory taken."""

import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from cdt_fast.bench.case import Case, Implementation, Step, Unavailable

MAX_REASON = 300  # characters
LEAST, MOST = 5, 25  # rounds of a case: as many as fit into so many seconds
SECONDS = 8.0
# Shorter steps are called several times a reading: its own cost must not count, nor the clock rate of one millisecond.
SHORTEST_READING = {"cpu": 0.005, "cuda": 0.05}  # seconds
MAX_CALLS = {"cpu": 100, "cuda": 1000}


class Refused(Exception):
    """An implementation does not compute what the formula does; the message is the difference."""


def measure(case: Case, device: torch.device, rounds: int | None = None) -> dict[str, Any]:
    """Times, ratios and peak memory of every implementation of a case, as the results file has them: a status and a
    reason for one that could not run or was wrong."""
    formula = functools.cache(case.expected)
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    round_seconds = 1e-9
    for one in case.implementations:
        found[one.name] = {"role": one.role, "status": "timed", "reason": "", "difference": None}
        try:
            step, found[one.name]["difference"] = checked(one, formula, case.tolerance)
            once = seconds(step, device)
            calls = calls_per_reading(once, device)
            found[one.name] |= {"seconds": [], "calls": calls}
            round_seconds += calls * once
            steps[one.name] = step
        except Exception as error:  # an implementation that cannot do it is a result, too
            found[one.name] |= _reason(error)
        if device.type == "cuda" and one.name not in steps:
            torch.cuda.empty_cache()  # one that ran out of memory must not leave too little for the next
    del formula  # what was expected is not part of any implementation's peak
    for order in round_robin(list(steps), rounds or min(MOST, max(LEAST, int(SECONDS / round_seconds)))):
        for name in filter(steps.__contains__, order):
            try:
                found[name]["seconds"].append(seconds(steps[name], device, found[name]["calls"]))
            except Exception as error:
                found[name] |= _reason(error)
                del steps[name], found[name]["seconds"]
    medians = {name: statistics.median(found[name]["seconds"]) for name in steps}
    eager = next((name for name in steps if found[name]["role"] == "eager"), None)
    best = min((name for name in steps if found[name]["role"] == "peer"), key=medians.__getitem__, default=None)
    for name, step in steps.items():
        own = found[name]["seconds"]
        # A CUDA graph allocates once and holds its memory, which a step does not show.
        graph = device.type == "cuda" and name.startswith("torch.compile, max-autotune")
        found[name] |= {
            "median_seconds": medians[name],
            "spread_seconds": [min(own), max(own)],
            "over_eager": median_ratio(found[eager]["seconds"], own) if eager else None,
            "over_best_peer": median_ratio(found[best]["seconds"], own) if best else None,
            "peak_bytes": None if graph else peak_memory(step, device),
        }
    return {
        "suite": case.suite,
        "case": case.name,
        "shape": dict(case.shape),
        "dtype": case.dtype,
        "note": case.note,
        "tolerance": case.tolerance,
        "best_peer": best,
        "implementations": found,
    }


def _reason(error: Exception) -> dict[str, str]:
    """The status of an implementation that raised, and why."""
    status = {Unavailable: "unavailable", Refused: "wrong"}.get(type(error), "failed")
    words = f"{type(error).__name__}: {error}" if status == "failed" else str(error)
    return {"status": status, "reason": " ".join(words.split())[:MAX_REASON]}


def checked(candidate: Implementation, formula: Step, tolerance: float) -> tuple[Step, float]:
    """Run an implementation once; returns its step and difference from the formula, `Refused` beyond rounding."""
    step = candidate.prepare()
    difference = disagreement(step(), formula())
    if not difference <= tolerance:
        raise Refused(f"differs from the formula by {difference:.1e}, more than {tolerance:.0e}: not timed")
    return step, difference


def disagreement(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest root mean square difference of a tensor, relative to the root mean square of the expected one."""
    if [tuple(one.shape) for one in actual] != [tuple(one.shape) for one in expected]:
        raise Refused(f"gives {len(actual)} tensors or other shapes than the formula's {len(expected)}")
    worst = 0.0
    for one, other in zip(actual, expected, strict=True):
        truth = other.to(torch.promote_types(other.dtype, torch.float32))
        difference = (one.to(truth) - truth).norm()
        if difference != 0:
            worst = max(worst, (difference / truth.norm()).nan_to_num(math.inf, math.inf).item())
    return worst


def round_robin(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round: every name once, each round begins one further on, so that none is always the first."""
    for number in range(rounds if names else 0):
        first = number % len(names)
        yield [*names[first:], *names[:first]]


def calls_per_reading(once: float, device: torch.device) -> int:
    """Return how often a step of `once` seconds is called for one reading."""
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
    """Bytes that torch allocates at the peak of a step beyond what rests between two steps, such as the inputs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler announces itself on stderr
    profiled: Any = profile(profile_memory=True)
    with profiled:
        step()  # torch does not see, and warns, that it frees memory from before; the second step frees the first one's
        step()
    events = profiled.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    held = list(itertools.accumulate((change for _, change in changes), initial=0))
    return max(held) - held[-1]
