"""The stages that check and time cases of the suites at the shapes of a first look, and where a step's time goes."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cdt_fast import ops
from cdt_fast.bench.case import Case, Implementation, Step
from cdt_fast.bench.clock import calls_a_reading, seconds
from cdt_fast.bench.measure import Gate, Refused, disagreement
from cdt_fast.bench.memory import allocator_peak
from cdt_fast.bench.suites import attention, cross_entropy, step
from cdt_fast.bench.suites.trained import VideoWork
from cdt_fast.bench.suites.training_step import CONSTRAINED, TrainingStep, captured, fused, graphs_of, weighted
from cdt_fast.bench.triage.machine import host_seconds
from cdt_fast.bench.triage.stages import Context, Parts

Cases = Callable[[torch.device, str], Iterable[Case]]

BF16 = torch.bfloat16
# Sequences of 20 tokens: 64,000 and 8,000 of them.
_TIMED_SEQUENCES = {"toy": (3,), "gpu": (3200, 400)}
# One, some, more than one tile a multiprocessor, and a batch of the default training.
_CHECKED_SEQUENCES = {"toy": (3,), "gpu": (1, 3, 134, 400)}
_CHECKED_HEADS = {
    "toy": (cross_entropy.Shape("toy", 2, 8, 16, 100),),
    "gpu": (cross_entropy.Shape("check", 3, 300, 256, 50257), cross_entropy.Shape("check", 3, 256, 128, 128256)),
}
_CHECKED_ATTENTION = {
    "toy": (attention.Shape(3, 5, 16),),
    "gpu": (
        attention.Shape(64, 20, 256),
        attention.Shape(8, 512, 64),
        attention.Shape(3, 300, 128),
        attention.Shape(2, 1024, 256),
        attention.Shape(2, 300, 512),
        attention.Shape(5, 129, 64, padded=True),
    ),
}
_TIMED_ATTENTION = {
    "toy": (attention.Shape(2, 20, 16),),
    "gpu": (
        attention.Shape(3200, 20, 256),
        attention.Shape(512, 64, 256),
        attention.Shape(256, 512, 64),
        attention.Shape(64, 1024, 128),
        attention.Shape(32, 4096, 64),
        attention.Shape(16, 2048, 1024),
    ),
}
_READINGS = 3
_PROFILED_STEPS = 3
_MOST_KERNELS = 40


def _video(sequences: int, size: str) -> VideoWork:
    return VideoWork("DUST", sequences, **(step.TOY if size == "toy" else {}))


def _step_case(sequences: int, device: torch.device, size: str, compilers: bool = False) -> Case:
    return step.against_eager(_video(sequences, size), device, "bfloat16", CONSTRAINED, compilers, toy=size == "toy")


def timed_steps(device: torch.device, size: str) -> Iterator[Case]:
    """The constrained step in bfloat16, launched and captured."""
    for sequences in _TIMED_SEQUENCES[size]:
        case, work = _step_case(sequences, device, size), _video(sequences, size)

        def replayed(work: VideoWork = work) -> Step:
            return captured(work, fused, device, autocast=True, graphs=graphs_of(device))

        graph = Implementation("cdt_fast, CUDA graph", "ours", replayed)
        yield replace(case, name=f"{case.name}, {work.items} tokens", implementations=(*case.implementations, graph))


def compiled_step(device: torch.device, size: str) -> list[Case]:
    """The larger step, by torch.compile in its default mode."""
    case = _step_case(_TIMED_SEQUENCES[size][0], device, size, compilers=True)
    return [replace(case, implementations=tuple(way for way in case.implementations if way.name == "torch.compile"))]


def launched_step(sequences: int, device: torch.device, size: str) -> TrainingStep:
    """The constrained step by `cdt_fast`, every kernel launched."""
    return TrainingStep(_video(sequences, size), fused, device, CONSTRAINED, autocast=True)


def timed_losses(device: torch.device, size: str) -> Iterator[Case]:
    """The cross-entropy of all depths at the shapes of language models."""
    for shape in cross_entropy.SHAPES[size]:
        if shape.model != cross_entropy.CLASSIFIER:
            yield cross_entropy.case_of(shape, cross_entropy.KNOWN, BF16, device, size)


def timed_attention(device: torch.device, size: str) -> Iterator[Case]:
    """Attention against all that torch has for it but what it would have to compile."""
    for shape in _TIMED_ATTENTION[size]:
        case = attention.case_of(shape, BF16, device, size)
        yield replace(case, implementations=tuple(way for way in case.implementations if not way.late))


def checked_steps(device: torch.device, size: str) -> Iterator[Case]:
    """The constrained step in bfloat16; what it is compared with is in float64."""
    for sequences in _CHECKED_SEQUENCES[size]:
        work = _video(sequences, size)

        def truth(work: VideoWork = work) -> list[torch.Tensor]:
            return TrainingStep(work, weighted(work.formula), device, CONSTRAINED, torch.float64)()

        case = _step_case(sequences, device, size)
        yield replace(case, name=f"DUST, {sequences} sequence{'s' * (sequences > 1)}", expected=truth)


def checked_losses(device: torch.device, size: str) -> Iterator[Case]:
    """The cross-entropy with weights that are known and that follow; the formula of these sizes is in float64."""
    for shape in _CHECKED_HEADS[size]:
        for work in (cross_entropy.KNOWN, cross_entropy.UNKNOWN):
            yield cross_entropy.case_of(shape, work, BF16, device, "cpu" if size == "gpu" else size)


def checked_attention(device: torch.device, size: str) -> Iterator[Case]:
    """One shape for each kernel; the formula of these sizes is in float64."""
    for shape in _CHECKED_ATTENTION[size]:
        yield attention.case_of(shape, BF16, device, "cpu" if size == "gpu" else size)


def way_of(case: Case, role: str) -> Implementation:
    """The first way of a case that has this role."""
    return next(way for way in case.implementations if way.role == role)


def on_kernels(step: Step) -> Step:
    """The step, which raises where an op would run on anything but its kernels."""

    def strictly() -> list[torch.Tensor]:
        with ops.use_backend("triton"):
            return step()

    return strictly


def own_steps(device: torch.device, size: str, small: bool = False) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Every step of ours that the stages launch, by name; or those of few tokens, which launch every kernel too."""
    for sequences in (3,) if small else _CHECKED_SEQUENCES[size]:
        yield f"{sequences} sequences", functools.partial(launched_step, sequences, device, size)
    timed = () if small else (timed_attention, timed_losses)
    for many in (checked_losses, checked_attention, *timed):
        for case in many(device, size):
            yield case.name, way_of(case, "ours").prepare


