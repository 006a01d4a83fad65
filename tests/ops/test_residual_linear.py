"""The linear map with residual and nonlinearity: formula, gradients, autograd's contract and errors."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import ResidualLinearArguments, ResidualLinearBackwardArguments
from cdt_fast.ops.residual_linear import residual_linear_reference
from cdt_fast.ops.residual_linear.operator import residual_linear_backward, residual_linear_forward
from tests.ops.ops_cases import (
    LAYOUTS,
    LOW_DTYPES,
    assert_a_nan_stays_in_its_row,
    assert_as_precise_as_torch,
    assert_close,
    assert_compiles,
    assert_equal,
    assert_is_its_formulas,
    assert_repeats,
    generator,
    leaf,
    normal,
    opcheck,
    saved_shapes,
    written_shrinkage,
)

NONLINEARITIES = ("relu", "soft_threshold", "hard_threshold", "identity")


def written(
    x: Tensor, weight: Tensor, residual: Tensor, *, alpha: float, nonlinearity: Any, threshold: float
) -> Tensor:
    update = residual + alpha * torch.einsum("...n,nm->...m", x, weight)
    return update if nonlinearity == "identity" else written_shrinkage(update, threshold, nonlinearity)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    leading = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    width, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    bias = draw(st.booleans())
    source = generator(draw(st.integers(0, 10_000)))
    layouts = st.sampled_from(LAYOUTS if leading else LAYOUTS[:1])
    return {
        "inputs": {
            "x": normal(source, *leading, width),
            "weight": normal(source, width, columns),
            "residual": normal(source, *(() if bias else leading), columns),
        },
        "layouts": {
            "x": draw(layouts),
            "weight": draw(st.sampled_from(LAYOUTS)),
            "residual": "contiguous" if bias else draw(layouts),
        },
        "upstream_layout": draw(st.sampled_from([*(LAYOUTS if leading else LAYOUTS[:1]), "stride 0"])),
        "options": {
            "alpha": draw(st.sampled_from([-0.5, 1.0, 0.0])),
            "threshold": draw(st.sampled_from([0.0, 0.1, 0.6])),
            "nonlinearity": draw(st.sampled_from(NONLINEARITIES)),
        },
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_equals_the_formula_with_every_gradient(case: dict[str, Any]) -> None:
    assert_is_its_formulas(case, ops.residual_linear, written, residual_linear_reference)


def test_on_the_threshold() -> None:
    """Nothing is kept there, and no gradient passes."""
    for nonlinearity in ("soft_threshold", "hard_threshold"):
        for function in (ops.residual_linear, residual_linear_reference):
            residual = leaf(torch.tensor([0.5, -0.5, 0.75]))
            output = function(torch.zeros(1), torch.zeros(1, 3), residual, nonlinearity=nonlinearity, threshold=0.5)
            output.sum().backward()
            kept = 0.75 if nonlinearity == "hard_threshold" else 0.25
            assert_equal([output, residual.grad], [torch.tensor([0.0, 0.0, kept]), torch.tensor([0.0, 0.0, 1.0])])


def inputs(*leading: int, bias: bool = False) -> list[Tensor]:
    return [leaf(normal(16, *leading, 4)), leaf(normal(17, 4, 5)), leaf(normal(18, *(() if bias else leading), 5))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_gradcheck(nonlinearity: Any, bias: bool) -> None:
    leaves = inputs(2, 3, bias=bias)
    options: dict[str, Any] = {"alpha": 0.3, "threshold": 0.1, "nonlinearity": nonlinearity}
    update = residual_linear_reference(*leaves, alpha=0.3, nonlinearity="identity")
    assert (update.abs() - (0.1 if "threshold" in nonlinearity else 0.0)).abs().min() > 1e-4
    assert torch.autograd.gradcheck(lambda *given: ops.residual_linear(*given, **options), leaves)


def test_it_is_the_text_layer_and_the_lista_step() -> None:
    x, weight, _ = inputs(2, 3)
    symmetric = weight[:, :4] + weight[:, :4].mT
    expected = torch.relu(torch.nn.functional.linear(x, symmetric) + x)
    assert_close([ops.residual_linear(x, symmetric.mT, x)], [expected])
    codes, signal, dictionary = normal(1, 6, 7), normal(2, 6, 4), normal(3, 4, 7)
    found = ops.residual_linear(
        signal - codes @ dictionary.mT, dictionary, codes, alpha=0.2, nonlinearity="soft_threshold", threshold=0.1
    )
    assert_close([found], [ops.lista_step(codes, signal, dictionary, step=0.2, threshold=0.1)])


def test_threshold_zero_is_the_identity_with_gradient_one_even_at_zero() -> None:
    x, weight, residual = leaf(torch.zeros(3, 4)), leaf(torch.ones(4, 5)), leaf(torch.zeros(3, 5))
    output = ops.residual_linear(x, weight, residual, nonlinearity="soft_threshold", threshold=0.0)
    output.sum().backward()
    assert_equal([output, residual.grad], [torch.zeros(3, 5), torch.ones(3, 5)])


def precision_case(seed: int, bias: bool, nonlinearity: Any) -> dict[str, Tensor]:
    """Inputs whose updates all lie further from a kink than rounding moves them, so that the same gradients pass."""
    x, weight, residual = normal(seed, 30, 24), normal(seed + 100, 24, 20), normal(seed + 200, 30, 20)
    if bias:
        return {"x": x, "weight": weight, "residual": residual[0]}
    if nonlinearity != "identity":
        update = residual + 0.25 * x @ weight
        near = (update.abs() - (0.2 if "threshold" in nonlinearity else 0.0)).abs() < 0.1
        residual = torch.where(near, residual + 1.5 - update, residual)
    return {"x": x, "weight": weight, "residual": residual}


# A bias cannot keep each of its column's updates away from a kink.
@pytest.mark.parametrize(("nonlinearity", "bias"), [*((name, False) for name in NONLINEARITIES), ("identity", True)])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [*((dtype, False) for dtype in LOW_DTYPES), (torch.bfloat16, True), (torch.float16, True)]
)
def test_as_precise_as_plain_torch(dtype: torch.dtype, autocast: bool, nonlinearity: Any, bias: bool) -> None:
    options: dict[str, Any] = {"alpha": 0.25, "nonlinearity": nonlinearity, "threshold": 0.2}

    def eager(**tensors: Any) -> list[Tensor]:
        # Eager autocast leaves the sum with a float32 residual in float32; the op's documented dtype is autocast's.
        output = residual_linear_reference(**tensors, **options)
        return [output.to(dtype) if output.dtype != torch.float64 else output]

    assert_as_precise_as_torch(
        lambda **tensors: [ops.residual_linear(**tensors, **options)],
        eager,
        [precision_case(seed, bias, nonlinearity) for seed in range(4)],
        dtype,
        autocast=autocast,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("nonlinearity", ["relu", "identity"])
def test_frozen_inputs_get_no_gradient_and_change_no_other(nonlinearity: Any, bias: bool) -> None:
    full = None
    for trained in itertools.product([True, False], repeat=3):
        leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(inputs(6, bias=bias), trained, strict=True)]
        output = ops.residual_linear(*leaves, nonlinearity=nonlinearity)
        assert output.requires_grad == any(trained)
        if any(trained):
            output.backward(normal(10, *output.shape))
        found = [tensor.grad for tensor in leaves]
        full = full or found
        assert [gradient is not None for gradient in found] == list(trained)
        assert_close([g for g in found if g is not None], [g for g, w in zip(full, trained, strict=True) if w])


def test_only_what_a_wanted_gradient_reads_is_kept() -> None:
    expected: dict[tuple[tuple[bool, ...], Any], list[tuple[int, ...]]] = {
        # x, weight, residual wanted; φ: what is saved
        ((True, True, True), "relu"): [(6, 4), (4, 5), (6, 5)],
        ((True, False, False), "relu"): [(4, 5), (6, 5)],
        ((False, True, False), "identity"): [(6, 4)],
        ((False, False, True), "identity"): [],
    }
    for (trained, nonlinearity), shapes in expected.items():
        leaves = [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(inputs(6), trained, strict=True)]
        assert saved_shapes(functools.partial(ops.residual_linear, nonlinearity=nonlinearity), *leaves) == sorted(
            shapes
        )


# Autograd's contract, torch.compile, repeats, NaN, empty inputs, errors


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(nonlinearity: Any, bias: bool) -> None:
    x, weight, residual = inputs(6, bias=bias)
    linear = ResidualLinearArguments(
        x=x, weight=weight, residual=residual, alpha=0.3, threshold=0.1, nonlinearity=nonlinearity, backend="torch"
    )
    opcheck(residual_linear_forward, linear)


def test_opcheck_of_the_backward() -> None:
    x, weight, residual = (tensor.detach() for tensor in inputs(6))
    operator, checks = residual_linear_backward, ("test_schema", "test_faketensor")
    given: dict[str, Any] = {"grad_output": residual, "weight_dtype": torch.float64, "alpha": 0.3}
    for needs_x, needs_weight, needs_residual in itertools.product((True, False), repeat=3):
        linear = ResidualLinearBackwardArguments(
            **given,
            output=residual.relu(),
            x=x if needs_weight else None,
            weight=weight if needs_x else None,
            nonlinearity="relu",
            needs_residual=needs_residual,
        )
        assert len(operator(linear)) == needs_x + needs_weight + needs_residual
        opcheck(operator, linear, test_utils=checks)
    # With no mask the residual's gradient must still be no alias of the upstream one.
    linear = ResidualLinearBackwardArguments(
        **given, output=None, x=x, weight=weight, nonlinearity="identity", needs_residual=True
    )
    opcheck(operator, linear, test_utils=checks)


def test_torch_compile_sees_one_graph() -> None:
    def layer(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return ops.residual_linear(2 * x, weight.mT, residual, alpha=0.5)

    def make(tokens: int) -> list[Tensor]:
        return [leaf(normal(1, 2, tokens, 4)), leaf(normal(2, 5, 4)), leaf(normal(3, 5))]

    assert_compiles(layer, make, [(6,), (7,)], dynamic=True)


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
def test_repeats_are_bitwise_equal_and_a_second_backward_too(dtype: torch.dtype, nonlinearity: Any) -> None:
    leaves = [leaf(tensor.to(dtype)) for tensor in inputs(20)]
    assert_repeats(lambda *given: [ops.residual_linear(*given, nonlinearity=nonlinearity)], leaves)


def test_autocast_rounds_no_gradient_of_a_parameter_in_between() -> None:
    leaves = [leaf(tensor.detach().float()) for tensor in inputs(4000, bias=True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ops.residual_linear(*leaves, nonlinearity="identity")
    assert output.dtype == torch.bfloat16
    upstream = torch.randint(0, 9, output.shape, generator=generator(1)).to(torch.bfloat16)
    (grad_bias,) = torch.autograd.grad(output, leaves[2], upstream)
    # Sums of thousands of small integers, which float32 holds and bfloat16 does not.
    assert grad_bias.dtype == torch.float32
    assert_equal([grad_bias], [upstream.float().sum(0)])


@pytest.mark.parametrize("poisoned", [0, 2])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_a_nan_token_stays_its_own(poisoned: int, nonlinearity: Any) -> None:
    linear = functools.partial(ops.residual_linear, nonlinearity=nonlinearity, threshold=0.1)
    assert_a_nan_stays_in_its_row(linear, inputs(6), poisoned, of_rows=(0, 2))


@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3), (2,)])
@pytest.mark.parametrize(("width", "columns"), [(4, 5), (0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_empty_inputs(leading: tuple[int, ...], width: int, columns: int, bias: bool) -> None:
    sizes = [(*leading, width), (width, columns), (columns,) if bias else (*leading, columns)]
    leaves = [leaf(torch.ones(size, dtype=torch.float64)) for size in sizes]
    output = ops.residual_linear(*leaves)
    assert output.shape == (*leading, columns)
    assert (output == 1 + width).all()
    output.sum().backward()
    assert [tensor.grad.shape for tensor in leaves if tensor.grad is not None] == sizes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.tensor(1.0)}, r"x must be .*\[\.\.\., n\], got \(\) float32"),
        ({"x": torch.zeros(3, 4, dtype=torch.int32)}, r"x must be a dense floating-point .* got .*int32"),
        ({"weight": torch.zeros(5)}, r"weight must be .*\[n, m\], got \(5,\)"),
        ({"weight": torch.zeros(5, 4)}, r"weight must have shape \(4, 4\).*got \(5, 4\)"),
        ({"weight": torch.zeros(4, 5).double()}, r"weight is torch.float64 but x is torch.float32"),
        ({"residual": torch.zeros(2, 5)}, r"residual must have shape \(5,\) or \(3, 5\), got \(2, 5\)"),
        ({"residual": torch.zeros(1)}, r"residual must have shape \(5,\) or \(3, 5\), got \(1,\)"),
        ({"residual": 0.0}, r"residual must be a dense floating-point tensor .* got 0.0 \(float\)"),
        ({"residual": torch.zeros(5, device="meta")}, r"residual is on meta but x is on cpu"),
        ({"alpha": float("nan")}, r"alpha must be a finite number, got nan"),
        ({"threshold": -1}, r"threshold must be a finite number >= 0, got -1"),
        ({"nonlinearity": "tanh"}, r"nonlinearity must be .*'hard_threshold', 'relu', 'identity', got 'tanh'"),
    ],
)
def test_errors_name_the_argument_what_was_given_and_what_is_expected(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(3, 4), "weight": torch.zeros(4, 5), "residual": torch.zeros(5)}
    with pytest.raises(InputError, match=message):
        ops.residual_linear(**{**arguments, **changed})
