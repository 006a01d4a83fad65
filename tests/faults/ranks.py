"""Of two processes that train together one dies or hangs: the other says so."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from cdt_fast.training.loop import Trainer
from tests.faults.jobs import Job, Problem, refused, start
from tests.faults.workshop import Workshop, check_saved

_RANK_TIMEOUT = 15  # seconds


def _two_ranks(shop: Workshop, place: Path, *before: Callable[[], object] | None) -> list[Job]:
    """A training of two processes that goes on until something happens; `before` is called in each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def preparation(rank: int) -> Callable[[], object]:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}

        def prepare() -> None:
            os.environ.update(common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            if (more := before[rank]) is not None:
                more()

        return prepare

    words = [*shop.training["text"], "--steps=100000", f"--rank-timeout={_RANK_TIMEOUT}", "--out", str(place / "run")]
    return [start(words, place / f"rank-{number}", preparation(number)) for number in range(2)]


def _check_left_alone(place: Path, ranks: list[Job], left: int) -> None:
    """Require that the rank that is left ends with a line that says why, and that what it saved is whole."""
    said = refused(ranks[left], _RANK_TIMEOUT + 45)
    if "another process of this training" not in said:
        raise Problem(f"the line does not say why: {said}")
    check_saved(place / "run")


def rank_dies(shop: Workshop, chance: random.Random) -> int:
    """Of two ranks one is killed: the other ends within a minute, with a line."""
    place, dying = shop.place(), chance.randrange(2)
    ranks = _two_ranks(shop, place, None, None)
    try:
        if not ranks[dying].killed_after(chance.uniform(2, 12)):
            raise Problem(f"a rank ends by itself: {ranks[dying].said()[-300:]}")
        _check_left_alone(place, ranks, 1 - dying)
    finally:
        _end(ranks)
    return 1


def rank_hangs(shop: Workshop, chance: random.Random) -> int:
    """Of two ranks one is stopped, or falls into an endless loop: the other ends within a minute, with a line."""
    place, hanging, step = shop.place(), chance.randrange(2), chance.randint(0, 30)
    take = Trainer._train_step

    def endless(trainer: Trainer) -> None:
        while trainer.step == step:
            pass
        take(trainer)

    def loop_forever() -> None:
        Trainer._train_step = endless  # pyright: ignore[reportAttributeAccessIssue]

    loops = chance.random() < 0.5
    before = [loop_forever if loops and rank == hanging else None for rank in range(2)]
    ranks = _two_ranks(shop, place, *before)
    try:
        if not loops:
            if ranks[hanging].ended_within(chance.uniform(0, 12)):
                raise Problem(f"a rank ends by itself: {ranks[hanging].said()[-300:]}")
            os.kill(ranks[hanging].pid, signal.SIGSTOP)
        _check_left_alone(place, ranks, 1 - hanging)
    finally:
        _end(ranks)
    return 1


def _end(ranks: list[Job]) -> None:
    for rank in ranks:
        if not rank.ended():
            rank.kill()
