"""Commands in processes of their own, forked from this one, in which torch is imported already."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cdt_fast import cli

LIMIT = 300.0  # seconds, after which a command hangs


class Problem(Exception):
    """What a trial has found."""


@dataclass
class Job:
    """A command that runs."""

    pid: int
    log: Path
    status: int | None = None

    def ended(self) -> bool:
        if self.status is None:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(code)
        return self.status is not None

    def wait(self, seconds: float = LIMIT) -> int:
        """Its exit status, minus the signal that ended it.

        Raises:
            Problem: it has not ended by then.
        """
        if not self.ended_within(seconds):
            self.kill()
            raise Problem(f"hangs: {self.said()[-300:]}")
        assert self.status is not None
        return self.status

    def ended_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        _, code = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(code)

    def killed_after(self, seconds: float) -> bool:
        """Whether it was still there to be killed."""
        if self.ended_within(seconds):
            return False
        self.kill()
        return True

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def start(words: list[str], log: Path, before: Callable[[], object] | None = None) -> Job:
    """Start a command; `before` is called in its process first."""
    pid = os.fork()
    if pid:
        return Job(pid, log)
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False, buffering=1) for number in (1, 2))
        if before is not None:
            before()
        status = cli.main(words)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def succeed(words: list[str], log: Path, before: Callable[[], object] | None = None) -> str:
    """Run a command to its end; what it said.

    Raises:
        Problem: it fails or hangs.
    """
    job = start(words, log, before)
    status = job.wait()
    if status:
        raise Problem(f"{' '.join(words[:2])} ends with {status}: {job.said()[-400:]}")
    return job.said()


def refused(job: Job, seconds: float = LIMIT) -> str:
    """The one line of a command that must fail.

    Raises:
        Problem: it does not, or says more than a line, or hangs.
    """
    status = job.wait(seconds)
    said = job.said()
    lines = [line for line in said.splitlines() if line.startswith("cdt-fast: ")]
    if status != cli.BAD_INPUT or "Traceback" in said or not lines:
        raise Problem(f"ends with {status}: {said[-400:]}")
    return lines[-1]
