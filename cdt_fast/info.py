"""Facts about the installation: versions, the device in use, and why."""

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import torch

import cdt_fast
from cdt_fast.ops import common, layerwise_reconstruction_loss, products

# Packages and the extra that brings each.
_OPTIONAL = {"triton": "", "av": "video", "pillow": "video", "matplotlib": "report"}
_OPTIONAL |= {name: name for name in ("transformers", "peft", "trl", "lightning")}


def collect() -> dict[str, Any]:
    """Return facts by name, words and numbers only."""
    device = _said(_gpu, "cpu")
    on_gpu = device.startswith("cuda")
    narrow = torch.cuda.is_bf16_supported(False) if on_gpu else products.cpu_has_bf16_products()
    multiplied = "bfloat16, with weights in float32" + " (lm: float32)" * (not on_gpu) if narrow else "float32"
    facts: dict[str, Any] = {
        "cdt_fast": cdt_fast.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "training multiplies in": f"{multiplied}, by default",
        "ops run on": _said(common.explain),
        "CPU threads": torch.get_num_threads(),
        "CPU instructions": torch.backends.cpu.get_cpu_capability(),
        "CPU bf16 products": "yes" if products.cpu_has_bf16_products() else "no: bf16 will be slow on this processor",
    }
    if facts["ops run on"].startswith("triton"):
        facts["a kernel"] = _said(_launch)
    for package, extra in _OPTIONAL.items():
        missing = "not installed" + f" (extra: {extra})" * bool(extra)
        facts[package] = next((one.version for one in importlib.metadata.distributions(name=package)), missing)
    return facts


def _said(ask: Callable[[], str], otherwise: str = "failed") -> str:
    """Return the answer, or the error: a machine where something is wrong is what this is for."""
    try:
        return ask()
    except Exception as error:
        return f"{otherwise}: {common.words_of(error)}"


def _gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "cpu: this torch is built for CPUs; pip install one for CUDA, pytorch.org/get-started"
    torch.cuda.init()  # an error says whether there is no GPU, no driver, or too old a driver
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"cuda: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"


def _launch() -> str:
    """Launch a small kernel, and say whether it computes what plain torch does."""
    x = torch.linspace(-1, 1, 4096, device="cpu" if common.interpreting() else "cuda").view(64, 64)
    found = []
    for backend in ("triton", "torch"):
        with common.use_backend(backend):
            found.append(layerwise_reconstruction_loss([x], x.flip(0)).total.item())
    verdict = "agrees with plain torch" if abs(found[0] / found[1] - 1) < 1e-5 else "is WRONG here"
    return f"{verdict}: {found[0]:.6g}, in plain torch {found[1]:.6g}"
