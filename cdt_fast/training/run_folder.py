"""A run folder: what one training leaves behind, and what the other commands read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.files import read_toml, remove_leftovers, try_lock, write_text
from cdt_fast.training.settings import RunSettings


class RunInUse(InputError):
    """Another process makes or trains the run."""


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
        self.frames = self.path / "frames.safetensors"
        self.created = False  # by `create`, in a place where there was none

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @classmethod
    def create(cls, path: str | os.PathLike[str], settings: RunSettings) -> RunFolder:
        """Make a new run folder with its `config.toml`.

        Of two that are made in one place at once one is refused, whose files are not touched.

        Raises:
            InputError: the folder exists and is not empty, or cannot be made.
        """
        run = cls(path)
        if run.config.exists():
            raise RunInUse(f"{path}: holds a run already; resume it with --resume, or choose another folder")
        run.created = not run.path.exists()
        temporary = run.path / f".config-{os.getpid()}.tmp.toml"
        try:
            # Temporary files are those of a process that was killed here, or that is making a run right now.
            if not run.created and not _is_empty(run.path):
                raise InputError(f"{path}: exists and is no empty folder; choose another one for the run")
            settings.save(temporary)
            os.link(temporary, run.config)  # fails where there is one already, which a move would replace
        except (FileExistsError, FileNotFoundError):
            raise RunInUse(f"{path}: another process is making a run there; choose another folder") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be made ({error.strerror})") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if run.created and not run.config.exists():
                _remove_if_empty(run.path)
        return run

    def task_name(self) -> str:
        """The task that `config.toml` names.

        Raises:
            InputError: the folder is no run, or its settings cannot be read.
        """
        if not self.config.is_file():
            raise InputError(f"{self.path}: is no run folder (it has no config.toml)")
        return str(read_toml(self.config).get("task", "video"))

    def check_trained(self) -> None:
        """Require that there is a model.

        Raises:
            InputError: there is none yet.
        """
        if not (self.model / "config.json").is_file():
            raise InputError(f"{self.path}: has no model yet; resume its training with --resume")

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
                raise RunInUse(f"{self.path}: another process is training this run; wait for it, or stop it first")
            yield

    def remove_if_untouched(self) -> None:
        """Take back what `create` made if no step was trained: the settings, and the folder if it is empty then."""
        logged = self.metrics.exists() and self.metrics.stat().st_size > 0
        if logged or self.checkpoint.exists() or self.model.exists():
            return
        self.metrics.unlink(missing_ok=True)
        self.config.unlink(missing_ok=True)
        if self.created:
            _remove_if_empty(self.checkpoint.parent)
            _remove_if_empty(self.path)

    def remove_leftovers(self) -> None:
        """Remove the temporary files that a killed training left."""
        for folder in (self.path, self.model, self.checkpoint.parent):
            remove_leftovers(folder)
        for folder in self.path.glob(".model-*.tmp"):
            shutil.rmtree(folder, ignore_errors=True)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`. A last line that a killed run did not finish is left out.

        Raises:
            InputError: a line before the last is no entry of a run.
        """
        lines = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        entries = []
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict) or type(entry.get("step")) is not int or entry["step"] < 0:
                    raise ValueError("it has no step")
            except (ValueError, RecursionError) as error:
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


def _is_empty(path: Path) -> bool:
    """Whether there is a folder that holds nothing but settings that are being written."""
    return path.is_dir() and all(entry.name.startswith(".config-") for entry in path.iterdir())


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