def once(context: Context) -> Parts:
    """Every kernel of the checks once, on few sequences: for a sanitizer, under which all else is slow, too."""
    for name, prepare in own_steps(context.device, context.size, small=True):

        def work(prepare: Callable[[], Step] = prepare) -> Iterator[dict[str, Any]]:
            prepare()()
            seconds(lambda: None, context.device)  # waits for the card
            return iter(())

        yield name, work


def _checks(cases: Cases, context: Context) -> Parts:
    """Whether the kernels compute the formula, and twice the same: against float64, beside torch's own error."""
    for case in cases(context.device, context.size):
        yield case.name, functools.partial(_checked, case)


def _checked(case: Case) -> Iterator[dict[str, Any]]:
    truth = case.expected()
    # Two steps prepared anew: a training step goes on from where it is.
    found, again = (on_kernels(way_of(case, "ours").prepare())() for _ in range(2))
    error = disagreement(found, truth)
    same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    own = disagreement(way_of(case, "eager").prepare()(), truth)
    yield {
        "relative_error": error,
        "relative_error_of_torch": own,
        "tolerance": case.tolerance,
        "bitwise_repeat": same,
        "passed": error <= case.tolerance and same,
    }


def _times(cases: Cases, context: Context) -> Parts:
    """How fast each way of each case is, ours and what it is compared with first."""
    for case in cases(context.device, context.size):
        gate = Gate(case)
        for way in sorted(case.implementations, key=lambda way: ("ours", "eager", "peer").index(way.role)):
            yield f"{case.name}: {way.name}", functools.partial(_timed, case, way, gate, context.device)


def _timed(case: Case, way: Implementation, gate: Gate, device: torch.device) -> Iterator[dict[str, Any]]:
    named = {"case": case.name, "way": way.name, "role": way.role, "flop": case.flop, "moved_bytes": case.moved}
    try:
        step, difference, _ = gate.open(way)
    except Refused as reason:
        yield {**named, "status": "wrong", "reason": str(reason)}
        return
    yield {**named, "status": "timed", "relative_error": difference, "dtype": case.dtype, **_readings(step, device)}


def _readings(step: Step, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step that has run before, over readings of 50 ms or more on a GPU."""
    calls = calls_a_reading(seconds(step, device), device)
    taken = sorted(1e3 * seconds(step, device, calls) for _ in range(_READINGS))
    found = {"median_ms": statistics.median(taken), "least_ms": taken[0], "most_ms": taken[-1], "calls": calls}
    found["host_ms"] = 1e3 * host_seconds(step, device, 2)
    if device.type == "cuda":
        found["peak_bytes"] = allocator_peak(step, device)
    return found


def time_step(context: Context) -> Parts:
    """The constrained step of DUST: ours, eager, by the identity, ours captured; and its time by kernel."""
    for case in timed_steps(context.device, context.size):
        yield from _times(lambda *_, case=case: [case], context)
        yield f"{case.name}: by kernel", functools.partial(_by_kernel, case.shape["B"], context.device, context.size)


def _by_kernel(sequences: int, device: torch.device, size: str) -> Iterator[dict[str, Any]]:
    one = launched_step(sequences, device, size)
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


check_step = functools.partial(_checks, checked_steps)
check_cross_entropy = functools.partial(_checks, checked_losses)
check_attention = functools.partial(_checks, checked_attention)
time_cross_entropy = functools.partial(_times, timed_losses)
time_attention = functools.partial(_times, timed_attention)
time_compiler = functools.partial(_times, compiled_step)
