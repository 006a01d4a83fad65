"""The kinds of trials. Each is called with the workshop and a source of random numbers, and returns how many faults it
has made; what it finds is a `Problem`."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from cdt_fast.files import read_json
from cdt_fast.training.loop import Trainer
from cdt_fast.training.run_folder import RunFolder
from tests.faults.damage import damaged_checkpoint, damaged_evaluation, damaged_model
from tests.faults.jobs import Job, Problem, refused, start, succeed
from tests.faults.ranks import rank_dies, rank_hangs
from tests.faults.workshop import Workshop, check_clean, check_same_runs, check_saved

Trial = Callable[[Workshop, random.Random], int]


def _resume_words(shop: Workshop, task: str, run: Path) -> list[str]:
    """What continues a training: where nothing is there yet, the command that began it."""
    if (run / "config.toml").exists():
        return ["train", task, "--resume", str(run)]
    return [*shop.training[task], "--out", str(run)]


def _kill_train(task: str) -> Trial:
    def trial(shop: Workshop, chance: random.Random) -> int:
        expected = shop.whole_run(task)
        place, kills = shop.place(), 0
        run, log = place / "run", place / "log"
        for _ in range(chance.randint(1, 3)):
            before = RunFolder(run).checkpoint.exists()
            job = start(_resume_words(shop, task, run), log)
            kills += job.killed_after(chance.uniform(0, shop.seconds[task]))
            if job.status not in (0, -signal.SIGKILL):
                raise Problem(f"ends with {job.status}: {job.said()[-300:]}")
            if before and not RunFolder(run).checkpoint.exists():
                raise Problem("a checkpoint is gone")
            check_saved(run)
        succeed(_resume_words(shop, task, run), log)
        check_same_runs(run, expected)
        check_clean(run, place / "cache")
        return kills

    return trial


def _kill_evaluate(shop: Workshop, chance: random.Random) -> int:
    task = chance.choice(["video", "text"])
    expected, place = shop.whole_run(task), shop.place()
    run = shop.copy_of_run(task, place)
    if chance.random() < 0.5:
        (run / "evaluation.json").unlink()
    words = ["evaluate", str(run)]
    killed = start(words, place / "log").killed_after(chance.uniform(0, shop.seconds[task] / 2))
    if (run / "evaluation.json").exists():
        read_json(run / "evaluation.json")
    succeed(words, place / "log")
    if read_json(run / "evaluation.json") != read_json(expected / "evaluation.json"):
        raise Problem("the evaluation differs")
    check_same_runs(run, expected)
    check_clean(place)
    return int(killed)


def _kill_compare(shop: Workshop, chance: random.Random) -> int:
    place = shop.place()
    words = ["compare", str(shop.whole_run("video")), str(shop.whole_run("video"))]
    words[1] = str(shop.copy_of_run("video", place))
    done = shop.whole("compare", lambda done: succeed([*words, "--out", str(done / "out")], done / "log")) / "out"
    out = place / "out"
    words += ["--out", str(out), "--json", str(place / "all.json")]
    killed = start(words, place / "log").killed_after(chance.uniform(0, shop.seconds["compare"]))
    succeed(words, place / "log")
    if {path.name for path in out.rglob("*")} != {path.name for path in done.rglob("*")}:
        raise Problem("the report lacks files, or has too many")
    read_json(place / "all.json")
    check_clean(place)
    return int(killed)


def _kill_denoise(shop: Workshop, chance: random.Random) -> int:
    suffix = chance.choice([".mp4", ".avi"])
    run = str(shop.whole_run("video"))

    def words(out: Path) -> list[str]:
        return ["denoise", run, str(shop.video), str(out)]

    name = f"denoise{suffix}"
    done = shop.whole(name, lambda done: succeed(words(done / f"out{suffix}"), done / "log")) / f"out{suffix}"
    place = shop.place()
    out = place / f"out{suffix}"
    killed = start(words(out), place / "log").killed_after(chance.uniform(0, shop.seconds[name]))
    if out.exists():
        _check_denoised(out, done)
    succeed([*words(out), "--overwrite"], place / "log")
    _check_denoised(out, done)
    check_clean(place)
    return int(killed)


def _check_denoised(out: Path, done: Path) -> None:
    if out.read_bytes() != done.read_bytes():
        raise Problem("the denoised video is not whole, or another one")


def _kill_fetch(shop: Workshop, chance: random.Random) -> int:
    def words(to: Path) -> list[str]:
        return ["data", "fetch", "set", "--to", str(to)]

    shop.whole("fetch", lambda done: succeed(words(done / "to"), done / "log"))
    place, kills = shop.place(), 0
    for _ in range(chance.randint(1, 3)):
        kills += start(words(place / "to"), place / "log").killed_after(chance.uniform(0, shop.seconds["fetch"]))
    succeed(words(place / "to"), place / "log")
    _check_fetched(shop, place / "to")
    return kills


def _check_fetched(shop: Workshop, to: Path) -> None:
    found = {str(path.relative_to(to / "set")): path for path in (to / "set").rglob("*.bin")}
    if len(found) != len(shop.files):
        raise Problem(f"{len(found)} of {len(shop.files)} files were unpacked")
    if any(path.read_bytes() != shop.files[f"Set/{path.name}"] for path in found.values()):
        raise Problem("an unpacked file differs")
    left = [path.name for path in to.iterdir() if path.name != "set"]
    if left:
        raise Problem(f"left behind: {', '.join(left)}")


def _kill_reproduce(shop: Workshop, chance: random.Random) -> int:
    def words(out: Path) -> list[str]:
        return ["reproduce", "tiny", str(shop.clip), "--out", str(out)]

    done = shop.whole("reproduce", lambda done: succeed(words(done / "out"), done / "log")) / "out"
    place, kills = shop.place(), 0
    for _ in range(chance.randint(1, 3)):
        kills += start(words(place / "out"), place / "log").killed_after(chance.uniform(0, shop.seconds["reproduce"]))
    succeed(words(place / "out"), place / "log")
    for name in ("plain-0", "constrained-0"):
        check_same_runs(place / "out" / name, done / name)
    check_clean(place / "out", place / "cache")
    return kills


def _race(shop: Workshop, chance: random.Random) -> int:
    """Two processes on one folder: a new run, a run to be resumed, a data set."""
    place, kind = shop.place(), chance.choice(["new", "resume", "fetch", "evaluate"])
    run, log = place / "run", [place / "one", place / "two"]
    if kind == "fetch":
        words = ["data", "fetch", "set", "--to", str(place / "to")]
    elif kind == "evaluate":
        words = ["evaluate", str(shop.copy_of_run("text", place))]
    else:
        words = [*shop.training["text"], "--out", str(run)]
    expected = shop.whole_run("text")
    if kind == "resume":
        start(words, log[0]).killed_after(chance.uniform(0.2, 0.8) * shop.seconds["text"])
        words = _resume_words(shop, "text", run)
    jobs: list[Job] = []
    for path in log:
        jobs.append(start(words, path))
        jobs[-1].ended_within(chance.choice([0.0, 0.0, 0.01, 0.1]))
    statuses = [job.wait() for job in jobs]
    for job, status in zip(jobs, statuses, strict=True):
        if status:
            refused(job)
    if kind in ("fetch", "evaluate") and any(statuses):
        raise Problem(f"{kind} by two ends with {statuses}: {jobs[0].said()[-200:]} {jobs[1].said()[-200:]}")
    if all(statuses):
        raise Problem(f"{kind}: both processes failed: {jobs[0].said()[-200:]} {jobs[1].said()[-200:]}")
    if kind == "fetch":
        _check_fetched(shop, place / "to")
    else:
        check_same_runs(run, expected)
        check_clean(run)
    return 1


def _small_files(size: int) -> Callable[[], object]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _full_disk(shop: Workshop, chance: random.Random) -> int:
    """No room: a limit of the files' size, or a small disk of its own where this process may mount one."""
    task = chance.choice(["video", "text"])
    expected, place = shop.whole_run(task), shop.place()
    disk = place / "disk"
    disk.mkdir()
    mounted = chance.random() < 0.5 and _mount(disk, chance.randint(4, 400))
    run = disk / "run"
    try:
        before = None if mounted else _small_files(chance.randint(100, 300_000))
        job = start([*shop.training[task], "--out", str(run)], place / "log", before)
        if job.wait():
            refused(job)
        check_saved(run)
        if mounted:
            _run("mount", "-o", "remount,size=100m", str(disk))
        if not (run / "config.toml").exists() or not (run / "evaluation.json").exists():
            succeed(_resume_words(shop, task, run), place / "log")
        check_same_runs(run, expected)
        check_clean(run)
    finally:
        if mounted:
            _run("umount", "-l", str(disk))
    return 1


