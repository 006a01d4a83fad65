"""Stand-ins for CUDA graphs on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdt_fast.training.cuda_graph import CudaGraphs

Result = TypeVar("Result")


class EagerGraphs(CudaGraphs):
    """Calls the function anew in place of a replay, and notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, work: Callable[[], Result]) -> Result:
        self.asked.append("eager")
        return work()

    def capture(self, work: Callable[[], Result]) -> Callable[[], Result]:
        self.asked.append("capture")

        def replay() -> Result:
            self.asked.append("replay")
            return work()

        return replay


class _Tape(TorchDispatchMode):
    """Does every operation and notes it with the very tensors it was done on."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def play(self) -> None:
        for function, args, kwargs, noted in self.operations:
            returns = function._schema.returns
            if returns and all(entry.alias_info is not None and not entry.alias_info.is_write for entry in returns):
                continue  # a view looks at memory that is there already
            result = function(*args, **kwargs)
            if function._schema.is_mutable:
                continue
            for old, new in zip(tree_leaves(noted), tree_leaves(result), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)
                elif isinstance(old, bool | int | float) and old != new:
                    raise AssertionError(f"{function} read {old} at the capture and {new} at a replay")


class TapeGraphs(EagerGraphs):
    """Records the operations of a call and replays them on the same tensors, as a CUDA graph does; no Python runs.

    Numbers that the host handed over at the capture stay what they were, so that a step which counts or decides on
    the host shows. The capture itself does the work here, so that the first replay has nothing left to do.
    """

    def capture(self, work: Callable[[], Result]) -> Callable[[], Result]:
        self.asked.append("capture")
        tape = _Tape()
        with tape:
            result = work()
        done = iter([True])

        def replay() -> Result:
            self.asked.append("replay")
            if not next(done, False):
                tape.play()
            return result

        return replay
