"""Results files: one for each card or processor and suite, to which every run adds its cases.

A case that is measured again replaces its earlier figures; the others stay, each with the run that measured it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.bench.machine import file_stem
from cdt_fast.checks import InputError
from cdt_fast.files import read_json


def read(path: Path) -> dict[str, Any]:
    """The contents of a results file; InputError if it is not one."""
    contents = read_json(path)
    if not isinstance(contents, dict) or not {"name", "device", "suite", "size", "runs", "cases"} <= contents.keys():
        raise InputError(f"{path}: expected a file that cdt-fast bench wrote")
    return contents


def open_file(folder: Path, device: str, suite: str, size: str, name: str) -> tuple[Path, dict[str, Any]]:
    """Path and contents of the file of a suite on a card or processor: `folder/NAME-SUITE.json`, and with the size in
    its name if that is not the device's own."""
    own = {"cpu": "cpu", "cuda": "gpu"}[device]
    path = folder / f"{file_stem(name)}-{suite}{'' if size == own else f'-{size}'}.json"
    if path.exists():
        return path, read(path)
    return path, {"name": name, "device": device, "suite": suite, "size": size, "runs": {}, "cases": []}


def add(contents: dict[str, Any], case: Mapping[str, Any], run: Mapping[str, Any], order: Sequence[str]) -> None:
    """Put a case, as `measure.measure` returned it, into the contents of a file, in place of an earlier measurement.

    `run` is the machine and date of this run, `order` the names of the suite's cases: the file forgets all others.
    """
    known = {known["case"]: known for known in contents["cases"]}
    known[case["case"]] = {**case, "run": run["date"]}
    contents["cases"] = [known[name] for name in order if name in known]
    used = {one["run"] for one in contents["cases"]}
    runs = {**contents["runs"], run["date"]: dict(run)}
    contents["runs"] = {key: run for key, run in runs.items() if key in used}
