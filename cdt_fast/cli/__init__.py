"""The command line, `cdt-fast`."""

import argparse
import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

from cdt_fast.checks import InputError, MissingExtra, printable
from cdt_fast.training.interruption import Interrupted, on_signals

BAD_INPUT = 2

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "ALLOC_FAILED")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Bad input is one line on stderr and status 2."""
    options = argparse.Namespace(hint="")
    if sys.stderr is None:  # closed by the caller
        sys.stderr = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: a γ must not end in an error
    # Read when torch is imported. Beside another busy process threads that wait for each other without a pause are ten
    # times as slow; and torch's own logs are not for this terminal.
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        # Here, where a signal is one line too: the settings of all tasks take a moment.
        from cdt_fast.cli.parser import build_parser

        options = build_parser().parse_args(arguments)
        with on_signals(_terminate, signal.SIGTERM, signal.SIGHUP), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
            return options.run(options) or 0
    except (InputError, MissingExtra) as error:
        _say(str(error))
    except BrokenPipeError:
        # Whoever read the output has seen enough, as `head` does; nothing more can be written there, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(where + ("the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        smaller = "; a smaller --batch needs less, with a larger --accumulate for the same steps"
        _say("out of memory" + smaller * hasattr(options, "task"))
    except Interrupted as stop:
        _say(f"{stop}; continue with: {options.again}")
        return 128 + stop.signal_number
    except KeyboardInterrupt as stop:
        number = signal.Signals(stop.args[0]) if stop.args else signal.SIGINT
        _say(f"stopped by {number.name}{options.hint}")
        return 128 + number
    return BAD_INPUT


def _say(message: str) -> None:
    with suppress(OSError):  # of a terminal that was closed
        print("cdt-fast: " + printable(" ".join(message.split())), file=sys.stderr)


def _terminate(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)  # what is half done is cleaned up on the way out
