"""What tests of trainings share: one that is killed at a step, and one on two ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cdt_fast.training.loop import Trainer
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from tests.runs import train


class Killed(BaseException):
    """Nobody handles it: what is on the disk is what a `kill -9` at this moment leaves."""


def train_until_killed(run: RunFolder, config: RunSettings, step: int) -> None:
    """Train, and end after `step` steps as a killed process does."""
    original = Trainer._train_step

    def dying(trainer: Trainer) -> None:
        if trainer.step == step:
            raise Killed
        original(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", dying)
        with pytest.raises(Killed):
            train(run, config, progress=False)


@contextmanager
def signal_after(number: signal.Signals, *steps: int) -> Iterator[None]:
    """Raise a signal in the trainings of the block, at the end of each of these steps once."""
    original, pending = Trainer._train_step, list(steps)

    def signalled(trainer: Trainer) -> None:
        original(trainer)
        if pending and trainer.step + 1 == pending[0]:
            pending.pop(0)
            signal.raise_signal(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", signalled)
        yield


def run_on_two_ranks(program: str, run: RunFolder) -> None:
    """Run a program, given the folder of a run, in two processes that find each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, "-c", program, str(run.path)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
