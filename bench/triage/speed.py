"""How fast the step, the cross-entropy and the attention are, beside torch's own ways, and where a step's time goes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cdt_fast.bench.triage import works
from cdt_fast.bench.triage.stages import Context, Parts

_PROFILED_STEPS = 3
_MOST_KERNELS = 40


def step(context: Context) -> Parts:
    """The constrained step of DUST: ours, eager, by the identity, ours captured; and its time by kernel."""
    device, size = context.device, context.size
    for case in works.timed_steps(device, size):
        yield from works.timed_parts([case], device)
        yield f"{case.name}: by kernel", functools.partial(_by_kernel, case.shape["B"], device, size)


def cross_entropy(context: Context) -> Parts:
    """The cross-entropy of all depths, beside the peers that are installed."""
    return works.timed_parts(works.timed_losses(context.device, context.size), context.device)


def attention(context: Context) -> Parts:
    """Six shapes of attention against each of SDPA's implementations."""
    return works.timed_parts(works.timed_attention(context.device, context.size), context.device)


def compiler(context: Context) -> Parts:
    """torch.compile in its default mode on the larger step."""
    return works.timed_parts([works.compiled_step(context.device, context.size)], context.device)


def _by_kernel(sequences: int, device: torch.device, size: str) -> Iterator[dict[str, Any]]:
    one = works.launched_step(sequences, device, size)
    one()
    one()
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as taken:
        for _ in range(_PROFILED_STEPS):
            one()
        if on_gpu:
            torch.cuda.synchronize(device)
    found = []
    for event in taken.key_averages():
        if on_gpu and event.device_type == torch.autograd.DeviceType.CPU:
            continue  # an operator, whose kernels are events of their own
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found.append((spent / _PROFILED_STEPS, event.count / _PROFILED_STEPS, event.key))
    found.sort(reverse=True)
    yield {
        "microseconds_a_step": sum(spent for spent, _, _ in found),
        "launches_a_step": sum(count for _, count, _ in found),
        "kernels": [
            {"kernel": name[:120], "microseconds_a_step": spent, "launches_a_step": count}
            for spent, count, name in found[:_MOST_KERNELS]
        ],
    }
