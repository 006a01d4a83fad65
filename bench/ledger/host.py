"""The host's time for a step whose kernels are launched one by one: a step at toy size, its launches stubbed out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from cdt_fast.bench.suites.trained import VideoWork
from cdt_fast.bench.suites.training_step import TrainingStep, fused
from cdt_fast.kernels import cards
from cdt_fast.kernels.launch import Launch

# Products of these sizes take no time beside the calls that lead to them.
TOY = VideoWork("DUST", sequences=2, window=4, patch=16, code=16)
STEPS, ROUNDS = 20, 15


@contextlib.contextmanager
def launches_stubbed_out() -> Iterator[None]:
    """Every op takes its kernels, which do nothing: what they would have written is whatever the memory held."""

    def nothing(*given: Any) -> None:
        return None

    there = {
        "unsupported_reason": nothing,
        "spec_of": lambda device: cards.CARDS["H200"],
        "interpreting": lambda: False,
    }
    with mock.patch.object(Launch, "run", nothing), mock.patch.multiple(cards, **there):
        yield


def host_milliseconds() -> float:
    """Of a constrained step of DUST under bfloat16 autocast, the fastest of several rounds: Python, torch's dispatcher
    and autograd on one thread; torch's own small operations run on the CPU, in the place of their launches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with launches_stubbed_out():
            step = TrainingStep(TOY, fused, torch.device("cpu"), autocast=True)
            return 1e3 * min(_seconds(step) for _ in range(ROUNDS))
    finally:
        torch.set_num_threads(threads)


def _seconds(step: TrainingStep) -> float:
    begin = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - begin) / STEPS
