"""What is installed here, which device is used, and why."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

import cdt_fast
from cdt_fast.ops.shared.backend import explain
from cdt_fast.ops.shared.products import cpu_has_bf16_products
from cdt_fast.video.data.cache import default_cache_dir

# Package and the extra that brings it.
OPTIONAL = {
    "triton": "installed with cdt-fast on Linux",
    "av": "extra: video",
    "pillow": "extra: video",
    "matplotlib": "extra: report",
    "transformers": "extra: transformers",
    "peft": "extra: peft",
    "trl": "extra: trl",
    "lightning": "extra: lightning",
    "tensorboard": "extra: tensorboard",
    "shtab": "extra: completion",
}


def collect() -> dict[str, Any]:
    """Facts by name, words and numbers only."""
    facts: dict[str, Any] = {
        "cdt_fast": cdt_fast.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": _device(),
        "training computes in": _precision(),
        "ops run on": explain(),
        "CPU threads": torch.get_num_threads(),
        "CPU instructions": torch.backends.cpu.get_cpu_capability(),
        "CPU bf16 products": "yes" if cpu_has_bf16_products() else "no: bf16 will be slow on this processor",
        "cache of decoded clips": str(default_cache_dir()),
    }
    for package, source in OPTIONAL.items():
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = f"not installed ({source})"
    return facts


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu (torch finds no CUDA GPU)"
    properties = torch.cuda.get_device_properties(0)
    return f"cuda: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _precision() -> str:
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported(False):
        return "bfloat16 with float32 weights by default; a step of video is one CUDA graph"
    return "float32 by default"
