"""A run folder: the files of one training."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from cdt_fast.checks import InputError
from cdt_fast.files import try_lock, write_text
from cdt_fast.training.settings import RunSettings


class RunInUse(InputError):
    """Another process is making or training the run."""


class RunFolder:
    """The paths of a run: `config.toml`, `metrics.jsonl`, `model/`, `checkpoint/`, `evaluation.json`, `report.html`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # A name like an option is one in no command that is printed.
        self.path = Path(path).absolute() if os.fspath(path).startswith("-") else Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.model = self.path / "model"
        self.checkpoint = self.path / "checkpoint" / "state.safetensors"
        self.kept = self.path / "checkpoint" / "kept.json"  # of which step the model is, or is about to be
        self.evaluation = self.path / "evaluation.json"
        self.frames = self.path / "frames.safetensors"

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @classmethod
    def create(cls, path: str | os.PathLike[str], settings: RunSettings) -> Self:
        """Make a run folder with its `config.toml`; InputError: it is not empty, in the making, or cannot be made."""
        run = cls(path)
        temporary = run.path / f".config-{os.getpid()}.tmp.toml"
        try:
            f"{run.path.absolute()}".encode()
            if run.config.exists():
                raise RunInUse(f"{path}: holds a run already; resume it with --resume, or choose another folder")
            # Hidden files are of a process that was killed here, or that is making a run right now.
            if run.path.exists() and not all(name.startswith(".") for name in os.listdir(run.path)):
                raise InputError(f"{path}: exists and is not empty; choose another folder for the run")
            settings.save(temporary)
            os.link(temporary, run.config)  # fails if there is one already, which a move would replace
        except (OSError, UnicodeEncodeError) as error:
            # A link to what is not there exists, too.
            if isinstance(error, FileNotFoundError) or (isinstance(error, FileExistsError) and run.path.is_dir()):
                raise RunInUse(f"{path}: another process is making a run there; choose another folder") from None
            with contextlib.suppress(OSError):
                run.path.rmdir()
            reason = "its name, or one in its settings, is not UTF-8: rename it"
            reason = error.strerror if isinstance(error, OSError) else reason
            raise InputError(f"{path}: cannot be made ({reason})") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return run

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from training this run until the block, or this process, ends; RunInUse: one does."""
        # The folder, as an editor puts a new file in the place of config.toml; and that, as NFS locks files alone.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with self.config.open("r+b") as file:
                if not (try_lock(descriptor) and try_lock(file)):
                    raise RunInUse(f"{self.path}: another process is training this run; wait for it, or stop it first")
                yield
        finally:
            os.close(descriptor)

    def in_place(self) -> Self:
        """Return this folder, to be written to; InputError: it is gone, and to write would make another one there."""
        if not self.config.exists():
            raise InputError(f"{self.path}: was moved or removed while it was in use")
        return self

    def require_model(self) -> None:
        """Raise InputError where there is no model, or not all of it."""
        if not ((self.model / "config.json").is_file() and any(self.model.glob("*.safetensors"))):
            gone = "its model is gone; remove the whole folder to train it anew"
            begun = "has no model yet; resume its training with --resume"
            raise InputError(f"{self.path}: {gone if self.checkpoint.exists() else begun}")

    def remove_if_untouched(self) -> None:
        """Remove what `create` made if no step was trained: the settings, and the folder if nothing else is in it."""
        if self.checkpoint.exists() or any(entry["step"] for entry in self.read_metrics()):
            return
        shutil.rmtree(self.model, ignore_errors=True)  # the untrained one
        for file in (self.metrics, self.kept, self.config):
            file.unlink(missing_ok=True)
        for folder in (self.checkpoint.parent, self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def remove_leftovers(self) -> None:
        """Remove the temporary files that a killed training left, under the lock; others may be of an evaluation."""
        for pattern in (".*config-*.tmp*", ".metrics-*.tmp*", ".model-*.tmp*", "model/.*.tmp*", "checkpoint/.*.tmp*"):
            for leftover in self.path.glob(pattern):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl` but a last one that is not whole; InputError: another is no entry."""
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
        """Drop what was logged after `step`, from which a resumed run starts."""
        kept = [entry for entry in self.read_metrics() if entry["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept))

    def append_metrics(self, entry: dict[str, Any]) -> None:
        try:
            with self.in_place().metrics.open("a") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.metrics)) from error
