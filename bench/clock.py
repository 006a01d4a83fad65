"""Seconds of a step, and how many rounds of round robin are timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

Name = TypeVar("Name")

# Steps shorter than this are called several times a reading: what a reading costs itself must not count, nor, on a GPU,
# what its clock rate does from one millisecond to the next.
_SHORTEST_READING = {"cpu": 0.005, "cuda": 0.05}
_MOST_CALLS = {"cpu": 100, "cuda": 1000}


def seconds(step: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Mean time of `calls` calls: by the card's own clock, by the processor's where there is no card."""
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


def calls_a_reading(once: float, device: torch.device) -> int:
    """How often a step of `once` seconds is called for one reading."""
    return min(_MOST_CALLS[device.type], max(1, math.ceil(_SHORTEST_READING[device.type] / max(once, 1e-9))))


class Rounds(NamedTuple):
    """How many rounds of a case are timed: at least and at most so many, and as many as fit into so many seconds."""

    least: int
    most: int
    budget: float

    def fitting(self, round_seconds: float) -> int:
        """Rounds that fit, where one takes so long."""
        return min(self.most, max(self.least, int(self.budget / max(round_seconds, 1e-9))))


def round_robin(names: Sequence[Name], rounds: int) -> Iterator[list[Name]]:
    """The order of each round: every name once, each round begins one further on.

    A drift of the machine's speed then cancels in the ratios of a round, and no implementation is always the first.
    """
    for number in range(rounds):
        first = number % len(names)
        yield [*names[first:], *names[:first]]
