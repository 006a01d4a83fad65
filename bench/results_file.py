"""Results files: one for each card or processor and suite, to which every run adds its cases.

A case that is measured again replaces its earlier figures; the others stay, each with the run that measured it.
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import cdt_fast
from cdt_fast.checks import InputError
from cdt_fast.files import read_json
from cdt_fast.ops.products import cpu_has_bf16_products


def describe(device: torch.device, allocator: str) -> dict[str, Any]:
    """Names, versions and settings, `allocator` (how freed memory is handled) among them; none of them is a path."""
    information = Path("/proc/cpuinfo")
    said = information.read_text(encoding="utf-8") if information.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", said, re.MULTILINE)
    processor = match[1].strip() if match else platform.processor() or platform.machine()
    facts: dict[str, Any] = {
        "name": processor,
        "device": device.type,
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": cpu_has_bf16_products(),
        "allocator": allocator,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": next((one.version for one in importlib.metadata.distributions(name="triton")), None),
        "cdt_fast": cdt_fast.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "bf16_instructions": properties.major >= 8,
            "cuda": torch.version.cuda,
        }
    return facts


def read(path: Path) -> dict[str, Any]:
    """The contents of a results file; InputError if it is not one."""
    contents = read_json(path)
    if not isinstance(contents, dict) or not {"name", "device", "suite", "size", "runs", "cases"} <= contents.keys():
        raise InputError(f"{path}: expected a file that cdt-fast bench wrote")
    return contents


def open_file(folder: Path, device: str, suite: str, size: str, name: str) -> tuple[Path, dict[str, Any]]:
    """Path and contents of `folder/NAME-SUITE.json`, or `NAME-SUITE-SIZE.json` if the size is not the device's own."""
    own = {"cpu": "cpu", "cuda": "gpu"}[device]
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = folder / f"{stem}-{suite}{'' if size == own else f'-{size}'}.json"
    if path.exists():
        return path, read(path)
    return path, {"name": name, "device": device, "suite": suite, "size": size, "runs": {}, "cases": []}


def add(contents: dict[str, Any], case: Mapping[str, Any], run: Mapping[str, Any], order: Sequence[str]) -> None:
    """Put a case, as `measure.measure` returned it, into the contents of a file, in place of an earlier measurement.
    `run` is the machine and date of this run, `order` the names of the suite's cases: the file forgets all others."""
    known = {known["case"]: known for known in contents["cases"]}
    known[case["case"]] = {**case, "run": run["date"]}
    contents["cases"] = [known[name] for name in order if name in known]
    used = {one["run"] for one in contents["cases"]}
    runs = {**contents["runs"], run["date"]: dict(run)}
    contents["runs"] = {key: run for key, run in runs.items() if key in used}
