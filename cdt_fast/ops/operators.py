"""How an op enters torch: an autograd function in plain eager mode, else an operator of `torch.library`."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils._pytree import tree_map_only

from cdt_fast.checks import InputError
from cdt_fast.ops.common import is_plain_eager


def define(name: str, function: Callable[..., Any], fake: Callable[..., Any], schema: str | None = None) -> Any:
    """Define the operator `torch.ops.cdt_fast.<name>` with the shapes that `fake` makes of tensors without values. The
    schema is by default that of the annotations of `function`, which are strings; types may be written as there."""
    if schema is None:
        signature = inspect.signature(function)
        arguments = ", ".join(f"{parameter.annotation} {name}" for name, parameter in signature.parameters.items())
        schema = f"({arguments}) -> {signature.return_annotation}"
    for pattern, replacement in _SCHEMA_TYPES:
        schema = re.sub(pattern, replacement, schema)
    operator = torch.library.custom_op(f"cdt_fast::{name}", function, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


_SCHEMA_TYPES = (
    *((r"common\.\w+", "str"), (r"torch\.dtype", "ScalarType"), (r"\bint\b", "SymInt"), (r" \| None", "?")),
    *((r"list\[(\w+)\??\]", r"\1[]"), (r"tuple\[(.*)\]$", r"(\1)")),
)


def differentiable(
    name: str, forward: Any, fake: Any, setup_context: Any, backward: Any, schema: str | None = None
) -> Callable[..., Any]:
    """Make an op that can be differentiated once, a function of the arguments of `forward`: in plain eager mode an
    autograd function, else the operator `name` as in `define`. `backward` is called with at least one gradient, and
    returns those of the first inputs."""

    def prepare(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        setup_context(ctx, inputs, output)

    def whole_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        given = [grad for grad in grads if isinstance(grad, Tensor)]
        if any(_functorch.is_batchedtensor(grad) or _functorch.is_legacy_batchedtensor(grad) for grad in given):
            raise InputError(f"{name} takes no batch of gradients (vmap): use its formula, {name}_reference")
        missing = all(grad is None for grad in grads if not isinstance(grad, list))
        with torch.no_grad():
            found = () if missing else tuple(backward(ctx, *grads))
        others = ctx.needs_input_grad[len(found) :]
        found += tuple([None] * len(needs) if isinstance(needs, list) else None for needs in others)
        if not torch.is_grad_enabled():
            return found
        # Recorded for a second derivative, which is an error that names the op.
        sources = *grads, *ctx.saved_tensors
        return tree_map_only(Tensor, lambda gradient: _Once.apply(name, gradient, *sources), found)

    operator = define(name, forward, fake, schema)
    operator.register_autograd(whole_backward, setup_context=prepare)

    def direct_forward(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        prepare(ctx, inputs, output)
        return output

    # An autograd function sees no tensor in a list: it takes them one by one, and how many they are.
    def flat_forward(ctx: Any, lengths: Sequence[int | None], *flat: Any) -> Any:
        ctx.needs_input_grad = _nested(lengths, ctx.needs_input_grad[1:])
        output = direct_forward(ctx, *_nested(lengths, flat))
        return output if isinstance(output, Tensor) else tuple(_flat(output))

    def flat_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *_flat(whole_backward(ctx, *grads))

    lists = "Tensor[]" in str(operator._opoverload._schema)
    run, differentiate = (flat_forward, flat_backward) if lists else (direct_forward, whole_backward)
    methods = {"forward": staticmethod(run), "backward": staticmethod(differentiate)}
    direct: Any = type(name, (torch.autograd.Function,), methods)

    def call(*arguments: Any) -> Any:
        tensors = _tensors_in(arguments)
        if not is_plain_eager(*tensors):
            return operator(*arguments)
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return forward(*arguments)
        if not lists:
            return direct.apply(*arguments)
        return direct.apply([len(one) if isinstance(one, list) else None for one in arguments], *_flat(arguments))

    return call


def gradients_of(op: str, like: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Callable[..., Any]]:
    """Decorate what returns the gradients of an op, one for each input; `needs`, its last argument, says which count.
    Except in plain eager mode it is the operator `<op>_backward`, whose results have the shapes and dtypes of `like`.
    """

    def decorate(function: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
        @functools.wraps(function)
        def needed(*arguments: Any) -> list[Tensor]:
            return compress(function(*arguments), arguments[-1])

        def fake(*arguments: Any) -> list[Tensor]:
            return [tensor.new_empty(tensor.shape) for tensor in compress(like(*arguments), arguments[-1])]

        operator = define(f"{op}_backward", needed, fake)

        def call(*arguments: Any) -> list[Tensor | None]:
            run = needed if is_plain_eager(*_tensors_in(arguments)) else operator
            return scatter(run(*arguments), arguments[-1])

        return call

    return decorate


def _flat(values: Sequence[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, list) else (value,))]


def _nested(lengths: Sequence[int | None], values: Sequence[Any]) -> list[Any]:
    """Undo `_flat`; a length is None for what was no list."""
    found = iter(values)
    return [next(found) if length is None else [next(found) for _ in range(length)] for length in lengths]


def _tensors_in(arguments: Sequence[Any]) -> list[Tensor]:
    return [one for one in _flat(arguments) if isinstance(one, Tensor)]


class _Once(torch.autograd.Function):
    """A gradient that depends on its sources, and has no derivative."""

    @staticmethod
    def forward(ctx: Any, op: str, gradient: Tensor, *sources: Any) -> Tensor:
        ctx.op = op
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InputError(f"{ctx.op} can be differentiated once; for a second derivative use its reference formula")


def compress(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    """Return the gradients that are needed, as an operator does."""
    return [gradient for gradient, need in zip(gradients, needs, strict=True) if need and gradient is not None]


def scatter(gradients: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Undo `compress`: None where no gradient is needed."""
    found = iter(gradients)
    return [next(found) if need else None for need in needs]
