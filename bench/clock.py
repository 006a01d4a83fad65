"""Seconds of a step, and rounds in which all ways take turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

Name = TypeVar("Name")

# Steps shorter than this are called several times a reading: what a reading costs itself must not count.
_SHORTEST_READING = 0.005
_MOST_CALLS = 100


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


def calls_a_reading(once: float) -> int:
    """How often a step of `once` seconds is called for one reading."""
    return min(_MOST_CALLS, max(1, math.ceil(_SHORTEST_READING / max(once, 1e-9))))


def turns(names: Sequence[Name], rounds: int) -> Iterator[list[Name]]:
    """The order of each round: every name once, each round begins one further on.

    A drift of the machine's speed then cancels in the ratios of a round, and no way is always the first.
    """
    for number in range(rounds):
        first = number % len(names) if names else 0
        yield [*names[first:], *names[:first]]
