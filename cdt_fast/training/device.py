"""Whether a training can compute where, how precisely and how it was asked to."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

from cdt_fast.errors import InputError
from cdt_fast.training.config import RunConfig


def prepare_device(config: RunConfig, accelerator: Accelerator) -> None:
    """Check the device's settings against what is there, and set torch's precision of float32 products.

    Raises:
        InputError: a setting asks for what this machine, or the way the training was launched, does not have.
    """
    device = accelerator.device
    if config.training.device == "cuda" and device.type != "cuda":
        raise InputError("[training] device is cuda, but torch finds no CUDA GPU here")
    if config.training.precision == "tf32" and device.type != "cuda":
        raise InputError("[training] precision tf32 needs an NVIDIA GPU; use fp32 or bf16 on the CPU")
    if config.training.cuda_graph:
        _check_cuda_graph(accelerator)
    torch.backends.cuda.matmul.allow_tf32 = config.training.precision == "tf32"


def _check_cuda_graph(accelerator: Accelerator) -> None:
    if accelerator.device.type != "cuda":
        raise InputError(f"[training] cuda_graph needs a CUDA GPU, and this training would run on {accelerator.device}")
    if accelerator.num_processes > 1:
        raise InputError(
            f"[training] cuda_graph captures the step of one process, got {accelerator.num_processes} of them; train "
            "without --cuda-graph, or on one GPU"
        )
    plugin = accelerator.state.dynamo_plugin
    compiled = plugin is not None and plugin.backend != DynamoBackend.NO
    if compiled or accelerator.mixed_precision != "no":
        raise InputError(
            "[training] cuda_graph works without accelerate's own mixed precision and compilation; launch without "
            "them ([training] precision bf16 works)"
        )
