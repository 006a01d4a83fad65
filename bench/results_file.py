"""Results files: one for each card or processor and suite, to which every run adds its cases.

A case is replaced when it is measured again; the others stay, each with the run that measured it: its machine, its
versions, its date and its command. Nothing is averaged over runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.bench.machine import file_stem
from cdt_fast.errors import InputError
from cdt_fast.files import read_json, write_json

_KEYS = ("name", "device", "suite", "size", "runs", "cases")


def read(path: Path) -> dict[str, Any]:
    """The contents of a results file.

    Raises:
        InputError: it is not one.
    """
    contents = read_json(path)
    missing = [key for key in _KEYS if not isinstance(contents, dict) or key not in contents]
    if missing:
        raise InputError(f"{path}: has no {', '.join(missing)}; expected a file that cdt-fast bench wrote")
    return contents


class ResultsFile:
    """The file of one suite during a run: `folder/NAME-SUITE.json`, and other shapes than the device's own apart.

    Args:
        folder: where it is, or will be.
        device: "cpu" or "cuda".
        suite, size: what is measured, with which shapes.
        run: machine, versions, date and command of this run.
        order: names of the suite's cases; the file forgets those that the suite no longer has.

    Attributes:
        contents: all that the file says.

    Raises:
        InputError: there is a file of that name, which is of something else or not a results file.
    """

    def __init__(
        self, folder: Path, device: str, suite: str, size: str, run: Mapping[str, Any], order: Sequence[str]
    ) -> None:
        name = run["machine"]["name"]
        own = {"cpu": "cpu", "cuda": "gpu"}[device]
        self.path = folder / f"{file_stem(name)}-{suite}{'' if size == own else f'-{size}'}.json"
        head = {"name": name, "device": device, "suite": suite, "size": size}
        self.contents: dict[str, Any] = {**head, "runs": {}, "cases": []}
        if self.path.exists():
            self.contents = read(self.path)
        for key, value in head.items():
            if self.contents[key] != value:
                raise InputError(f"{self.path}: its {key} is {self.contents[key]!r}; expected {value!r}, as this run's")
        self._run, self._order = dict(run), list(order)
        self._key = str(run["date"])
        while self._key in self.contents["runs"]:
            self._key += "+"

    def add(self, case: Mapping[str, Any], ceilings: Mapping[str, Any]) -> None:
        """Take in a case, in place of an earlier measurement of it, and write the file.

        Args:
            case: what `measure.measure` returned.
            ceilings: what the run has measured of the machine so far.
        """
        known = {known["case"]: known for known in self.contents["cases"]}
        known[case["case"]] = {**case, "run": self._key}
        self.contents["runs"][self._key] = {**self._run, "ceilings": ceilings}
        self.contents["cases"] = [known[name] for name in self._order if name in known]
        used = {one["run"] for one in self.contents["cases"]}
        self.contents["runs"] = {key: run for key, run in self.contents["runs"].items() if key in used}
        write_json(self.path, self.contents)
