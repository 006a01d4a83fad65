"""Every op in plain torch against its formula, and in all that torch asks of an operator."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from cdt_fast import ops
from cdt_fast.checks import InputError
from tests.ops.battery import (
    DEPTHS,
    EXTRAS,
    LAYOUTS,
    LOSSES,
    LOW_DTYPES,
    NAMES,
    OF_SAMPLES,
    OPERATORS,
    OPTIONS,
    PADDED,
    VARIANTS,
    Case,
    Noted,
    assert_a_nan_shows_in_its_sample,
    assert_as_precise_as_torch,
    assert_close,
    assert_equal,
    assert_frozen_tensors_change_nothing,
    assert_padding_reaches_nothing,
    assert_repeats,
    build,
    call,
    differentiate,
    formula,
    leaf,
    leaves_of,
    normal,
    results,
    variant,
)

EVERY = pytest.mark.parametrize("name", VARIANTS)
EVERY_OPERATOR = pytest.mark.parametrize("name", OPERATORS)


@st.composite
def cases(draw: st.DrawFn, op: str) -> Case:
    """Sizes may be zero where the op has a result then; every subset of the extras."""
    least = int(op in LOSSES)
    sizes = st.integers(least, 5)
    return build(
        op,
        *(name for name in EXTRAS[op] if draw(st.booleans())),
        seed=draw(st.integers(0, 10_000)),
        leading=tuple(draw(st.lists(st.integers(least, 3), max_size=2))),
        tokens=draw(sizes),
        width=draw(st.integers(0, 5)),
        atoms=draw(sizes),
        **{name: draw(st.sampled_from(values)) for name, values in OPTIONS[op].items()},
    )


@pytest.mark.parametrize("op", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_is_its_formula_with_every_gradient(op: str, data: st.DataObject) -> None:
    case = data.draw(cases(op))
    layouts = {name: data.draw(st.sampled_from(LAYOUTS)) for name in case.tensors}
    upstream = data.draw(st.sampled_from([*LAYOUTS, "stride 0"]))
    skip = data.draw(st.sampled_from([None, 0, 1])) if op == "unrolled_layer" else None
    found = []
    for function in (call, formula, lambda case, leaves: formula(case, leaves, written=True)):
        leaves = {name: leaf(tensor, layouts[name]) for name, tensor in case.tensors.items()}
        outputs = function(case, leaves)
        found.append([*outputs, *differentiate(outputs, list(leaves.values()), upstream, skip)])
    assert_close(found[0], found[1])
    assert_close(found[0], found[2])


# With a threshold rounding moves codes across it: few of them. Without one the sums are longer.
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [*((dtype, False) for dtype in LOW_DTYPES), (torch.bfloat16, True), (torch.float16, True)]
)
@EVERY
def test_as_precise_as_plain_torch(name: str, dtype: torch.dtype, autocast: bool, large: bool) -> None:
    op, extras, options = VARIANTS[name]
    sizes = {"tokens": 5, "width": 6, "atoms": 8}
    if large:
        sizes = {"tokens": 20, "width": 40, "atoms": 60}
        options = {
            **options,
            **({"threshold": 0.0, "nonlinearity": "soft_threshold"} if "nonlinearity" in OPTIONS[op] else {}),
        }
    drawn = (build(op, *extras, seed=seed, **sizes, **options) for seed in itertools.count())
    assert_as_precise_as_torch(drawn, dtype, autocast=autocast, draws=4 if large else 8)


# Padding, and samples that are not finite


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", PADDED)
def test_what_stands_in_the_padding_reaches_nothing(name: str, poison: float) -> None:
    assert_padding_reaches_nothing(name, poison, torch.float64)


@pytest.mark.parametrize("name", ["layerwise_cross_entropy", "layerwise_cross_entropy with all"])
def test_ignored_tokens_take_no_part(name: str) -> None:
    case = variant(name, leading=(2,), tokens=6)
    targets, shift = case.options["targets"], case.options["shift"]
    expected = results(case)
    for depth, each in zip(DEPTHS, [targets] * 3 if isinstance(targets, Tensor) else targets, strict=True):
        each = torch.nn.functional.pad(each[..., shift:], (0, shift), value=-100)
        case.tensors[depth][each == -100] = float("nan")
    assert_equal(results(case), expected)


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_a_sample_that_is_not_finite_changes_no_other(name: str) -> None:
    assert_a_nan_shows_in_its_sample(name, torch.float64)


# What torch asks of an operator


@EVERY_OPERATOR
def test_opcheck(name: str) -> None:
    case = variant(name)
    leaves = leaves_of(case)
    with Noted() as noted:
        differentiate(call(case, leaves), list(leaves.values()))
    calls: list[Any] = noted.calls
    (forward, *arguments), *backward = calls
    assert forward._opname == case.op
    torch.library.opcheck(forward, *arguments)
    # With weights, the forward of the cross-entropy has found the gradients already.
    assert backward or (case.op == "layerwise_cross_entropy" and "depth_weights" in case.tensors)
    for one in backward:
        torch.library.opcheck(*one, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dynamic", [False, True])
@EVERY
def test_compiles_without_a_graph_break(name: str, dynamic: bool) -> None:
    def network(case: Case, leaves: dict[str, Tensor]) -> list[Tensor]:
        found = call(case, {name: 2 * leaf for name, leaf in leaves.items()})
        return [output for output in found if output.requires_grad]

    torch._dynamo.reset()
    counter, counts = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(network, fullgraph=True, dynamic=dynamic, backend=counter)
    for tokens, batch in ((7, 8), (3, 9), (5, 10)):  # first no other sizes, for which one symbol would stand
        case, found = variant(name, tokens=tokens, leading=(batch,)), []
        for function in (network, compiled):
            leaves = leaves_of(case)
            for tensor in tree_leaves((leaves, case.options)) if dynamic else ():
                if isinstance(tensor, Tensor) and tensor.shape[:1] == (batch,):
                    torch._dynamo.mark_dynamic(tensor, 0)
            outputs = function(case, leaves)
            found.append([*outputs, *differentiate(outputs, list(leaves.values()))])
        assert_close(*found)
        counts.add(counter.frame_count)
    assert not dynamic or len(counts) == 1


@pytest.mark.parametrize("trained", [False, True])
@EVERY
def test_exports_with_a_batch_of_any_size(name: str, trained: bool) -> None:
    class Network(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
            return call(Case(op, {}, options), tensors)

    op, batch = VARIANTS[name][0], torch.export.Dim("batch", min=2, max=4096)
    given = []
    for size in (7, 9):
        case = variant(name, leading=(size,))
        given.append((leaves_of(case) if trained else case.tensors, case.options))
    shapes = tree_map(lambda one: {0: batch} if isinstance(one, Tensor) and one.shape[:1] == (7,) else None, given[0])
    exported = torch.export.export(Network(), given[0], dynamic_shapes=shapes, strict=False).module()
    for tensors, options in given:
        assert_close(exported(tensors, options), call(Case(op, {}, options), tensors), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
@EVERY
def test_repeats_are_bitwise_equal(name: str, dtype: torch.dtype) -> None:
    assert_repeats(name, dtype)


@EVERY
def test_frozen_tensors_get_no_gradient_and_change_no_other(name: str) -> None:
    assert_frozen_tensors_change_nothing(name, torch.float64)


@EVERY_OPERATOR
def test_no_upstream_gradient_is_no_gradient(name: str) -> None:
    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, _: Tensor) -> None:
            return None

    case = variant(name)
    leaves = leaves_of(case)
    Drop.apply(call(case, leaves)[0]).sum().backward()
    assert all(leaf.grad is None for leaf in leaves.values())


@EVERY
def test_modes_of_torch_change_nothing(name: str) -> None:
    """No gradient recorded, inference, a dispatch mode, checkpointing, and a backward inside of autocast."""
    case = variant(name).to(torch.float32)
    expected = results(case)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = call(case, leaves_of(case))
        assert not any(output.requires_grad for output in outputs)
        if case.op == "denoising_layer":  # which takes half the passes where it needs no gradient
            assert_close(outputs, expected[: len(outputs)], 1e-5)
        else:
            assert_equal(outputs, expected[: len(outputs)])
    with Noted():
        assert_equal(results(case), expected)
    leaves = leaves_of(case)
    outputs = torch.utils.checkpoint.checkpoint(call, case, leaves, use_reentrant=False)
    assert_equal([*outputs, *differentiate(outputs, list(leaves.values()))], expected)
    outputs = call(case, leaves)
    if name in OPERATORS:  # torch's own products follow autocast there
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_equal(differentiate(outputs, list(leaves.values())), expected[len(outputs) :])


@EVERY_OPERATOR
def test_under_autocast_gradients_are_not_rounded_on_their_way(name: str) -> None:
    case = variant(name, leading=(20,)).to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaves = leaves_of(case)
        outputs = call(case, leaves)
    gradients = differentiate(outputs, list(leaves.values()))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    for named, gradient in zip(leaves, gradients, strict=True):
        if (case.op, named) in (("lista_step", "dictionary"), ("layerwise_cross_entropy", "weight")):
            # Each of the two products may be rounded to bfloat16 on a CPU; what is summed of them is not.
            assert not torch.equal(gradient, gradient.bfloat16().float())


@EVERY
def test_tensors_without_values_have_shapes(name: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        case = variant(name).to(dtype)
        found = call(case.to("meta"))
        assert all(output.is_meta for output in found)
        assert [(o.shape, o.dtype) for o in found] == [(o.shape, o.dtype) for o in call(case)]


# Derivatives other than the gradient: right, or refused by the op's name; never zero without a word


@EVERY_OPERATOR
def test_a_second_derivative_is_refused(name: str) -> None:
    case = variant(name)
    for noted in (Noted(), contextlib.nullcontext()):
        leaves = leaves_of(case)
        with noted:
            gradients = torch.autograd.grad(call(case, leaves)[0].sum(), next(iter(leaves.values())), create_graph=True)
        with pytest.raises(
            InputError, match=rf"^{case.op} can be differentiated once; for a second derivative use its"
        ):
            torch.autograd.grad(gradients[0].square().sum(), list(leaves.values()), allow_unused=True)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", [name for name, (_, extras, _) in VARIANTS.items() if "weights" in extras])
def test_the_gradient_of_depth_weights_has_a_derivative_or_refuses_one(name: str, frozen: bool) -> None:
    case, found = variant(name), []
    for function in (formula, call):
        leaves = leaves_of(case)
        given = {name: each.detach() if frozen and name == "weight" else each for name, each in leaves.items()}
        depths = [leaves[name] for name in DEPTHS]
        (slope,) = torch.autograd.grad(function(case, given)[0], leaves["depth_weights"], create_graph=True)
        try:
            second = torch.autograd.grad(slope.square().sum() + depths[0].square().sum(), depths)
        except InputError as error:
            if not str(error).startswith(case.op):
                raise
            second = found[0][1:]
        found.append([slope, *second])
    assert_close(*found)


@EVERY_OPERATOR
def test_a_batch_of_gradients_is_refused(name: str) -> None:
    case = variant(name)
    words = rf"^{case.op} takes no batch of gradients .* {case.op}_reference"
    for mode in (Noted(), contextlib.nullcontext()):
        leaves = leaves_of(case)
        with mode:
            output = call(case, leaves)[0]
        many, first = output.detach().expand(2, *output.shape), next(iter(leaves.values()))
        with pytest.raises(InputError, match=words):
            torch.autograd.grad(output, first, many, is_grads_batched=True, retain_graph=True)
        with pytest.raises(InputError, match=words):
            torch.func.vmap(functools.partial(torch.autograd.grad, output, first))(many)


@pytest.mark.parametrize("transform", ["jvp", "vjp", "grad", "dual", "vmap"])
@EVERY_OPERATOR
def test_transforms_are_right_or_refused(name: str, transform: str) -> None:
    case = variant(name)
    first, tensor = next(iter(case.tensors.items()))
    tangent = normal(9, *tensor.shape)

    def dual(function: Callable[[Tensor], Tensor]) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(tensor, tangent))).tangent

    ways: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
        "jvp": lambda function: torch.func.jvp(function, (tensor,), (tangent,))[1],
        "vjp": lambda function: torch.func.vjp(function, tensor)[1](torch.ones((), dtype=tensor.dtype))[0],
        "grad": lambda function: torch.func.grad(function)(tensor),
        "dual": dual,
        "vmap": lambda function: torch.func.vmap(function)(tensor.expand(2, *tensor.shape)),
    }
    arguments = {name: tensor for name, tensor in case.tensors.items() if name != first}
    right = None
    if transform != "vmap":
        right = ways[transform](lambda x: formula(case, {**arguments, first: x})[0].sum())
    try:
        found = ways[transform](lambda x: call(case, {**arguments, first: x})[0].sum())
    except InputError as error:
        if not str(error).startswith(case.op):
            raise
    else:
        assert_close([found], [call(case)[0].sum().expand(2) if right is None else right])


@pytest.mark.parametrize("op", NAMES)
def test_a_formula_has_the_defaults_of_its_op(op: str) -> None:
    reference = getattr(importlib.import_module(f"cdt_fast.ops.{op}"), f"{op}_reference")
    parameters = inspect.signature(getattr(ops, op)).parameters
    for name, parameter in inspect.signature(reference).parameters.items():
        assert parameter.default == parameters[name].default, name
