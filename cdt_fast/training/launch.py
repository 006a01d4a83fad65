"""A training that torchrun or accelerate launched as several processes: the first of them writes, all train."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from cdt_fast.errors import InputError
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings


def is_first_process() -> bool:
    """Whether this process is the one that writes; of a single one always."""
    return int(os.environ.get("RANK", "0")) == 0


def check_single_process(instead: str) -> None:
    """Require that this is the only process.

    Args:
        instead: what the message says beside the number of processes.

    Raises:
        InputError: there are several.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise InputError(f"launched as {processes} processes, but {instead}")


def rank_timeout(settings: RunSettings) -> timedelta:
    """How long a process waits for another before it takes it for hanging.

    That is a bound on by how much one may be behind: by what the first one saves, or by its first kernels' compilation.
    """
    return timedelta(seconds=settings.training.rank_timeout)


def create_run(out: str | None, settings: RunSettings) -> RunFolder:
    """`RunFolder.create` by the first process; the others go on once it is there.

    Args:
        out: the folder; None: one in `runs`, named after the source.
        settings: those of the run.

    Raises:
        InputError: the folder cannot be made; raised in the first process.
        SystemExit: the same in the others, which have nothing to add.
    """
    kind = "constrained" if settings.constrained else "unconstrained"
    path = out or Path("runs") / f"{Path(settings.data.source).stem}-{kind}"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return RunFolder.create(path, settings)
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=settings.training.device == "cpu", timeout=rank_timeout(settings))
    run, refused = RunFolder(path), None
    if state.is_main_process:
        try:
            run = RunFolder.create(path, settings)
        except InputError as error:
            refused = error
    # Without this word the others would wait for a process that has ended.
    failed = torch.tensor([refused is not None], device=state.device, dtype=torch.int32)
    torch.distributed.broadcast(failed, src=0)
    if refused is not None:
        raise refused
    if failed.any():
        raise SystemExit(2)
    return run
