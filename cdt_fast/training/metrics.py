"""Metrics of a running training: a line of JSON an entry, and TensorBoard's files if asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cdt_fast.errors import require
from cdt_fast.training.run_folder import RunFolder


@contextmanager
def metrics_writer(
    run: RunFolder, step: int, *, tensorboard: bool, enabled: bool
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that appends one entry to `metrics.jsonl`, and to TensorBoard's files if asked.

    Args:
        run: the run folder.
        step: where the run starts or resumes; TensorBoard is told to forget what an interrupted run wrote after it.
        tensorboard: write TensorBoard's files too.
        enabled: False on all ranks but the first, whose function then does nothing.

    Raises:
        MissingExtra: tensorboard is not installed.
        OSError: an entry cannot be written; it names the file.
    """
    if not enabled:
        yield lambda entry: None
        return
    board = None
    if tensorboard:
        require("tensorboard", "tensorboard", "--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)
    # Without a buffer: what could not be written on a full disk is not tried again when the file is closed.
    with run.metrics.open("ab", buffering=0) as file:

        def write(entry: dict[str, Any]) -> None:
            line = (json.dumps(entry, allow_nan=False) + "\n").encode()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(run.metrics)) from error
            if board is not None:
                _write_scalars(board, entry)

        try:
            yield write
        finally:
            if board is not None:
                board.close()


def _write_scalars(board: Any, entry: dict[str, Any]) -> None:
    step = entry["step"]
    for group, values in {**entry, **entry.get("validation", {})}.items():
        prefix = f"validation/{group}" if "validation" in entry else group
        if isinstance(values, list):
            for depth, value in enumerate(values):
                board.add_scalar(f"{prefix}/{depth}", value, step)
        elif isinstance(values, int | float) and group != "step":
            board.add_scalar(prefix, values, step)
