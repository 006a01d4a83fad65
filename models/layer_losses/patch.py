"""A function in the place of a module's `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


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
