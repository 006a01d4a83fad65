"""Virtual environments that are made to try something in, and thrown away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"


class Failed(Exception):
    """A command did not do what it should; the message is the end of what it said."""


def make(folder: Path, *, above: bool = False, python: str = sys.executable) -> str:
    """An environment in `folder`; its Python. With `above` it sees the packages of this one, below its own."""
    run([python, "-m", "venv", str(folder)])
    made = folder / "bin" / "python"
    if above:
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "above.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    return str(made)


def install(python: str, *words: str) -> None:
    """`pip install`."""
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words])


def run(words: Sequence[str], folder: Path | None = None, **variables: str) -> str:
    """What a command prints, started in `folder` without this process's PYTHONPATH.

    Raises:
        Failed: its status is not 0.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        list(words), cwd=folder, env={**environment, **variables}, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        said = (answer.stdout + answer.stderr).strip()[-1500:]
        raise Failed(f"{' '.join(words)[:200]}: status {answer.returncode}: {said}")
    return answer.stdout


def pinned(package: str) -> str:
    """The version of a package in constraints.txt."""
    (version,) = re.findall(rf"^{package}==([\w.]+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    return version
