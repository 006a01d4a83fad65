"""Labels as targets of the layerwise cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.ops.common import describe

IGNORED = -100


def targets_of(labels: Any, classes: int, *, shift: bool) -> Tensor:
    """int64, of the shape of `labels`; shifted, the target of a token is the label of the next one.

    Raises:
        InputError: labels are no whole numbers, or, on the CPU and not compiled, one is neither a class nor `IGNORED`.
    """
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32) or not labels.dim():
        raise InputError(f"labels must be an integer tensor, one class a row or a token, got {describe(labels)}")
    if _readable(labels):
        wrong = (labels != IGNORED) & ((labels < 0) | (labels >= classes))
        if wrong.any():
            raise InputError(f"labels must be in [0, {classes}) or {IGNORED}, got {labels[wrong][0].item()}")
    if shift:
        labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return labels.long().contiguous()


def check_count(targets: Tensor, items: Any, *, shifted: bool) -> Tensor:
    """How many targets count, `[]` int64; `shifted`: they are labels without the first of each sequence.

    Raises:
        InputError: none does, nothing else (`items`) is there to divide the sum by, and the targets are on the CPU, and
            not compiled.
    """
    count = (targets != IGNORED).sum()
    if items is None and _readable(targets) and not count:
        which = "all of them, but for a sequence's first," if shifted else "all of them"
        raise InputError(f"labels hold nothing to learn from: {which} are {IGNORED}")
    return count


def _readable(tensor: Tensor) -> bool:
    """Whether its numbers can be looked at without waiting for a device, and without a break of a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
