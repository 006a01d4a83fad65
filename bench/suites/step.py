"""The whole training step of a model: forward, backward, optimizer and multipliers.

The implementations of a case differ in nothing but how they compute the per-depth losses. Beside the constrained step
against eager torch and its compiler stands the constrained step of `cdt_fast` against its own unconstrained one, which
reads and scores the last depth alone: what the constraints cost. On a GPU the step of few windows is also replayed from
a CUDA graph, against the same step launched kernel by kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch

from cdt_fast.bench.baselines.compiled import compiled, first_run, modes, name_of
from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites.trained import DTYPES, TextWork, Trained, VideoWork
from cdt_fast.bench.suites.training_step import (
    CONSTRAINED,
    LAST,
    LOGGED,
    Form,
    Losses,
    captured,
    expected_of,
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
_TOY: dict[str, Any] = {"window": 5, "patch": 16, "code": 64, "layers": 2}

# Windows of a batch so small that a GPU waits for the host, of frames of 10 by 10 patches.
SMALL_BATCHES = (1, 2, 4, 8)
_POSITIONS = {"toy": 2, "cpu": 100, "gpu": 100}


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """The steps of DUST, VideoUT and TextUT; those of DUST and VideoUT at small batches captured, too."""
    for work in _videos(size):
        reference = work.family == "DUST" and work.tied
        for dtype in DTYPES:
            yield against_eager(work, device, dtype, CONSTRAINED, compilers=reference, toy=size == "toy")
            if reference:
                yield against_eager(work, device, dtype, LOGGED)
            yield against_unconstrained(work, device, dtype)
            if reference and dtype == "float32":
                for form in itertools.product(get_args(ObjectiveName), get_args(Coupling)):
                    if form != (DEFAULTS.objective, DEFAULTS.coupling):
                        yield against_unconstrained(work, device, dtype, form)
    for dtype in DTYPES:
        yield against_eager(TEXTS[size], device, dtype, CONSTRAINED)
        yield against_unconstrained(TEXTS[size], device, dtype)
    for family in ("DUST", "VideoUT"):
        for windows in SMALL_BATCHES:
            work = VideoWork(family, windows * _POSITIONS[size], **(_TOY if size == "toy" else {}))
            yield against_launches(work, device, "bfloat16", windows)


def _videos(size: str) -> Iterator[VideoWork]:
    sequences = {"toy": 4, "cpu": 400, "gpu": 3200}[size]
    for family in ("DUST", "VideoUT"):
        work = VideoWork(family, sequences, **(_TOY if size == "toy" else {}))
        yield work
        yield replace(work, tied=False, readout="next")
        if family == "DUST":
            yield replace(work, tied=False)


def against_eager(
    work: Trained, device: torch.device, dtype: str, reads: str, compilers: bool = False, toy: bool = False
) -> Case:
    """The step by eager torch, its compilers where asked for, and `cdt_fast`."""
    autocast = dtype == "bfloat16"
    eager = weighted(work.formula)

    def candidate(name: str, role: str, losses: Losses, autocast: bool = autocast) -> Implementation:
        return Implementation(name, role, prepared(work, losses, device, reads, autocast))

    def compiled_one(mode: str) -> Implementation:
        def prepare() -> Step:
            if toy:
                raise Unavailable("at toy size it would take far longer to compile than all else together")
            step = prepared(work, weighted(compiled(work.formula, mode, device)), device, reads, autocast)()
            run = first_run(step)
            step.restart()
            return run

        return Implementation(name_of(mode), "peer", prepare, late=True)

    candidates = [
        candidate("eager", "eager", eager),
        *(candidate(name, "peer", weighted(formula)) for name, formula in work.other_formulas.items()),
        *(compiled_one(mode) for mode in modes(device) if compilers),
        candidate("cdt_fast", "ours", fused),
    ]
    note = ""
    if autocast and device.type == "cpu":
        # The goal is set against the step in float32, which is what a CPU is trained in unless somebody chooses.
        candidates[0] = replace(candidates[0], name="eager, bfloat16", role="peer")
        candidates.insert(0, candidate("eager, float32", "eager", eager, autocast=False))
        note = "eager is in float32, all else in bfloat16"
    what = "constrained" if reads == CONSTRAINED else "unconstrained"
    return _case(work, device, dtype, f"{what}, {dtype}", tuple(candidates), reads=reads, note=note)


def against_unconstrained(work: Trained, device: torch.device, dtype: str, form: Form | None = None) -> Case:
    """The constrained step of `cdt_fast` against its unconstrained one; `form` None: the default constraints."""
    autocast = dtype == "bfloat16"

    def candidate(name: str, role: str, losses: Losses, reads: str) -> Implementation:
        step = prepared(work, losses, device, reads, autocast, form)
        return Implementation(name, role, step, expected_of(work, device, reads, form))

    logged = candidate("unconstrained, all depths logged", "peer", fused, LOGGED)
    candidates = (
        candidate("unconstrained", "eager", work.last_loss, LAST),
        *([logged] if form is None else []),
        candidate("constrained", "ours", fused, CONSTRAINED),
    )
    note = "all by cdt_fast; each agrees with the formula of its own loss"
    what = "constrained" if form is None else "constrained ({}, {})".format(*form)
    title = f"{what} against unconstrained, {dtype}"
    return _case(work, device, dtype, title, candidates, CONSTRAINED, note, form)


def against_launches(work: Trained, device: torch.device, dtype: str, windows: int) -> Case:
    """The constrained step replayed from a CUDA graph, as `--cuda-graph` does, against the same, launched."""
    autocast = dtype == "bfloat16"

    def candidate(name: str, role: str, losses: Losses, replayed: bool) -> Implementation:
        def prepare() -> Step:
            graphs = graphs_of(device)  # the first, so that without a GPU neither implementation costs anything
            refuse_slow_bf16(device, autocast)
            if replayed:
                return captured(work, losses, device, autocast, graphs)
            return prepared(work, losses, device, CONSTRAINED, autocast)()

        return Implementation(name, role, prepare)

    candidates = (
        candidate("cdt_fast, launched", "eager", fused, replayed=False),
        candidate("eager, launched", "peer", weighted(work.formula), replayed=False),
        candidate("eager, CUDA graph", "peer", weighted(work.formula), replayed=True),
        candidate("cdt_fast, CUDA graph", "ours", fused, replayed=True),
    )
    title = f"CUDA graph against launches, {windows} window{'s' if windows > 1 else ''}, {dtype}"
    note = "against cdt_fast launched kernel by kernel; the memory of a graph is allocated once and held"
    return replace(_case(work, device, dtype, title, candidates, CONSTRAINED, note), with_memory=False)


def _case(
    work: Trained,
    device: torch.device,
    dtype: str,
    title: str,
    candidates: tuple[Implementation, ...],
    reads: str,
    note: str,
    form: Form | None = None,
) -> Case:
    return Case(
        suite="step",
        name=f"{work.title}, {title}",
        shape=work.shape,
        dtype=dtype,
        implementations=candidates,
        expected=expected_of(work, device, reads, form),
        tolerance=work.tolerances[dtype],
        flop=work.flop,
        moved=work.moved(dtype),
        note=note,
    )
