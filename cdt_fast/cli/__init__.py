"""The command line, `cdt-fast`."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from cdt_fast.errors import InputError, MissingExtra, printable

BAD_INPUT = 2


class _Terminated(BaseException):
    """SIGTERM: like KeyboardInterrupt, so that what is half done is cleaned up on the way out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Bad input is one line on stderr and status 2."""
    options = argparse.Namespace(hint="", memory_hint="")
    try:
        # Here, where a signal is one line too: the settings of all tasks take a moment.
        from cdt_fast.cli.parser import build_parser

        options = build_parser().parse_args(arguments)
        with _terminated_by_exception(), _warnings_in_a_line():
            return options.run(options)
    except (InputError, MissingExtra) as error:
        message = str(error)
    except BrokenPipeError:
        # Whoever read the output has seen enough, as `head` does; nothing more can be written there, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        message = where + ("the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error))
    except (MemoryError, RuntimeError) as error:
        from cdt_fast.training.memory import is_out_of_memory

        if is_out_of_memory(error):
            message = f"out of memory{options.memory_hint}"
        elif (said := _of_another_rank(error)) is not None:
            message = said
        else:
            raise
    except (KeyboardInterrupt, _Terminated) as stop:
        number = signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT
        print(f"cdt-fast: stopped by {number.name}{options.hint}", file=sys.stderr)
        return 128 + number
    print("cdt-fast: " + printable(" ".join(message.split())), file=sys.stderr)
    return BAD_INPUT


# How gloo and NCCL put that a rank has gone, or does not answer, in whatever computation waits for it.
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "remote process exited")
_SILENT = ("Timed out waiting", "Timed out after", "timed out")


def _of_another_rank(error: BaseException) -> str | None:
    """What to say where an error is another process's doing; None where it is not."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    if any(words in str(error) for words in _GONE):
        return "another process of this training has ended, or cannot be reached; what it said is the reason"
    if any(words in str(error) for words in _SILENT):
        return (
            "another process of this training has not answered for the time of --rank-timeout: it hangs, or is behind "
            "by more than that. End it, and resume the run"
        )
    return None


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    def line(message: Warning | str, *place: object) -> str:
        return f"cdt-fast: warning: {printable(' '.join(str(message).split()))}\n"

    previous, warnings.formatwarning = warnings.formatwarning, line
    try:
        yield
    finally:
        warnings.formatwarning = previous


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
