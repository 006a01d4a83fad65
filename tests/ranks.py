"""Processes that train together: what a function returns in each of them, over gloo on CPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANKS = 2


def in_ranks(work: Callable[[int, str], Any], folder: Path) -> list[Any]:
    """What `work(rank, folder)` returns in each of `RANKS` processes; `work` is a function of a module."""
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    torch.multiprocessing.spawn(_join, (work, str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def _join(rank: int, work: Callable[[int, str], Any], folder: str) -> None:
    torch.set_num_threads(1)
    # What torchrun sets; with the group made from a file there is no port that another process could hold.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    torch.save(work(rank, folder), f"{folder}/{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
    # A thread of gloo that lets go of a tensor while the interpreter ends aborts the process (pytorch pull 179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
