"""The primal optimizer and its schedule, on a GPU with their numbers where the arithmetic is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from cdt_fast.errors import InputError

# Options that say how and where the update is computed, not what it is: a checkpoint's machine may have been another.
_PLACEMENT = ("foreach", "fused", "capturable")


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float,
    relative_rate: Callable[[int], float],
    *,
    on_device: bool,
) -> tuple[AdamW, LambdaLR]:
    """AdamW and its schedule, which multiplies `lr` by `relative_rate` of the number of steps done.

    `on_device` keeps the learning rate and the count of steps on the parameters' device and updates in one fused
    kernel, so that the step can be captured in a CUDA graph: the schedule then writes the rate, as float32, into the
    tensor that the kernel reads.

    Raises:
        InputError: the rate, or its product with the decay, is beyond what an update in float32 can be made with.
    """
    if max(lr, lr * weight_decay) > 1e30:
        raise InputError(f"[training] lr and weight_decay times lr must be at most 1e+30, got {lr:g}, {weight_decay:g}")
    if not on_device:
        optimizer = AdamW(parameters, lr=lr, weight_decay=weight_decay)
        return optimizer, LambdaLR(optimizer, relative_rate)
    optimizer = AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True, capturable=True)
    # Before the rate is a tensor: the schedule keeps its own copy of it, which stays a number of the host.
    schedule = LambdaLR(optimizer, relative_rate)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)
    return optimizer, schedule


@torch.no_grad()
def load_optimizer_state(optimizer: AdamW, state: Mapping[str, Any]) -> None:
    """Take up what `optimizer.state_dict()` returned, there or on another device; the placement stays as built."""
    groups = [{name: group[name] for name in (*_PLACEMENT, "lr")} for group in optimizer.param_groups]
    saved = [
        {**group, **{name: own[name] for name in _PLACEMENT}}
        for group, own in zip(state["param_groups"], groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": saved})
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        rate = float(group["lr"])
        group["lr"] = own["lr"].fill_(rate) if isinstance(own["lr"], Tensor) else rate
