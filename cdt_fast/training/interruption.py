"""SIGINT and SIGTERM during a training: the step in progress is finished and saved first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


class Interrupted(Exception):
    """A signal asked the training to stop; its state is in the checkpoint."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}")
        self.signal_number = signal_number


@dataclass
class NotedSignal:
    """The number of the signal that came, None before."""

    number: int | None = None


@contextmanager
def signals_noted() -> Iterator[NotedSignal]:
    """Note SIGINT and SIGTERM in place of acting on them. A second one acts at once."""
    noted = NotedSignal()
    if threading.current_thread() is not threading.main_thread():
        yield noted  # signals are the main thread's
        return

    def note(number: int, frame: FrameType | None) -> None:
        if noted.number is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        noted.number = number

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
