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


def create_run(out: str | None, settings: RunSettings) -> RunFolder:
    """`RunFolder.create` by the first process, in `runs` where `out` is None; the others wait until it is there.

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

    waiting = timedelta(seconds=settings.training.rank_timeout)
    state = PartialState(cpu=settings.training.device == "cpu", timeout=waiting)
    made = torch.ones(1, device=state.device, dtype=torch.int32)
    try:
        if state.is_main_process:
            RunFolder.create(path, settings)
    except InputError:
        made.zero_()
        raise
    finally:  # without this word the others would wait for a process that has ended
        torch.distributed.broadcast(made, src=0)
    if not made:
        raise SystemExit(2)
    return RunFolder(path)
