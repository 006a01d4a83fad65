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
from cdt_fast.files import remove_leftovers, try_lock, write_text
from cdt_fast.training.settings import RunSettings


class RunInUse(InputError):
    """Another process makes or trains the run."""


class RunFolder:
    """The paths of a run: `config.toml`, `metrics.jsonl`, `model/`, `checkpoint/`, `evaluation.json`, `report.md`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.model = self.path / "model"
        self.checkpoint = self.path / "checkpoint" / "state.safetensors"
        self.evaluation = self.path / "evaluation.json"
        self.frames = self.path / "frames.safetensors"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @classmethod
    def create(cls, path: str | os.PathLike[str], settings: RunSettings) -> RunFolder:
        """Make a new run folder with its `config.toml`; of two processes that make one in one place one is refused.

        Raises:
            InputError: the folder exists and is not empty, or cannot be made.
        """
        run = cls(path)
        temporary = run.path / f".config-{os.getpid()}.tmp.toml"
        try:
            if run.config.exists():
                raise RunInUse(f"{path}: holds a run already; resume it with --resume, or choose another folder")
            # Hidden files are those of a process that was killed here, or that is making a run right now.
            if run.path.exists() and not all(name.startswith(".") for name in os.listdir(run.path)):
                raise InputError(f"{path}: exists and is no empty folder; choose another one for the run")
            settings.save(temporary)
            os.link(temporary, run.config)  # fails where there is one already, which a move would replace
        except (FileExistsError, FileNotFoundError):
            raise RunInUse(f"{path}: another process is making a run there; choose another folder") from None
        except OSError as error:
            with contextlib.suppress(OSError):
                run.path.rmdir()
            raise InputError(f"{path}: cannot be made ({error.strerror})") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return run

    @contextmanager
    def lock(self, main: bool = True) -> Iterator[None]:
        """Keep other processes from training this run until the block, or this process, ends, however it ends.

        The lock is the system's, on `config.toml`, and writes nothing; not `main`: it is left to the first process.

        Raises:
            RunInUse: another process is training this run.
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
        if logged and not self.checkpoint.exists() and [entry["step"] for entry in self.read_metrics()] == [0]:
            logged = False
            shutil.rmtree(self.model, ignore_errors=True)  # the untrained one
        if not (logged or self.checkpoint.exists() or self.model.exists()):
            self.metrics.unlink(missing_ok=True)
            self.config.unlink(missing_ok=True)
            for folder in (self.checkpoint.parent, self.path):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def remove_leftovers(self) -> None:
        """Remove the temporary files that a killed training left."""
        for folder in (self.path, self.model, self.checkpoint.parent):
            remove_leftovers(folder)
        for folder in self.path.glob(".model-*.tmp"):
            shutil.rmtree(folder, ignore_errors=True)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, but for a last one that a killed run did not finish.

        Raises:
            InputError: a line before the last is no entry of a run.
        """
        lines = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        entries = []
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict) or type(entry.get("step")) is not int:
                    raise ValueError("it has no step")
                entries.append(entry)
            except (ValueError, RecursionError) as error:
                # A power cut can leave zeros where the last line was being written.
                if number < len(lines):
                    raise InputError(f"{self.metrics}: line {number} is no entry of a run ({error})") from error
        return entries

    def truncate_metrics(self, step: int) -> None:
        """Drop what was logged after `step`, the checkpoint that a resumed run starts from."""
        kept = [entry for entry in self.read_metrics() if entry["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept))

    def append_metrics(self, entry: dict[str, Any]) -> None:
        """Log an entry in a line of its own."""
        try:
            with self.metrics.open("a") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.metrics)) from error
