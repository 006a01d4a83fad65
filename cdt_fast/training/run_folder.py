"""A run folder: what one training leaves behind, and what the other commands read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.files import remove_leftovers, try_lock, write_text
from cdt_fast.training.config import RunConfig, load_config


class RunFolder:
    """The paths of a run: `config.toml`, `metrics.jsonl`, `model/`, `checkpoint/`, `evaluation.json`, `report.md`.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.model = self.path / "model"
        self.checkpoint = self.path / "checkpoint" / "state.safetensors"
        self.evaluation = self.path / "evaluation.json"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: RunConfig) -> RunFolder:
        """Make a new run folder with its `config.toml`.

        Raises:
            InputError: the folder exists and is not empty, or cannot be made.
        """
        run = cls(path)
        if run.config.exists():
            raise InputError(f"{path}: holds a run already; continue it with --resume, or choose another folder")
        if run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
            raise InputError(f"{path}: exists and is no empty folder; choose another one for the run")
        existed = run.path.exists()
        try:
            config.save(run.config)
        except OSError as error:
            if not existed:
                shutil.rmtree(run.path, ignore_errors=True)
            raise InputError(f"{path}: cannot be made ({error.strerror})") from error
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, trained: bool = True) -> tuple[RunFolder, RunConfig]:
        """Open an existing run and read its settings.

        Args:
            path: the folder.
            trained: also require that it holds a model.

        Raises:
            InputError: the folder is no run, or has no model yet.
        """
        run = cls(path)
        if not run.config.is_file():
            raise InputError(f"{path}: is no run folder (it has no config.toml)")
        config = load_config(run.config)
        if trained and not (run.model / "config.json").is_file():
            raise InputError(f"{path}: has no model yet; continue its training with --resume")
        return run, config

    @contextmanager
    def lock(self, main: bool = True) -> Iterator[None]:
        """Keep other processes from training this run until the block, or this process, ends, however it ends.

        The lock is the system's, on `config.toml`, and writes nothing. A file system without locks does without it.

        Args:
            main: False in those processes of a distributed training that leave the lock to the first.

        Raises:
            InputError: another process is training this run.
        """
        if not main:
            yield
            return
        with self.config.open("r+b") as file:
            if not try_lock(file):
                raise InputError(f"{self.path}: another process is training this run; wait for it, or stop it first")
            yield

    def remove_if_untouched(self) -> None:
        """Remove a folder that `create` made if no step was trained in it: nothing in it is worth keeping."""
        logged = self.metrics.exists() and self.metrics.stat().st_size > 0
        if not (logged or self.checkpoint.exists() or self.model.exists()):
            shutil.rmtree(self.path, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove the temporary files that a killed training left."""
        for folder in (self.path, self.model, self.checkpoint.parent):
            remove_leftovers(folder)
        for folder in self.path.glob(".model-*.tmp"):
            shutil.rmtree(folder, ignore_errors=True)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`. A last line that a killed run did not finish is left out."""
        lines = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        entries = []
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                entry["step"]  # what every line has
            except (ValueError, KeyError, TypeError) as error:
                # A power cut can leave zeros where the last line was being written.
                if number < len(lines):
                    raise InputError(f"{self.metrics}: line {number} is no entry of a run ({error})") from error
            else:
                entries.append(entry)
        return entries

    def truncate_metrics(self, step: int) -> None:
        """Drop what was logged after `step`, the checkpoint that a resumed run starts from."""
        kept = [entry for entry in self.read_metrics() if entry["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept))
