"""The sanitizers and the profiler of the CUDA toolkit, where they are there, over kernels that are launched once."""

from __future__ import annotations

import csv
import functools
import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.bench.case import Unavailable
from cdt_fast.bench.triage.stages import Context, one_part

_ERRORS = 86
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
_KERNELS = "regex:unrolled_forward_kernel|unrolled_backward_kernel|cross_entropy_kernel"
# Of the many metrics those that say what bounds a kernel.
_METRICS = (
    "Duration",
    "Compute (SM) Throughput",
    "Memory Throughput",
    "DRAM Throughput",
    "L2 Hit Rate",
    "Achieved Occupancy",
    "Theoretical Occupancy",
    "Registers Per Thread",
    "Dynamic Shared Memory Per Block",
    "Waves Per SM",
    "Executed Ipc Active",
    "Issue Slots Busy",
    "Local Load Sectors",
    "SM Frequency",
)


def _found(tool: str) -> str:
    path = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")
    if path is None:
        raise Unavailable(f"{tool} is not there")
    return path


def _said(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    said = subprocess.run(command, capture_output=True, text=True, env=env)
    print(said.stdout, said.stderr)
    return said


def _sanitized(tool: str, context: Context) -> Iterator[dict[str, Any]]:
    """Accesses outside of the tensors, or warps that touch one place of shared memory without a barrier."""
    program = [*context.command, "--here", "once"]
    command = [_found("compute-sanitizer"), "--tool", tool, "--error-exitcode", str(_ERRORS), "--print-limit", "10"]
    # An allocation of its own for every tensor: within the one block of the caching allocator nothing is outside.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    said = _said([*command, *program], env=environment)
    summaries = _SUMMARY.findall(said.stdout + said.stderr)
    if not summaries or said.returncode not in (0, _ERRORS):
        raise RuntimeError(f"{tool} ended with status {said.returncode}: {_last_line(said)}")
    yield {"tool": tool, "passed": said.returncode == 0, "summary": summaries[-1], "exit_status": said.returncode}


def _profiled(context: Context) -> Iterator[dict[str, Any]]:
    """What bounds three kernels, by the card's counters."""
    program, path = _found("ncu"), Path(f"{context.lines.path.with_suffix('')}.ncu-rep")
    # The clocks are left as they are.
    options = ["--clock-control", "none", "--set", "full", "--kernel-name", _KERNELS, "--launch-count", "3"]
    hot = [*context.command, "--here", "hot"]
    said = _said([program, *options, "--force-overwrite", "--export", str(path), *hot])
    if not path.exists():
        raise RuntimeError(f"ncu ended with status {said.returncode} and wrote no report: {_last_line(said)}")
    command = [program, "--import", str(path), "--csv", "--page", "details"]
    shown = subprocess.run(command, capture_output=True, text=True)
    kernels = metrics_by_kernel(shown.stdout)
    if not kernels:
        raise RuntimeError(f"ncu's report has no kernel: {_last_line(shown)}")
    for kernel, metrics in kernels.items():
        yield {"kernel": kernel, "metrics": metrics}


racecheck, memcheck = (one_part(tool, functools.partial(_sanitized, tool)) for tool in ("racecheck", "memcheck"))
ncu = one_part("profile", _profiled)


def metrics_by_kernel(text: str) -> dict[str, dict[str, str]]:
    """The metrics, with their units in their names, of each kernel of a report's details as CSV."""
    table = text[text.find('"ID"') :] if '"ID"' in text else ""
    kernels: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        if row.get("Metric Name") in _METRICS:
            name = f"{row['Metric Name']} [{row['Metric Unit']}]" if row.get("Metric Unit") else row["Metric Name"]
            kernels.setdefault(row["Kernel Name"], {})[name] = row["Metric Value"]
    return kernels


def _last_line(said: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (said.stdout + said.stderr).splitlines() if line.strip()]
    return (lines or ["nothing was printed"])[-1][:200]
