"""Functions in the place of modules' `forward`."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

from torch import nn


class Patch:
    """A method of a handle in the place of a module's `forward`, with the signature of that one.

    What stands there is a method of the module, for accelerate takes such a one apart and binds its function again, and
    a deep copy of the model binds it to the copy. It finds this object, of which that copy holds a copy, in the module.
    """

    def __init__(self, module: nn.Module, answer: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = module.forward
        signature = inspect.signature(module.forward)
        self.names = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        self.module, self._answer = module, answer
        self._own = "forward" in vars(module)
        numbers = itertools.count()
        self._name = next(name for name in map("_cdt_fast_forward_{}".format, numbers) if name not in vars(module))
        setattr(module, self._name, self)
        self._method = module.forward = MethodType(_forward_of(self._name, signature), module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self, *args, **kwargs)

    def remove(self) -> None:
        # Where someone has wrapped this patch since, it stays, and passes on.
        if vars(self.module).get("forward") != self._method:
            return
        delattr(self.module, self._name)
        if self._own:
            self.module.forward = self.original
        else:
            del self.module.forward


def _forward_of(name: str, signature: inspect.Signature) -> Any:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # accelerate binds what it finds when it unwraps a model, and this again where it was put around its own.
        return getattr(module, name)(*(args[1:] if args and args[0] is module else args), **kwargs)

    # Trainers look at it: for the columns of a data set, and whether a loss takes a number of items.
    of_module = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[of_module, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward


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
