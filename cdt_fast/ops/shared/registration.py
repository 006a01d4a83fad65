"""How a function of one record of arguments becomes an operator of torch, with a gradient.

torch.library takes tensors, numbers and words, in a row. An op's arguments are one frozen dataclass of these, from the
public function to the launcher of its kernel: `Operator` alone takes it apart and puts it together again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from cdt_fast.errors import InputError
from cdt_fast.kernels.launch import KernelError
from cdt_fast.ops.shared.backend import give_up
from cdt_fast.ops.shared.checks import inside_transform, is_transformed, without_autocast

Arguments = TypeVar("Arguments")
Output = TypeVar("Output")
Record = TypeVar("Record")

_LIBRARY = torch.library.Library("cdt_fast", "FRAGMENT")
_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    list[Tensor]: "Tensor[]",
    list[bool]: "bool[]",
    float: "float",
    int: "SymInt",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}

_PLAIN = (Tensor, torch.nn.Parameter)

# By name, for tests that change what an operator does.
OPERATORS: dict[str, Operator[Any, Any]] = {}


class Operator(Generic[Arguments, Output]):
    """The operator `torch.ops.cdt_fast.<name>`, called with its record.

    Where nobody but autograd looks on (no compiler, no dispatch mode, no function transform, no subclass of Tensor) the
    dispatcher is left out: it takes several times as long as the rest of a call. Inside a function transform, and in
    forward mode, the formula takes the operator's place: torch differentiates it in every mode.

    Args:
        name: of the operator.
        arguments: the type of its record: a dataclass of tensors, lists of tensors, numbers, words and dtypes.
        returns: what it returns, in the spelling of torch.library.
        forward: computes it, outside of autocast; every result is in memory of its own.
        fake: makes tensors of the same shapes, dtypes and strides, from tensors without values.
        setup_context: is called with the context, the record and the results, and keeps what the gradient needs, by
            `save`; in `ctx.needs` it finds by name which tensors require a gradient.
        autograd: is called with the context and the gradients of the results, of which any may be None, but not all;
            returns those of the tensors that require one, in a row. None for what is a gradient itself: a second
            derivative is refused by the name of the op, where torch's error would ask the user to register a formula.
        formula: the same results from torch's own differentiable functions; without one transforms are refused.
    """

    def __init__(
        self,
        name: str,
        arguments: Callable[..., Arguments],
        returns: str,
        forward: Callable[[Arguments], Output],
        fake: Callable[[Arguments], Output],
        setup_context: Callable[[Any, Arguments, Output], None] | None = None,
        autograd: Callable[..., Iterable[Tensor | None]] | None = None,
        formula: Callable[[Arguments], Output] | None = None,
    ) -> None:
        self.name, self.fake = name, fake
        self._op = name.removesuffix("_backward").removesuffix("_scale")
        self._arguments, self._setup, self._autograd = arguments, setup_context, autograd
        hints = get_type_hints(arguments)
        types = {field.name: _schema_type(hints[field.name]) for field in dataclasses.fields(arguments)}  # type: ignore[arg-type]
        self._names = tuple(types)
        self._tensors = tuple(field for field, kind in types.items() if kind.startswith("Tensor"))
        # A backward that is called inside autocast would have some of its products cast, and sums of two dtypes fail.
        of_device = next(field for field, kind in types.items() if kind == "Tensor")
        self.forward = _outside_autocast(forward, of_device)
        self.formula = None if formula is None else _outside_autocast(formula, of_device)
        _LIBRARY.define(f"{name}({', '.join(f'{kind} {field}' for field, kind in types.items())}) -> {returns}")
        _LIBRARY.impl(name, lambda *flat: self.forward(self.whole(flat)), "CompositeExplicitAutograd")
        qualified = f"cdt_fast::{name}"
        torch.library.register_fake(qualified, lambda *flat: self.fake(self.whole(flat)), lib=_LIBRARY)
        torch.library.register_autograd(
            qualified,
            lambda ctx, *grads: tuple(map(self.gradients(ctx, grads).get, self._names)),
            setup_context=lambda ctx, inputs, output: self.setup_context(ctx, self.whole(inputs), output),
            lib=_LIBRARY,
        )
        self.overload = getattr(torch.ops.cdt_fast, name).default
        self._returns_tuple = returns.startswith("(")
        OPERATORS[name] = self

    def __call__(self, arguments: Arguments) -> Output:
        if torch.compiler.is_compiling():
            return self._transformed(arguments) if inside_transform() else self.overload(*self.flat(arguments))
        tensors = _flat([getattr(arguments, name) for name in self._tensors])
        if inside_transform() and any(map(is_transformed, tensors)):
            return self._transformed(arguments)
        if not _nobody_looks_on(tensors):
            return self.overload(*self.flat(arguments))
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return self.computed(arguments)[1]
        counts: list[int | None] = []
        results = _grouped(_Direct.apply(self, arguments, counts, *tensors), counts)  # type: ignore[arg-type]
        return tuple(results) if self._returns_tuple else results[0]  # type: ignore[return-value]

    def _transformed(self, arguments: Arguments) -> Output:
        """The results by the formula: an operator would have no tangent, and torch would take it for zero."""
        if self.formula is None:
            raise InputError(
                f"{self._op} has no derivative in forward mode or inside a transform of torch.func: differentiate it "
                f"by autograd (loss.backward()), or use its formula, {self._op}_reference"
            )
        return self.formula(arguments)

    def computed(self, arguments: Arguments) -> tuple[Arguments, Output]:
        """What was computed, and from which record: by plain torch where a kernel does not run on the card.

        Not where torch.compile or a dispatch mode looks on, which have been told what the kernels return.
        """
        try:
            return arguments, self.forward(arguments)
        except KernelError as error:
            on_triton = getattr(arguments, "backend", "torch") == "triton"
            if not on_triton or not give_up(self._op, error):
                raise
        arguments = changed(arguments, backend="torch")
        return arguments, self.forward(arguments)

    def flat(self, arguments: Arguments) -> tuple[Any, ...]:
        """The fields of the record in a row, as `overload` takes them."""
        return tuple([getattr(arguments, name) for name in self._names])

    def setup_context(self, ctx: Any, arguments: Arguments, output: Output) -> None:
        """Keep what the gradient needs."""
        ctx.set_materialize_grads(False)
        ctx.needs = {name: _requires_grad(getattr(arguments, name)) for name in self._tensors}
        if self._setup is not None:
            self._setup(ctx, arguments, output)

    def gradients(self, ctx: Any, grads: Iterable[Any]) -> dict[str, Any]:
        """The gradients of all tensors, by name: None where there is none, of a list of tensors a list."""
        if self._autograd is None:
            raise InputError(
                f"{self._op} can be differentiated once; for a second derivative use its reference formula"
            )
        grads = tuple(grads)
        arrived = any(grad is not None for grad in _flat(grads))
        found: Iterator[Tensor | None] = iter(self._autograd(ctx, *grads)) if arrived else itertools.repeat(None)
        gradients: dict[str, Any] = {}
        for name, needs in ctx.needs.items():
            if isinstance(needs, list):
                gradients[name] = [next(found) if need else None for need in needs]
            else:
                gradients[name] = next(found) if needs else None
        return gradients

    def whole(self, flat: Iterable[Any]) -> Arguments:
        """The counterpart of `flat`."""
        return self._arguments(**dict(zip(self._names, flat, strict=True)))


class _Direct(torch.autograd.Function):
    """An operator without the dispatcher; autograd sees the tensors of its record beside it, in a row."""

    @staticmethod
    def forward(
        ctx: Any, operator: Operator[Any, Any], arguments: Any, counts: list[int | None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        arguments, output = operator.computed(arguments)
        operator.setup_context(ctx, arguments, output)
        outputs = output if isinstance(output, tuple) else (output,)
        counts += [len(value) if isinstance(value, list) else None for value in outputs]
        ctx.operator, ctx.counts = operator, counts
        return tuple(_flat(outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = ctx.operator.gradients(ctx, _grouped(grads, ctx.counts))
        of_tensors: list[Tensor | None] = []
        for name, needs in ctx.needs.items():
            if needs is not None:
                of_tensors.extend(gradients[name] if isinstance(needs, list) else [gradients[name]])
        return None, None, None, *of_tensors


def changed(record: Record, **fields: Any) -> Record:
    """`dataclasses.replace` of a record without a `__post_init__`, at a tenth of its cost."""
    copy = object.__new__(type(record))
    vars(copy).update(vars(record), **fields)
    return copy


def save(ctx: Any, **values: Any) -> None:
    """Keep values for the gradient, by name: tensors, lists of tensors, and anything else."""
    names: dict[str, int | None] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            names[name] = None
        elif isinstance(value, list) and all(isinstance(entry, Tensor) for entry in value):
            names[name] = len(value)
    ctx.save_for_backward(*_flat(values[name] for name in names))
    ctx.saved_counts, ctx.saved_values = names, {name: value for name, value in values.items() if name not in names}


def saved(ctx: Any) -> dict[str, Any]:
    """What `save` has kept."""
    tensors = _grouped(ctx.saved_tensors, list(ctx.saved_counts.values()))
    return {**ctx.saved_values, **dict(zip(ctx.saved_counts, tensors, strict=True))}


def by_formula(formula: Callable[..., Tensor], *tensors: Tensor | None, **options: Any) -> Tensor:
    """`formula(*tensors, **options)` in at least float32, of tensors that are rounded to the dtype of the first."""
    assert tensors[0] is not None
    dtype = tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    return formula(*(tensor if tensor is None else tensor.to(dtype).to(wide) for tensor in tensors), **options).to(
        dtype
    )


def _outside_autocast(function: Callable[[Arguments], Output], name: str) -> Callable[[Arguments], Output]:
    """The function of a record, with autocast off for the device of that tensor of it."""

    def call(arguments: Arguments) -> Output:
        with without_autocast(getattr(arguments, name)):
            return function(arguments)

    return call


def _schema_type(hint: Any) -> str:
    """A type of a record's field in the spelling of torch.library."""
    if get_origin(hint) is Literal:
        return "str"
    if NoneType in get_args(hint):
        return _TYPES[next(kind for kind in get_args(hint) if kind is not NoneType)] + "?"
    return _TYPES[hint]


def _nobody_looks_on(tensors: list[Tensor]) -> bool:
    """Whether plain tensors with values meet no dispatch mode and no function transform."""
    return (
        not torch._C._len_torch_dispatch_stack()
        and _functorch.peek_interpreter_stack() is None
        and all(type(tensor) in _PLAIN and not tensor.is_meta for tensor in tensors)
    )


def _requires_grad(value: Any) -> bool | list[bool] | None:
    if isinstance(value, Tensor):
        return value.requires_grad
    return None if value is None else [tensor.requires_grad for tensor in value]


def _flat(values: Iterable[Any]) -> list[Tensor]:
    """Tensors and lists of tensors in a row, without those that are None."""
    flat: list[Tensor] = []
    for value in values:
        if isinstance(value, list):
            flat.extend(value)
        elif value is not None:
            flat.append(value)
    return flat


def _grouped(flat: Iterable[Any], counts: list[int | None]) -> list[Any]:
    """The counterpart of `_flat`: a tensor for None, for a number a list of so many."""
    tensors = iter(flat)
    return [next(tensors) if count is None else [next(tensors) for _ in range(count)] for count in counts]
