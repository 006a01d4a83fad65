"""What a run was measured on, and with what: the head of every results file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import cdt_fast
from cdt_fast.ops.common import cpu_has_bf16_products


def processor_name() -> str:
    """The name that the processor gives itself, or its architecture."""
    information = Path("/proc/cpuinfo")
    said = information.read_text(encoding="utf-8") if information.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", said, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def describe(device: torch.device, allocator: str) -> dict[str, Any]:
    """Names, versions and settings, `allocator` (how freed memory is handled) among them; none of them is a path."""
    facts: dict[str, Any] = {
        "name": processor_name(),
        "device": device.type,
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": cpu_has_bf16_products(),
        "allocator": allocator,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
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


def version_of(package: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def file_stem(name: str) -> str:
    """The name of a card or processor as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
