"""Stages as processes: started in their order, killed at their limits, each with a line that says how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from cdt_fast.bench.triage.stages import LOST, Lines, Stage, parts_begun

DONE, FAILED, KILLED = "done", "failed", "killed at its limit"
# A process that died is followed by another one only if that has time to import torch and to do something.
_WORTH_STARTING = 8.0
_LAST_LINES = {DONE: 3, FAILED: 25, KILLED: 25}


class Runner:
    """Runs stages.

    Args:
        command: starts a process of this program, to which the arguments of a stage are added.
        lines: where the ends of the stages are written.
    """

    def __init__(self, command: Sequence[str], lines: Lines) -> None:
        self._command, self._lines = list(command), lines
        self._live: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(self, plan: Sequence[Sequence[Stage]]) -> list[dict[str, Any]]:
        """Run the rows of a plan one after the other, the stages of a row side by side; the lines of their ends."""
        ends = []
        with _left_by_an_error():
            for row in plan:
                with ThreadPoolExecutor(len(row)) as threads, self._nothing_left_behind():
                    for end in threads.map(self._stage, row):
                        ends.append(end)
                        print(_in_words(end), flush=True)
        return ends

    def _stage(self, stage: Stage) -> dict[str, Any]:
        begin = time.monotonic()
        end = begin + stage.limit
        processes, skip, code, output = 0, 0, None, ""
        while not self._stopped:
            processes += 1
            words = ["--here", stage.name, "--skip", str(skip), "--deadline", str(end)]
            code, printed = self._process([*self._command, *words], end)
            output += printed
            died = code is not None and (code < 0 or code == LOST)
            further = parts_begun(printed) > skip and end - time.monotonic() > _WORTH_STARTING
            if not (died and further):
                break
            skip = parts_begun(printed)
        status = KILLED if code is None else DONE if code == 0 and processes == 1 else FAILED
        seconds = round(time.monotonic() - begin, 1)
        last = [line[:300] for line in output.splitlines() if line.strip()][-_LAST_LINES[status] :]
        how = {"status": status, "seconds": seconds, "limit_seconds": stage.limit, "exit_status": code}
        fields = {"result": "stage", **how, "processes": processes, "last_lines": last}
        self._lines.add(stage.name, "", fields)
        return {"stage": stage.name, **fields}

    def _process(self, command: Sequence[str], end: float) -> tuple[int | None, str]:
        """Its exit status (None: it was killed at its end) and what it printed."""
        with tempfile.TemporaryFile() as output:  # no pipe: one that outlives the process would keep it open
            # A session of its own, so that what the process starts is killed with it.
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            self._live.add(process)
            try:
                code: int | None = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill(process)
                self._live.discard(process)
            output.seek(0)
            return code, output.read().decode(errors="replace")

    @contextmanager
    def _nothing_left_behind(self) -> Iterator[None]:
        """End what runs before an error leaves: the threads that wait for it then end, too."""
        try:
            yield
        except BaseException:
            self._stopped = True
            for process in list(self._live):
                _kill(process)
            raise


@contextmanager
def _left_by_an_error() -> Iterator[None]:
    """Whoever ends this process raises an error in it, as the interrupt of a keyboard does."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, if they are still there."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _in_words(end: dict[str, Any]) -> str:
    more = f", {end['processes']} processes" if end["processes"] > 1 else ""
    return f"{end['stage']:<26} {end['status']:<20} {end['seconds']:6.1f} s of {end['limit_seconds']:g}{more}"
