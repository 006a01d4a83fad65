"""Functions in the place of modules' `forward`: for good, or for a block."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn


class WrappedForward:
    """A function in the place of a module's `forward`, with the signature of that one, until `remove`.

    What stands there is a method of the module: accelerate takes such a one apart and binds its function again, and a
    deep copy of the model binds it to the copy. It finds this object, of which that copy holds a copy, in the module.

    Attributes:
        original: the module's `forward` before.
        names: its arguments that can be given by position.
    """

    def __init__(self, module: nn.Module, answer: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = module.forward
        signature = inspect.signature(module.forward)
        by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.names = [name for name, parameter in signature.parameters.items() if parameter.kind is by_position]
        self.answer, self._module = answer, module
        self._own = "forward" in vars(module)
        numbered = map("_cdt_fast_forward_{}".format, itertools.count())
        self._name = next(name for name in numbered if name not in vars(module))
        setattr(module, self._name, self)
        self._method = module.forward = MethodType(_forward_of(self._name, signature), module)

    def remove(self) -> None:
        """Restore the forward; where another has been put around this one since, it stays, and passes on."""
        self.answer = self.original
        if vars(self._module).get("forward") == self._method:
            delattr(self._module, self._name)
            if self._own:
                self._module.forward = self.original
            else:
                del self._module.forward


def _forward_of(name: str, signature: inspect.Signature) -> Any:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # accelerate binds what it finds when it unwraps a model, and this again where it was put around its own.
        return getattr(module, name).answer(*(args[1:] if args and args[0] is module else args), **kwargs)

    # Trainers look at it: for the columns of a data set, and whether a loss takes a number of items.
    of_module = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[of_module, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward


@contextlib.contextmanager
def answering(module: nn.Module, answer: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """In this block a call of `module` runs its hooks and `answer`, not its own forward, which is what is yielded."""
    own, forward = "forward" in vars(module), module.forward
    module.forward = answer
    try:
        yield forward
    finally:
        module.forward = forward
        if not own and not torch.compiler.is_compiling():  # a compiled graph cannot look past a deleted attribute
            del module.forward


def state_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The state that a layer is given, its first argument."""
    return args[0] if args else next(iter(kwargs.values()))
