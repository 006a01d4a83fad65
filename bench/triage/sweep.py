"""The fastest blocks of a kernel, by the card's own clock: candidates in turn, the best of them against the default."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cdt_fast.bench.clock import calls_a_reading, round_robin, seconds
from cdt_fast.bench.measure import Refused, disagreement
from cdt_fast.bench.triage.compiling import CANDIDATES, compiled_blocks
from cdt_fast.bench.triage.hot_kernels import HOT, Given, Hot
from cdt_fast.bench.triage.stages import Context, Parts, one_part
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.cards import math_mode

# Seconds for the finalists, with which a stage ends whatever candidates it has not reached.
_ENOUGH = 5.0
_FINALISTS = 3
_ROUNDS = 5
# Other blocks sum in another order, and round what they sum to bfloat16.
_TOLERANCE = 1e-2
# A winner has to be faster by so much: less is what two readings of one kernel differ by.
_GAIN = 1.02
_PROFILED = ("unrolled_forward", "unrolled_backward", "cross_entropy")


def hot(context: Context) -> Parts:
    """Some of the kernels once, with the blocks of their tables: for a profiler."""
    for one in HOT:
        if one.name in _PROFILED:
            yield one.name, _Sweep(one, context).once


class _Sweep:
    """The candidates of one kernel on one set of tensors."""

    def __init__(self, hot: Hot, context: Context) -> None:
        self._hot, self._context, self._device = hot, context, context.device
        self._kept: Tensor | None = None
        self._restoring = 0.0

    @functools.cached_property
    def _given(self) -> Given:
        torch.manual_seed(0)
        return self._hot.given(self._device, self._context.size)

    def prepared(self, blocks: Blocks | None) -> tuple[Callable[[], None], Mapping[str, Any]]:
        """The launch with these blocks, and its arguments."""
        launch = self._hot.launch(self._given, self._context.card, blocks)
        torch.manual_seed(1)
        read = {value.data_ptr() for value in self._given.values() if isinstance(value, Tensor)}
        for value in launch.arguments.values():
            if isinstance(value, Tensor) and value.data_ptr() not in read:
                value.normal_()  # what another kernel would have written, and what this one has to write over
        if self._hot.overwritten is None:
            return launch.run, launch.arguments
        target = launch.arguments[self._hot.overwritten]
        if self._kept is None:
            self._kept = target.clone()
            self._restoring = self._seconds(lambda: target.copy_(self._kept))

        def restored() -> None:
            target.copy_(self._kept)
            launch.run()

        return restored, launch.arguments

    def once(self) -> Iterator[dict[str, Any]]:
        """Launch it, with the blocks of its table; no line."""
        self.prepared(None)[0]()
        seconds(lambda: None, self._device)  # waits for the card
        return iter(())

    def run(self) -> Iterator[dict[str, Any]]:
        """A line for each candidate, and the winner's."""
        hot = self._hot
        default = hot.default(self._context.card, self._context.size)
        step, arguments = self.prepared(default)
        step()
        expected = _results(arguments)
        known = [blocks for blocks in compiled_blocks(self._context.lines.read(CANDIDATES), hot) if blocks != default]
        timed = {default: self._microseconds(step)}
        yield {"blocks": hot.fields(default), "microseconds": timed[default], "status": "timed"}
        tried = 1
        for blocks in known:
            if self._context.left() < _ENOUGH:
                break
            tried += 1
            fields = {"blocks": hot.fields(blocks)}
            try:
                step, arguments = self.prepared(blocks)
                step()
                difference = disagreement(_results(arguments), expected)
                if not difference <= _TOLERANCE:
                    raise Refused(f"differs from the default by {difference:.1e}")
                timed[blocks] = self._microseconds(step)
            except Exception as error:
                yield {**fields, "status": "failed", "reason": f"{type(error).__name__}: {error}"[:200]}
                seconds(lambda: None, self._device)  # raises where nothing works any more
                continue
            yield {**fields, "microseconds": timed[blocks], "status": "timed"}
        finalists = sorted(timed, key=timed.__getitem__)[:_FINALISTS]
        counts = {"candidates_timed": tried, "candidates_compiled": len(known) + 1}
        yield {**self._winner(default, finalists), **counts}

    def _winner(self, default: Blocks, finalists: list[Blocks]) -> dict[str, Any]:
        """The fastest of the finalists and the default, which take turns."""
        steps = {blocks: self.prepared(blocks)[0] for blocks in dict.fromkeys([default, *finalists])}
        taken: dict[Blocks, list[float]] = {blocks: [] for blocks in steps}
        for order in round_robin(list(steps), _ROUNDS):
            for blocks in order:
                taken[blocks].append(self._microseconds(steps[blocks]))
        medians = {blocks: statistics.median(readings) for blocks, readings in taken.items()}
        best = min(medians, key=medians.__getitem__)
        if medians[default] < _GAIN * medians[best]:
            best = default
        fields = self._hot.fields(best)
        return {
            "result": "winner",
            "table": self._hot.table,
            "family": self._context.card.family,
            "math_mode": math_mode(torch.bfloat16),
            "row": self._hot.row,
            "blocks": fields,
            "code": f"Blocks({', '.join(f'{name}={value}' for name, value in fields.items())})",
            "microseconds": medians[best],
            "before": self._hot.fields(default),
            "before_microseconds": medians[default],
        }

    def _microseconds(self, step: Callable[[], object]) -> float:
        return 1e6 * (self._seconds(step) - self._restoring)

    def _seconds(self, step: Callable[[], object]) -> float:
        calls = calls_a_reading(seconds(step, self._device), self._device)
        return seconds(step, self._device, calls)


def _results(arguments: Mapping[str, Any]) -> list[Tensor]:
    """What a launch leaves, to compare it by: of a number a tile, of which other blocks have others, the sum."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return [one.float().sum()[None] if one.dim() <= 1 else one.clone() for one in tensors]


unrolled_forward, unrolled_backward, cross_entropy, streaming_backward, streaming_forward = (
    one_part(one.name, lambda context, one=one: _Sweep(one, context).run()) for one in HOT
)
