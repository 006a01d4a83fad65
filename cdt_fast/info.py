"""Facts about the installation: versions, the device in use, and why."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

import cdt_fast
from cdt_fast.ops.common import cpu_has_bf16_products, explain

# Packages and the extra that brings each.
_OPTIONAL = {"triton": "", "av": "video", "pillow": "video", "matplotlib": "report"}
_OPTIONAL |= {name: name for name in ("transformers", "peft", "trl", "lightning")}


def collect() -> dict[str, Any]:
    """Return facts by name, words and numbers only."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    bf16 = "bfloat16 with float32 weights by default; a step of video is one CUDA graph"
    facts: dict[str, Any] = {
        "cdt_fast": cdt_fast.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"cuda: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" if gpu else "cpu (torch finds no CUDA GPU)",
        "training computes in": bf16 if gpu and torch.cuda.is_bf16_supported(False) else "float32 by default",
        "ops run on": explain(),
        "CPU threads": torch.get_num_threads(),
        "CPU instructions": torch.backends.cpu.get_cpu_capability(),
        "CPU bf16 products": "yes" if cpu_has_bf16_products() else "no: bf16 will be slow on this processor",
    }
    for package, extra in _OPTIONAL.items():
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed" + f" (extra: {extra})" * bool(extra)
    return facts
