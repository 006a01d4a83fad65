"""Signals in a training and in the command line."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):
    """A signal asked the training to stop; its state is in the checkpoint."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}")
        self.signal_number = signal_number


@contextmanager
def on_signals(handler: Callable[[int, Any], object], *numbers: int) -> Iterator[None]:
    """Call `handler` at these signals while the block runs, but for SIGHUP under nohup; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    previous = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP
    }
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
