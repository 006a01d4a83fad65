"""The harness itself: a trial of each kind finds nothing, and a planted fault is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.faults.workshop import check_clean


@pytest.mark.slow
def test_a_trial_of_each_kind() -> None:
    command = [sys.executable, "-m", "tests.faults", "--trials", "1", "--minutes", "8"]
    answer = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_what_a_trial_finds(tmp_path: Path) -> None:
    def crash() -> None:
        raise RuntimeError("planted")

    log = tmp_path / "log"
    assert "cdt-fast" in jobs.succeed(["--version"], log)
    with pytest.raises(jobs.Problem, match=r"ends with 1[\s\S]*planted"):
        jobs.refused(jobs.start(["--version"], log, crash))
    with pytest.raises(jobs.Problem, match="ends with 0"):
        jobs.refused(jobs.start(["--version"], log))
    job = jobs.start(["--version"], log, lambda: __import__("time").sleep(60))
    with pytest.raises(jobs.Problem, match="hangs"):
        job.wait(0.1)
    (tmp_path / ".left.tmp").touch()
    with pytest.raises(jobs.Problem, match=r"\.left\.tmp"):
        check_clean(tmp_path)
