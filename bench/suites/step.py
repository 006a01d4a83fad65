"""The whole training step of a model: forward, backward, optimizer and multipliers.

The implementations of a case differ in nothing but how they compute the per-depth losses. Beside the constrained step
against eager torch and its compiler stands the constrained step of `cdt_fast` against its own unconstrained one, which
reads and scores the last depth alone: what the constraints cost. On a GPU the step of few windows is also replayed from
a CUDA graph, against the same step launched kernel by kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch

from cdt_fast.bench.baselines.support import compiled, first_run, modes, name_of_mode
from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites.trained import DTYPES, TextWork, Trained, VideoWork
from cdt_fast.bench.suites.training_step import (
    CONSTRAINED,
    LAST,
    LOGGED,
    Form,
    Losses,
    captured,
    first_step,
    fused,
    graphs_of,
    prepared,
    refuse_slow_bf16,
    weighted,
)
from cdt_fast.constraints.presets import DEFAULTS, Coupling, ObjectiveName

TEXTS = {
    "toy": TextWork(3, 7, 16, layers=2, vocabulary=30),
    "cpu": TextWork(32, 128, 384),
    "gpu": TextWork(256, 256, 768),
}
TOY: dict[str, Any] = {"window": 5, "patch": 16, "code": 64, "layers": 2}

# Windows of a batch so small that a GPU waits for the host, of frames of 10 by 10 patches.
SMALL_BATCHES = (1, 2, 4, 8)
_POSITIONS = {"toy": 2, "cpu": 100, "gpu": 100}


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """The steps of DUST, VideoUT and TextUT; those of DUST and VideoUT at small batches captured, too."""
    sequences, toy = {"toy": 4, "cpu": 400, "gpu": 3200}[size], TOY if size == "toy" else {}
    for family in ("DUST", "VideoUT"):
        yield from _of_a_model(VideoWork(family, sequences, **toy), device, family == "DUST", toy=size == "toy")
        yield from _of_a_model(VideoWork(family, sequences, **toy, tied=False, readout="next"), device)
        if family == "DUST":
            yield from _of_a_model(VideoWork(family, sequences, **toy, tied=False), device)
    yield from _of_a_model(TEXTS[size], device)
    for family in ("DUST", "VideoUT"):
        for windows in SMALL_BATCHES:
            work = VideoWork(family, windows * _POSITIONS[size], **toy)
            yield against_launches(work, device, "bfloat16", windows)


def _of_a_model(work: Trained, device: torch.device, reference: bool = False, toy: bool = False) -> Iterator[Case]:
    """The cases of a model; of the reference also with torch.compile, with the losses logged, and for every form."""
    for dtype in DTYPES:
        yield against_eager(work, device, dtype, CONSTRAINED, reference, toy)
        if reference:
            yield against_eager(work, device, dtype, LOGGED)
        yield against_unconstrained(work, device, dtype)
        if reference and dtype == "float32":
            for form in itertools.product(get_args(ObjectiveName), get_args(Coupling)):
                if form != (DEFAULTS.objective, DEFAULTS.coupling):
                    yield against_unconstrained(work, device, dtype, form)


def against_eager(
    work: Trained, device: torch.device, dtype: str, reads: str, compilers: bool = False, toy: bool = False
) -> Case:
    """The step by eager torch, its compilers where asked for, and `cdt_fast`."""
    autocast = dtype == "bfloat16"

    def candidate(name: str, role: str, losses: Losses, autocast: bool = autocast) -> Implementation:
        return Implementation(name, role, lambda: prepared(work, losses, device, reads, autocast))

    def compiled_step(mode: str) -> Step:
        if toy:
            raise Unavailable("at toy size it would take far longer to compile than all else together")
        step = prepared(work, weighted(compiled(work.formula, mode, device)), device, reads, autocast)
        run = first_run(step)
        step.restart()
        return run

    eager = weighted(work.formula)
    baselines, note = [candidate("eager", "eager", eager)], ""
    if autocast and device.type == "cpu":
        # The goal is set against the step in float32, which is what a CPU is trained in unless somebody chooses.
        baselines = [
            candidate("eager, float32", "eager", eager, autocast=False),
            candidate("eager, bfloat16", "peer", eager),
        ]
        note = "eager is in float32, all else in bfloat16"
    candidates = [
        *baselines,
        *(candidate(name, "peer", weighted(formula)) for name, formula in work.other_formulas.items()),
        *(
            Implementation(name_of_mode(mode), "peer", functools.partial(compiled_step, mode), late=True)
            for mode in modes(device)
            if compilers
        ),
        candidate("cdt_fast", "ours", fused),
    ]
    what = "constrained" if reads == CONSTRAINED else "unconstrained"
    return _case(work, device, dtype, f"{what}, {dtype}", candidates, note, reads)


def against_unconstrained(work: Trained, device: torch.device, dtype: str, form: Form | None = None) -> Case:
    """The constrained step of `cdt_fast` against its unconstrained one; `form` None: the default constraints."""

    def candidate(name: str, role: str, losses: Losses, reads: str) -> Implementation:
        return Implementation(
            name,
            role,
            lambda: prepared(work, losses, device, reads, dtype == "bfloat16", form),
            expected=lambda: first_step(work, device, reads, form),
        )

    candidates = [
        candidate("unconstrained", "eager", work.last_loss, LAST),
        candidate("unconstrained, all depths logged", "peer", fused, LOGGED),
        candidate("constrained", "ours", fused, CONSTRAINED),
    ]
    what = "constrained"
    if form is not None:
        del candidates[1]
        what = "constrained ({}, {})".format(*form)
    note = "all by cdt_fast; each agrees with the formula of its own loss"
    return _case(work, device, dtype, f"{what} against unconstrained, {dtype}", candidates, note, form=form)


def against_launches(work: Trained, device: torch.device, dtype: str, windows: int) -> Case:
    """The constrained step replayed from a CUDA graph, as `--cuda-graph` does, against the same, launched."""
    autocast = dtype == "bfloat16"

    def candidate(name: str, role: str, losses: Losses) -> Implementation:
        def prepare() -> Step:
            graphs = graphs_of(device)  # the first, so that without a GPU neither implementation costs anything
            refuse_slow_bf16(device, autocast)
            if name.endswith("CUDA graph"):
                return captured(work, losses, device, autocast, graphs)
            return prepared(work, losses, device, CONSTRAINED, autocast)

        return Implementation(name, role, prepare)

    candidates = [
        candidate("cdt_fast, launched", "eager", fused),
        candidate("eager, launched", "peer", weighted(work.formula)),
        candidate("eager, CUDA graph", "peer", weighted(work.formula)),
        candidate("cdt_fast, CUDA graph", "ours", fused),
    ]
    title = f"CUDA graph against launches, {windows} window{'s' if windows > 1 else ''}, {dtype}"
    note = "against cdt_fast launched kernel by kernel; the memory of a graph is allocated once and held"
    return replace(_case(work, device, dtype, title, candidates, note), with_memory=False)


def _case(
    work: Trained,
    device: torch.device,
    dtype: str,
    title: str,
    candidates: Sequence[Implementation],
    note: str,
    reads: str = CONSTRAINED,
    form: Form | None = None,
) -> Case:
    return Case(
        suite="step",
        name=f"{work.title}, {title}",
        shape=work.shape,
        dtype=dtype,
        implementations=tuple(candidates),
        expected=lambda: first_step(work, device, reads, form),
        tolerance=work.tolerances[dtype],
        flop=work.flop,
        moved=work.moved(dtype),
        note=note,
    )
