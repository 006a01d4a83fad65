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


def describe(device: torch.device, allocator: str) -> dict[str, Any]:
    """Names, versions and settings, `allocator` (how freed memory is handled) among them; none of them is a path."""
    processor = processor_name()
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


def processor_name() -> str:
    """The name that the processor gives itself, or its architecture."""
    information = Path("/proc/cpuinfo")
    said = information.read_text(encoding="utf-8") if information.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", said, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def file_stem(name: str) -> str:
    """The name of a card or processor as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
