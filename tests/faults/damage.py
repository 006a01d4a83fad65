"""Files of a run that were damaged: noticed, or of no consequence."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from cdt_fast.files import read_json
from cdt_fast.training.loop import Trainer
from tests.faults.jobs import Problem, refused, start, succeed
from tests.faults.workshop import Workshop, check_same_runs


def damage(path: Path, chance: random.Random) -> str:
    """Change a file in one of the ways that disks and people do; says how."""
    data = bytearray(path.read_bytes())
    place, kind = chance.randrange(len(data)), chance.choice(["bit", "byte", "zeros", "cut", "longer", "empty"])
    if kind == "bit":
        data[place] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        data[place] = (data[place] + chance.randint(1, 255)) % 256
    elif kind == "zeros":
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    elif kind == "cut":
        del data[place:]
    elif kind == "longer":
        data += chance.randbytes(100)
    else:
        data.clear()
    path.write_bytes(data)
    return f"{path.name}, {kind} at {place}"


def _half_trained(shop: Workshop, done: Path) -> None:
    """A run that ended by itself in step 15 of 24: its checkpoints are of steps 8 and 12."""
    train = Trainer._train_step

    def dying(trainer: Trainer) -> None:
        if trainer.step == 14:
            os._exit(0)
        train(trainer)

    def before() -> None:
        Trainer._train_step = dying  # pyright: ignore[reportAttributeAccessIssue]

    succeed([*shop.training["text"], "--out", str(done / "run")], done / "log", before)


def damaged_checkpoint(shop: Workshop, chance: random.Random) -> int:
    """One file of a half-trained run is damaged: the rest of the training is refused, or ends as it would have."""
    expected = shop.whole_run("text")
    half = shop.whole("half", lambda done: _half_trained(shop, done)) / "run"
    place = shop.place()
    run = shutil.copytree(half, place / "run")
    files = sorted(path for path in (run / "checkpoint").iterdir() if path.is_file())
    chosen = chance.choice([*files, *files, run / "metrics.jsonl", run / "config.toml"])
    how = damage(chosen, chance)
    job = start(["train", "text", "--resume", str(run)], place / "log")
    try:
        if job.wait():
            refused(job)
        else:
            if chosen.name == "metrics.jsonl":  # a log: nothing is computed from it, and what is cut off is not missed
                shutil.copy(expected / chosen.name, chosen)
            check_same_runs(run, expected)
    except Problem as problem:
        raise Problem(f"{how}: {problem}") from problem
    return 1


def damaged_model(shop: Workshop, chance: random.Random) -> int:
    """One file of a trained model is damaged: an evaluation is refused, or is what it was."""
    task = chance.choice(["text", "video", "lm"])
    expected, place = shop.whole_run(task), shop.place()
    run = shop.copy_of_run(task, place)
    (run / "evaluation.json").unlink()
    how = damage(chance.choice(sorted(path for path in (run / "model").iterdir() if path.is_file())), chance)
    job = start(["evaluate", str(run)], place / "log")
    try:
        if job.wait():
            refused(job)
        elif read_json(run / "evaluation.json") != read_json(expected / "evaluation.json"):
            raise Problem("another evaluation")
    except Problem as problem:
        raise Problem(f"{how}: {problem}") from problem
    return 1


def damaged_evaluation(shop: Workshop, chance: random.Random) -> int:
    """What `compare` reads is damaged: it is refused in a line, or readable still."""
    place = shop.place()
    run = shop.copy_of_run("video", place)
    how = damage(run / chance.choice(["evaluation.json", "metrics.jsonl", "config.toml"]), chance)
    job = start(["compare", str(run), str(shop.whole_run("video")), "--out", str(place / "out")], place / "log")
    try:
        if job.wait():
            refused(job)
    except Problem as problem:
        raise Problem(f"{how}: {problem}") from problem
    return 1
