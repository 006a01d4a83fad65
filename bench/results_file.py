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


def read(path: Path) -> dict[str, Any]:
    """The contents of a results file.

    Raises:
        InputError: it is not one.
    """
    contents = read_json(path)
    if not isinstance(contents, dict) or not {"name", "device", "suite", "size", "runs", "cases"} <= contents.keys():
        raise InputError(f"{path}: expected a file that cdt-fast bench wrote")
    return contents


class ResultsFile:
    """The file of one suite during a run: `folder/NAME-SUITE.json`, and other shapes than the device's own apart.

    Args:
        folder: where it is, or will be.
        device: "cpu" or "cuda".
        suite, size: what is measured, with which shapes.
        run: machine, versions, date and command of this run.
        order: names of the suite's cases; the file forgets those that the suite no longer has.

    Raises:
        InputError: there is a file of that name, which is not a results file.
    """

    def __init__(
        self, folder: Path, device: str, suite: str, size: str, run: Mapping[str, Any], order: Sequence[str]
    ) -> None:
        name = run["machine"]["name"]
        own = {"cpu": "cpu", "cuda": "gpu"}[device]
        self.path = folder / f"{file_stem(name)}-{suite}{'' if size == own else f'-{size}'}.json"
        self.contents = {"name": name, "device": device, "suite": suite, "size": size, "runs": {}, "cases": []}
        if self.path.exists():
            self.contents = read(self.path)
        self._run, self._order = run, order

    def add(self, case: Mapping[str, Any], ceilings: Mapping[str, Any]) -> None:
        """Take in a case, in place of an earlier measurement of it, and write the file.

        Args:
            case: what `measure.measure` returned.
            ceilings: what the run has measured of the machine so far.
        """
        key = self._run["date"]
        known = {known["case"]: known for known in self.contents["cases"]}
        known[case["case"]] = {**case, "run": key}
        cases = [known[name] for name in self._order if name in known]
        runs = {**self.contents["runs"], key: {**self._run, "ceilings": ceilings}}
        used = {one["run"] for one in cases}
        self.contents |= {"runs": {key: run for key, run in runs.items() if key in used}, "cases": cases}
        write_json(self.path, self.contents)
