"""A function in the place of a module's `forward`: until it is removed, or for the length of a block."""

import contextlib
import copy
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Self

import torch
from torch import nn

from cdt_fast.checks import InputError


class WrappedForward:
    """A function that stands in the place of a module's `forward`, with the same signature, until `remove`. The new
    forward is a method of the module, and finds this object in the module: accelerate takes the method apart and binds
    its function again, and a deep copy of the module binds it to the copy, which holds a copy of this object."""

    def __init__(self, module: nn.Module, answer: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = module.forward
        signature = inspect.signature(module.forward)
        by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.names = [name for name, parameter in signature.parameters.items() if parameter.kind is by_position]
        self.answer, self._module, self.lock = answer, module, threading.RLock()
        self._own = "forward" in vars(module)
        numbered = map("_cdt_fast_forward_{}".format, itertools.count())
        self._name = next(name for name in numbered if name not in vars(module))
        setattr(module, self._name, self)
        self._method = module.forward = MethodType(_forward_of(self._name, signature), module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = copied = type(self).__new__(type(self))
        memo[id(self.lock)] = threading.RLock()
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle names a method, and so would bring back the forward of the class, silently.
        raise InputError(
            "a model with layer losses cannot be pickled: save its state_dict, call remove() first, and give spawned "
            "workers what does not hold it"
        )

    def remove(self) -> None:
        """Restore the forward; if another one has been put around this one since, it stays and passes calls on."""
        self.answer = self.original
        if vars(self._module).get("forward") == self._method:
            delattr(self._module, self._name)
            del self._module.forward
            if self._own:
                self._module.forward = self.original
        for part in self._module.modules():  # a compiled forward has put the method of its class there
            if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
                del part.forward


def _forward_of(name: str, signature: inspect.Signature) -> Any:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # accelerate binds what it finds when it unwraps a model, and this again where it was put around its own.
        wrapped, args = getattr(module, name), args[1:] if args and args[0] is module else args
        # A forward replaces those of the head and the base model: another thread has to wait.
        with contextlib.nullcontext() if torch.compiler.is_compiling() else wrapped.lock:
            return wrapped.answer(*args, **kwargs)

    # Trainers read the signature: for the columns of a data set, and whether a loss takes a number of items.
    first = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward


@contextlib.contextmanager
def replaced_forward(module: nn.Module, answer: Callable[..., Any]) -> Iterator[None]:
    """Make a call of `module` run its hooks and `answer` in this block. What `answer` closes over must be there when
    the block begins: the compiler of torch 2.15 reads it then."""
    own, forward = "forward" in vars(module), module.forward
    module.forward = answer
    try:
        yield
    finally:
        module.forward = forward
        if not own and not torch.compiler.is_compiling():  # a compiled graph cannot look past a deleted attribute
            del module.forward