def _read_only(shop: Workshop, chance: random.Random) -> int:
    """A disk that turns read-only before or during a command: a line, and what was there stays."""
    place = shop.place()
    disk = place / "disk"
    disk.mkdir()
    expected = shop.whole_run("text")
    if not _mount(disk, 100_000):
        return 0
    run = disk / "run"
    try:
        if chance.random() < 0.5:
            start([*shop.training["text"], "--out", str(run)], place / "log").killed_after(
                chance.uniform(0, shop.seconds["text"])
            )
        _run("mount", "-o", "remount,ro", str(disk))
        finished = (run / "evaluation.json").exists()
        job = start(_resume_words(shop, "text", run), place / "log")
        if job.wait() or not finished:
            refused(job)
        check_saved(run)
        _run("mount", "-o", "remount,rw", str(disk))
        succeed(_resume_words(shop, "text", run), place / "log")
        check_same_runs(run, expected)
        check_clean(run)
    finally:
        _run("umount", "-l", str(disk))
    return 1


def _mount(disk: Path, kibibytes: int) -> bool:
    return _run("mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(disk)) == 0


def _run(*words: str) -> int:
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode
    except FileNotFoundError:
        return 1


def _nan(shop: Workshop, chance: random.Random) -> int:
    """A batch of NaN, or losses that overflow, from a random step on: a line, and the run goes on from before."""
    task = chance.choice(["video", "text"])
    expected, place = shop.whole_run(task), shop.place()
    run, step, value = place / "run", chance.randint(0, 20), chance.choice([float("nan"), float("inf"), 3e38])
    original = Trainer._batch

    def poisoned(trainer: Trainer, chosen: list[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        batch = original(trainer, chosen)
        if trainer.step < step:
            return batch
        return tuple(torch.full_like(part, value) if part.is_floating_point() else part for part in batch)

    floats = task == "video"

    def before() -> None:
        if floats:
            Trainer._batch = poisoned  # pyright: ignore[reportAttributeAccessIssue]
            return
        take = Trainer._train_step

        def broken(trainer: Trainer) -> None:
            if trainer.step == step:
                with torch.no_grad():
                    next(trainer.model.parameters()).view(-1)[0] = value
            take(trainer)

        Trainer._train_step = broken  # pyright: ignore[reportAttributeAccessIssue]

    job = start([*shop.training[task], "--out", str(run)], place / "log", before)
    if job.wait() == 0:
        # What stays finite is no fault that the loop could see: a large weight is as good as any.
        if value == 3e38:
            return 0
        raise Problem(f"{task}: {value} from step {step} on is not noticed")
    refused(job)
    check_saved(run)
    succeed(_resume_words(shop, task, run), place / "log")
    check_same_runs(run, expected)
    check_clean(run)
    return 1


KINDS: dict[str, Trial] = {
    "train-video": _kill_train("video"),
    "train-text": _kill_train("text"),
    "evaluate": _kill_evaluate,
    "compare": _kill_compare,
    "denoise": _kill_denoise,
    "fetch": _kill_fetch,
    "reproduce": _kill_reproduce,
    "race": _race,
    "full-disk": _full_disk,
    "read-only": _read_only,
    "nan": _nan,
    "rank-dies": rank_dies,
    "rank-hangs": rank_hangs,
    "damaged-checkpoint": damaged_checkpoint,
    "damaged-model": damaged_model,
    "damaged-evaluation": damaged_evaluation,
}
