"""Functions in the place of modules' `forward`, and layers that run one part at a time."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Patch:
    """A method of a handle in the place of a module's `forward`, with the signature of that one.

    An object, for a deep copy of the model then holds a copy of the handle that refers to the copied modules.
    """

    def __init__(self, module: nn.Module, answer: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = module.forward
        # Trainers look at the signature: for the columns of a data set, and whether a loss takes a number of items.
        self.__signature__ = inspect.signature(module.forward)
        self.names = [
            name
            for name, parameter in self.__signature__.parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        self.module, self._answer = module, answer
        self._own = "forward" in vars(module)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self, *args, **kwargs)

    def remove(self) -> None:
        # Where someone has wrapped this patch since, it stays, and passes on.
        if vars(self.module).get("forward") is not self:
            return
        if self._own:
            self.module.forward = self.original
        else:
            del self.module.forward


@contextlib.contextmanager
def patched(answers: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """In this block modules answer by these functions, which are given the `Patch` first; afterwards as before."""
    patches = [Patch(module, answer) for module, answer in answers.items()]
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.remove()


def state_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The state that a layer is given, its first argument."""
    return args[0] if args else next(iter(kwargs.values()))


class Segments:
    """The layers of a model, which run one part at a time.

    Nothing of the model is written anew: its own forward runs once a part, with layers that answer with the state they
    are given where they lie before or behind the part that is due. What lies around the layers (embeddings, positions,
    masks, the last norm, pooling, the head) is the model's own, and runs for every part.

    Attributes:
        due: the layers that run; None: all.
        states: those before the next part, `[B, tokens, d]` of each run of the part before: what the next one goes on
            from, all of them at once.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.due: range | None = None
        self.states: list[Tensor] = []
        self._tuples: dict[int, int] = {}  # how many entries a layer's output has, where it is a tuple
        self._answers = {layer: functools.partial(self._layer, depth) for depth, layer in enumerate(layers)}

    @contextlib.contextmanager
    def installed(self, answers: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
        """In this block the layers answer as the part that is due asks, and other modules by `answers`."""
        try:
            with patched({**self._answers, **answers}):
                yield
        finally:
            self.due = None
            self.states.clear()

    def _layer(self, depth: int, patch: Patch, *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer."""
        if self.due is None or depth in self.due:
            output = patch.original(*args, **kwargs)
            if isinstance(output, tuple):
                self._tuples[depth] = len(output)
            return output
        state = state_of(args, kwargs)
        if depth == self.due.start - 1:
            state = torch.cat(self.states, 1)
            self.states.clear()
        elif depth == self.due.stop:
            self.states.append(state)
        length = self._tuples.get(depth)
        return state if length is None else (state, *[None] * (length - 1))
