"""A classifier of transformers run from one exit to the next, on the rows that have not left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models.early_exit import EarlyAnswers, leave_early
from cdt_fast.models.layer_losses.first_forward import excess_over_rounding, explained, without_dropout
from cdt_fast.models.layer_losses.parts import CLASSIFIER, ModelParts, unsupported
from cdt_fast.models.layer_losses.patch import Patch, Segments

_CHECKED_ROWS = 2


class SegmentedClassifier(Segments):
    """The layers of a classifier in segments, from one depth that is read to the next.

    Args:
        parts: of the model.
        taps: the depths that are read.
        replaced: `(base's output, inputs)` to that output as inner depths are read, where they are read otherwise than
            the last.
        depth_logits: the logits at each of `taps`, all in one forward, which the segments are checked against.

    Raises:
        InputError: no classifier, or the last depth is not read.
    """

    def __init__(
        self,
        parts: ModelParts,
        taps: Sequence[int],
        replaced: Callable[[Any, dict[str, Any]], Any] | None,
        depth_logits: Callable[..., list[Tensor]],
    ) -> None:
        if parts.kind != CLASSIFIER:
            raise InputError(
                f"classify needs a classifier, got a {type(parts.model).__name__}: a language model leaves early in "
                "generate, with confident_decoder"
            )
        if taps[-1] != len(parts.layers):
            raise InputError(
                f"classify reads the last depth, {len(parts.layers)}, and the losses are attached at "
                f"{', '.join(map(str, taps))}: add it to taps"
            )
        super().__init__(parts.layers)
        self._parts, self._taps, self._replaced, self._depth_logits = parts, taps, replaced, depth_logits
        self._checked = False
        self._inputs: dict[str, Any] = {}

    @torch.no_grad()
    def classify(self, inputs: dict[str, Any], threshold: float) -> EarlyAnswers:
        """See `LayerLosses.classify`."""
        rows = _rows(inputs)
        self._inputs = {**inputs, "return_dict": True}
        answers = {} if self._replaced is None else {self._parts.base: self._base}
        try:
            with without_dropout(self._parts.model), self.installed(answers):
                if not self._checked:
                    self._check(rows)
                return leave_early(self._taps, threshold, self._read)
        finally:
            self._inputs = {}

    def _read(self, depth: int, kept: Tensor | None) -> Tensor:
        """The logits `[rows, classes]` at `depth` of the rows `kept`, from the depth before."""
        if kept is not None:
            self._inputs = _of_rows(self._inputs, kept)
            self.states = [state[kept] for state in self.states]
        first = 0 if self.due is None else self.due.stop
        if not first:
            self.states.clear()  # the first layer goes on from its own input
        self.due = range(first, depth)
        return self._parts.model(**self._inputs).logits

    def _check(self, rows: int) -> None:
        """Require the segments to be the model, on a few rows.

        Raises:
            InputError: they are not.
        """
        whole = self._inputs
        self._inputs = _of_rows(whole, torch.arange(rows) < _CHECKED_ROWS)
        try:
            with explained(unsupported, self._parts.model, "its layers cannot be run one part at a time"):
                expected = self._depth_logits(**self._inputs)
                logits = [self._read(depth, None) for depth in self._taps]
        finally:
            self.due = None
            self._inputs = whole
        for depth, found, known in zip(self._taps, logits, expected, strict=True):
            excess = excess_over_rounding(found, known)
            if excess is not None:
                raise unsupported(
                    self._parts.model,
                    f"run one part at a time, its logits at depth {depth} differ by {excess[0]:.3g} from those of one "
                    f"forward, where the largest is {excess[1]:.3g}: it computes something between its layers that is "
                    "not known here",
                )
        self._checked = True

    def _base(self, patch: Patch, *args: Any, **kwargs: Any) -> Any:
        """The forward of the base model."""
        output = patch.original(*args, **kwargs)
        inner = self.due is not None and self.due.stop < len(self._parts.layers)
        return self._replaced(output, self._inputs) if inner and self._replaced is not None else output


def _rows(inputs: dict[str, Any]) -> int:
    first = next((value for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 1), None)
    if first is None or not len(first):
        raise InputError(
            f"classify needs the inputs of at least one row, as the model's forward takes, got {list(inputs)}"
        )
    return len(first)


def _of_rows(inputs: dict[str, Any], kept: Tensor) -> dict[str, Any]:
    """The inputs of some rows, `kept` `[rows]` bool."""

    def chosen(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != len(kept):
            return value
        return value[kept.to(value.device)]

    return {name: chosen(value) for name, value in inputs.items()}
