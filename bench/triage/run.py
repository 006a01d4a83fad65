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
from dataclasses import dataclass

from cdt_fast.bench.triage.lines import Lines
from cdt_fast.bench.triage.stages import LOST, Stage, parts_begun

DONE, FAILED, KILLED = "done", "failed", "killed at its limit"
# A process that died is followed by another one only if that has time to import torch and to do something.
_WORTH_STARTING = 8.0
_LAST_LINES = {DONE: 3, FAILED: 25, KILLED: 25}


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: its status, the seconds that it took, and the processes."""

    stage: Stage
    status: str
    seconds: float
    processes: int


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

    def run(self, plan: Sequence[Sequence[Stage]]) -> list[Outcome]:
        """Run the rows of a plan one after the other, the stages of a row side by side."""
        outcomes = []
        with _left_by_an_error():
            for row in plan:
                with ThreadPoolExecutor(len(row)) as threads, self._nothing_left_behind():
                    for outcome in threads.map(self._stage, row):
                        outcomes.append(outcome)
                        print(_in_words(outcome), flush=True)
        return outcomes

    def _stage(self, stage: Stage) -> Outcome:
        begin = time.monotonic()
        processes, skip, code, output = 0, 0, None, ""
        while not self._stopped:
            processes += 1
            left = stage.limit - (time.monotonic() - begin)
            words = ["--here", stage.name, "--skip", str(skip), "--seconds", f"{left:.1f}"]
            code, printed = self._process([*self._command, *words], left)
            output += printed
            died = code is not None and (code < 0 or code == LOST)
            further = parts_begun(printed) > skip and stage.limit - (time.monotonic() - begin) > _WORTH_STARTING
            if not (died and further):
                break
            skip = parts_begun(printed)
        seconds = time.monotonic() - begin
        status = KILLED if code is None else DONE if code == 0 and processes == 1 else FAILED
        last = [line[:300] for line in output.splitlines() if line.strip()][-_LAST_LINES[status] :]
        how = {"status": status, "seconds": round(seconds, 1), "limit_seconds": stage.limit, "exit_status": code}
        self._lines.add(stage.name, "", {"result": "stage", **how, "processes": processes, "last_lines": last})
        return Outcome(stage, status, seconds, processes)

    def _process(self, command: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Its exit status (None: it was killed at the limit) and what it printed."""
        with tempfile.TemporaryFile() as output:  # no pipe: one that outlives the process would keep it open
            # A session of its own, so that what the process starts is killed with it.
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            self._live.add(process)
            try:
                code: int | None = process.wait(max(0.0, limit))
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


def _in_words(outcome: Outcome) -> str:
    more = f", {outcome.processes} processes" if outcome.processes > 1 else ""
    return f"{outcome.stage.name:<26} {outcome.status:<20} {outcome.seconds:6.1f} s of {outcome.stage.limit:g}{more}"
