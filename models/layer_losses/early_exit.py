"""A classifier of transformers run from one exit to the next, on the rows that have not left.

Nothing of the model is written anew: its own forward runs once an exit, with layers that answer with the state they are
given where they lie before or behind the part that is due. What lies around the layers (embeddings, masks, the last
norm, pooling, the head) is the model's own, and runs for every exit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models.early_exit import EarlyAnswers, leave_early
from cdt_fast.models.layer_losses.first_forward import rounding_of, without_dropout
from cdt_fast.models.layer_losses.parts import CLASSIFIER, ModelParts, unsupported
from cdt_fast.models.layer_losses.patch import Patch

_CHECKED_ROWS = 2


class SegmentedClassifier:
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
        self._parts, self._taps, self._replaced, self._depth_logits = parts, taps, replaced, depth_logits
        self._checked = False
        self._tuples: dict[int, int] = {}  # how many entries a layer's output has, where it is a tuple
        self._segment: range | None = None  # None: all layers run
        self._state: Tensor | None = None
        self._inputs: dict[str, Any] = {}

    @torch.no_grad()
    def classify(self, inputs: dict[str, Any], threshold: float) -> EarlyAnswers:
        """See `LayerLosses.classify`."""
        rows = _rows(inputs)
        self._inputs = {**inputs, "return_dict": True}
        with without_dropout(self._parts.model), self._installed():
            if not self._checked:
                self._check(rows)
            return leave_early(self._taps, threshold, self._read)

    def _read(self, depth: int, kept: Tensor | None) -> Tensor:
        """The logits `[rows, classes]` at `depth` of the rows `kept`, from the depth before."""
        if kept is not None:
            self._inputs = _of_rows(self._inputs, kept)
            self._state = None if self._state is None else self._state[kept]
        first = 0 if self._segment is None else self._segment.stop
        self._segment = range(first, depth)
        return self._parts.model(**self._inputs).logits

    def _check(self, rows: int) -> None:
        """Require the segments to be the model, on a few rows.

        Raises:
            InputError: they are not.
        """
        whole = self._inputs
        self._inputs = _of_rows(whole, torch.arange(rows) < _CHECKED_ROWS)
        try:
            expected = self._depth_logits(**self._inputs)
            logits = [self._read(depth, None) for depth in self._taps]
        except InputError:
            raise
        except Exception as error:  # any: the code is not ours
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise unsupported(self._parts.model, f"its layers cannot be run one part at a time ({reason})") from error
        finally:
            self._segment = self._state = None
            self._inputs = whole
        for depth, found, known in zip(self._taps, logits, expected, strict=True):
            difference, size = ((x.double().abs().max().item()) for x in (found - known, known))
            # Not (a > b) rather than a <= b: of a model that diverged NaN is not the fault of its structure.
            if difference > 16 * rounding_of(known) * size:
                raise unsupported(
                    self._parts.model,
                    f"run one part at a time, its logits at depth {depth} differ by {difference:.3g} from those of one "
                    f"forward, where the largest is {size:.3g}: it computes something between its layers that is not "
                    "known here",
                )
        self._checked = True

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        layers = enumerate(self._parts.layers)
        patches = [Patch(layer, functools.partial(self._layer, depth)) for depth, layer in layers]
        if self._replaced is not None:
            patches.append(Patch(self._parts.base, self._base))
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.remove()
            self._segment = self._state = None
            self._inputs = {}

    def _layer(self, depth: int, patch: Patch, *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer."""
        if self._segment is None or depth in self._segment:
            output = patch.original(*args, **kwargs)
            if isinstance(output, tuple):
                self._tuples[depth] = len(output)
            return output
        state = args[0] if args else next(iter(kwargs.values()))
        if depth == self._segment.start - 1:
            state = self._state
        elif depth == self._segment.stop:
            self._state = state
        length = self._tuples.get(depth)
        return state if length is None else (state, *[None] * (length - 1))

    def _base(self, patch: Patch, *args: Any, **kwargs: Any) -> Any:
        """The forward of the base model."""
        output = patch.original(*args, **kwargs)
        inner = self._segment is not None and self._segment.stop < len(self._parts.layers)
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
