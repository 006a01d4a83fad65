"""Whether the kernels compute the formula, and twice the same: against float64, beside torch's own error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from cdt_fast.bench.case import Case, Step
from cdt_fast.bench.clock import seconds
from cdt_fast.bench.measure import disagreement
from cdt_fast.bench.triage import works
from cdt_fast.bench.triage.stages import Context, Parts


def step(context: Context) -> Parts:
    """DUST at one sequence, at some, at more tiles than multiprocessors, and at the batch of a default training."""
    return _checks(works.checked_steps, context)


def cross_entropy(context: Context) -> Parts:
    """The cross-entropy of all depths."""
    return _checks(works.checked_losses, context)


def attention(context: Context) -> Parts:
    """Each of the attention's kernels."""
    return _checks(works.checked_attention, context)


def _checks(cases: Callable[[torch.device, str], Iterable[Case]], context: Context) -> Parts:
    for case in cases(context.device, context.size):
        yield case.name, functools.partial(_checked, case)


def _checked(case: Case) -> Iterator[dict[str, Any]]:
    truth = case.expected()
    # Two steps prepared anew: a training step goes on from where it is.
    found, again = (works.on_kernels(works.way_of(case, "ours").prepare())() for _ in range(2))
    error = disagreement(found, truth)
    same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    own = disagreement(works.way_of(case, "eager").prepare()(), truth)
    yield {
        "relative_error": error,
        "relative_error_of_torch": own,
        "tolerance": case.tolerance,
        "bitwise_repeat": same,
        "passed": error <= case.tolerance and same,
    }


def once(context: Context) -> Parts:
    """Every kernel of the checks once, on few sequences: for a sanitizer, under which all else is slow, too."""
    for name, prepare in works.own_steps(context.device, context.size, small=True):

        def work(prepare: Callable[[], Step] = prepare) -> Iterator[dict[str, Any]]:
            prepare()()
            seconds(lambda: None, context.device)  # waits for the card
            return iter(())

        yield name, work
