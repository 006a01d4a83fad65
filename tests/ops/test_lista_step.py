"""Shrinkage and the LISTA half-step: formulas, gradients at the kinks, and the objective that a step never raises."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.models.dictionary import overcomplete_dct, squared_spectral_norm
from cdt_fast.ops.lista_step import _lista_step, _lista_step_backward, lista_step_reference
from cdt_fast.ops.soft_threshold import soft_threshold_reference
from tests.ops.ops_cases import (
    LAYOUTS,
    LOW_DTYPES,
    assert_as_precise_as_torch,
    assert_close,
    assert_equal,
    generator,
    gradients,
    laid_out,
    leaf,
    normal,
    picture_patches,
    written_shrinkage,
)

# Shrinkage


@pytest.mark.parametrize("threshold", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5), (0,), (2, 0)])
def test_soft_threshold_is_its_formula(threshold: float, shape: tuple[int, ...]) -> None:
    x = leaf(2 * normal(0, *shape))
    output = ops.soft_threshold(x, threshold)
    assert output.shape == x.shape
    assert_close([output], [torch.sign(x) * torch.clamp(x.abs() - threshold, min=0)], tolerance=1e-15)
    (gradient,) = torch.autograd.grad(output, x, torch.full_like(x, 2.0))
    assert_equal([gradient], [2.0 * (x.abs() > threshold).double()])


def test_soft_threshold_minimizes_what_it_is_the_proximal_operator_of() -> None:
    x, threshold = 2 * normal(1, 50), 0.7
    best = 0.5 * (ops.soft_threshold(x, threshold) - x).square() + threshold * ops.soft_threshold(x, threshold).abs()
    for other in torch.linspace(-6, 6, 1001, dtype=torch.float64):
        assert (best <= 0.5 * (other - x).square() + threshold * other.abs() + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
def test_soft_threshold_keeps_nan_infinities_and_the_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 0.0, 0.25, -0.25], dtype=dtype)
    expected = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.75, -0.75, 0.0, 0.0, 0.0], dtype=dtype)
    # A wide copy too: vectorised code has its own treatment of NaN.
    for copies in (1, 33):
        for threshold in (0.25, torch.tensor(0.25)):
            given = ops.soft_threshold(x.repeat(copies), threshold)
            assert_equal([given], [expected.repeat(copies)])
            assert torch.isnan(given[::8]).all()


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_soft_threshold_rounds_once(dtype: torch.dtype) -> None:
    x = normal(2, 4000, dtype=dtype)
    exact = soft_threshold_reference(x.double(), 0.3)
    error = (ops.soft_threshold(x, 0.3).double() - exact).abs()
    # The threshold itself may be rounded to the dtype (0.3 is no binary number), and then the result.
    assert (error <= torch.finfo(dtype).eps / 2 * (0.3 + exact.abs())).all()


def test_threshold_zero_is_the_identity_with_gradient_one_even_at_zero() -> None:
    x = leaf(torch.tensor([0.0, -0.0, 1.0, -1.0]))
    output = ops.soft_threshold(x, 0.0)
    assert output.data_ptr() != x.data_ptr()
    output.sum().backward()
    assert_equal([output, x.grad], [x, torch.ones(4)])

    codes = leaf(torch.zeros(2, 3, dtype=torch.float64))
    dictionary = normal(3, 2, 3)
    for function in (ops.lista_step, ops.unrolled_layer):
        output = function(codes, torch.zeros(2, 2, dtype=torch.float64), dictionary, step=0.1, threshold=0.0)
        output = output if isinstance(output, Tensor) else output[0]
        assert (output == 0).all()
        (gradient,) = torch.autograd.grad(output.sum(), codes)
        assert (gradient != 0).all()


def test_a_tensor_threshold_of_zero_is_the_identity_too() -> None:
    x, threshold = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0]), torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0])
    for reference in (False, True):
        given, theta = leaf(x), leaf(threshold)
        output = (soft_threshold_reference if reference else ops.soft_threshold)(given, theta)
        output.sum().backward()
        # At θ = 0.5 zero lies inside the interval that is shrunk to zero; the others see the identity.
        assert_equal([output, given.grad], [x, torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])])
        assert_equal([theta.grad], [torch.tensor([0.0, 0.0, -1.0, 1.0, 0.0])])
    for zero in (0.0, torch.tensor(0.0)):
        given = leaf(torch.zeros(3))
        ops.soft_threshold(given, zero).sum().backward()
        assert_equal([given.grad], [torch.ones(3)])


def test_a_code_on_the_threshold_has_gradient_zero() -> None:
    x = leaf(torch.tensor([0.5, -0.5, 0.75], dtype=torch.float64))
    ops.soft_threshold(x, 0.5).sum().backward()
    assert_equal([x.grad], [torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)])


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1), (1, 1, 5), (2, 3, 5)])
def test_a_tensor_of_thresholds_broadcasts_and_gets_its_gradient(shape: tuple[int, ...]) -> None:
    x, threshold = leaf(2 * normal(4, 2, 3, 5)), leaf(0.1 + normal(5, *shape).abs())
    output = ops.soft_threshold(x, threshold)
    assert output.shape == x.shape
    full = threshold.detach().expand(x.shape)
    assert_close([output], [torch.where(x.abs() > full, x - torch.copysign(full, x), 0.0)])
    found = gradients([output], [x, threshold], [torch.ones_like(output)])
    alive = (x.abs() > full).double()
    assert_close(found, [alive, (-alive * torch.sign(x)).sum_to_size(shape) if shape else -(alive * x.sign()).sum()])
    assert torch.autograd.gradcheck(ops.soft_threshold, (x, threshold))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_soft_threshold_on_other_strides(layout: str) -> None:
    x = normal(6, 3, 4)
    given = leaf(x, layout)
    output = ops.soft_threshold(given, 0.4)
    (gradient,) = torch.autograd.grad(output, given, torch.ones((), dtype=x.dtype).expand(x.shape))
    assert_equal([output, gradient], [ops.soft_threshold(x, 0.4), (x.abs() > 0.4).double()])


@pytest.mark.parametrize(
    ("x", "threshold", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), 0.1, r"x must be a floating-point tensor of any shape, got \(3,\) int64"),
        (1.0, 0.1, r"x must be a floating-point tensor .* got 1.0 \(float\)"),
        (torch.zeros(3), -0.1, r"threshold must be a finite number >= 0, got -0.1"),
        (torch.zeros(3), float("nan"), r"threshold must be a finite number >= 0, got nan"),
        (torch.zeros(3), float("inf"), r"threshold must be a finite number >= 0, got inf"),
        (torch.zeros(3), "0.1", r"threshold must be a finite number >= 0, got '0.1' \(str\)"),
        (torch.zeros(3), torch.zeros(2), r"threshold must broadcast against x \(3,\), got \(2,\)"),
        (torch.zeros(3), torch.zeros(3, 3), r"threshold must broadcast against x \(3,\), got \(3, 3\)"),
        (torch.zeros(1), torch.zeros(3), r"threshold must broadcast against x \(1,\), got \(3,\)"),
        (torch.zeros(3), torch.tensor(1), r"threshold must be a floating-point tensor or a number, got \(\) int64"),
    ],
)
def test_soft_threshold_errors(x: Any, threshold: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.soft_threshold(x, threshold)


# The half-step


def written_step(
    codes: Tensor, signal: Tensor, dictionary: Tensor, *, step: float, threshold: float, nonlinearity: str
) -> Tensor:
    update = codes + step * torch.einsum(
        "...n,nm->...m", signal - torch.einsum("...m,nm->...n", codes, dictionary), dictionary
    )
    return written_shrinkage(update, threshold, nonlinearity)


@st.composite
def step_cases(draw: st.DrawFn) -> dict[str, Any]:
    leading = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    width, atoms = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    source = generator(draw(st.integers(0, 10_000)))
    inputs = {
        "codes": normal(source, *leading, atoms),
        "signal": normal(source, *leading, width),
        "dictionary": normal(source, width, atoms),
    }
    layouts = st.sampled_from(LAYOUTS if leading else LAYOUTS[:1])
    return {
        "inputs": inputs,
        "layouts": {
            "codes": draw(layouts),
            "signal": draw(layouts),
            "dictionary": draw(st.sampled_from(LAYOUTS)),
        },
        "upstream_layout": draw(st.sampled_from([*(LAYOUTS if leading else LAYOUTS[:1]), "stride 0"])),
        "options": {
            "step": draw(st.sampled_from([0.05, 0.5])),
            "threshold": draw(st.sampled_from([0.0, 0.1, 0.6])),
            "nonlinearity": draw(st.sampled_from(["soft_threshold", "relu"])),
        },
    }


@settings(max_examples=200, deadline=None, derandomize=True)
@given(step_cases())
def test_equals_the_formula_with_every_gradient(case: dict[str, Any]) -> None:
    results = []
    for function in (ops.lista_step, written_step, lista_step_reference):
        leaves = {name: leaf(tensor, case["layouts"][name]) for name, tensor in case["inputs"].items()}
        output = function(**leaves, **case["options"])
        if case["upstream_layout"] == "stride 0":
            upstream = torch.tensor(0.7, dtype=output.dtype).expand(output.shape)
        else:
            upstream = laid_out(normal(1, *output.shape), case["upstream_layout"])
        results.append([output, *gradients([output], list(leaves.values()), [upstream])])
    assert_close(results[0], results[1])
    assert_close(results[0], results[2])


@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "relu"])
def test_gradcheck(nonlinearity: str) -> None:
    inputs = [leaf(normal(7, 2, 3, 4)), leaf(normal(8, 2, 3, 3)), leaf(normal(9, 3, 4))]
    options: dict[str, Any] = {"step": 0.2, "threshold": 0.1, "nonlinearity": nonlinearity}
    update = lista_step_reference(*inputs, step=0.2, threshold=0.0)
    assert (update.abs() - (0.1 if nonlinearity == "soft_threshold" else 0.0)).abs().min() > 1e-4
    assert torch.autograd.gradcheck(lambda *given: ops.lista_step(*given, **options), inputs)


def test_frozen_inputs_get_no_gradient_and_change_no_other() -> None:
    inputs = [normal(7, 2, 3, 4), normal(8, 2, 3, 3), normal(9, 3, 4)]
    full = None
    for trained in itertools.product([True, False], repeat=3):
        leaves = [tensor.clone().requires_grad_(wanted) for tensor, wanted in zip(inputs, trained, strict=True)]
        output = ops.lista_step(*leaves, step=0.2, threshold=0.1)
        assert output.requires_grad == any(trained)
        if any(trained):
            output.backward(normal(10, *output.shape))
        found = [tensor.grad for tensor in leaves]
        full = full or found
        assert [gradient is not None for gradient in found] == list(trained)
        assert_close([g for g in found if g is not None], [g for g, w in zip(full, trained, strict=True) if w])


def lista_precision_cases(seeds: range) -> tuple[list[dict[str, Any]], float]:
    dictionary = overcomplete_dct(64, 128)
    step = 1 / squared_spectral_norm(dictionary).item()
    cases = []
    for seed in seeds:
        noisy = picture_patches(seed, 4, 20, 64) + 0.03 * normal(seed, 4, 20, 64)
        atoms = dictionary + 0.01 * normal(seed + 100, 64, 128)
        codes = ops.soft_threshold(step * noisy @ atoms, 0.02 * step)
        cases.append({"codes": codes, "signal": noisy, "dictionary": atoms})
    return cases, step


# Sixteen seeds with a kink, four without: see the unrolled layer's tests.
@pytest.mark.parametrize(
    ("nonlinearity", "sparsity", "seeds"),
    [("soft_threshold", 0.2, 16), ("relu", 0.0, 16), ("soft_threshold", 0.0, 4)],
)
@pytest.mark.parametrize(
    ("dtype", "autocast"), [*((dtype, False) for dtype in LOW_DTYPES), (torch.bfloat16, True), (torch.float16, True)]
)
def test_as_precise_as_plain_torch(
    dtype: torch.dtype, autocast: bool, nonlinearity: str, sparsity: float, seeds: int
) -> None:
    cases, step = lista_precision_cases(range(seeds))
    options: dict[str, Any] = {"step": step, "threshold": sparsity * step, "nonlinearity": nonlinearity}

    def eager(**inputs: Any) -> list[Tensor]:
        # Eager autocast leaves the sum with the codes in float32; the op's documented output dtype is autocast's.
        output = lista_step_reference(**inputs, **options)
        return [output.to(dtype) if output.dtype != torch.float64 else output]

    assert_as_precise_as_torch(
        lambda **inputs: [ops.lista_step(**inputs, **options)],
        eager,
        cases,
        dtype,
        autocast=autocast,
        kinks=nonlinearity == "relu" or sparsity > 0,
    )


def objective(codes: Tensor, signal: Tensor, dictionary: Tensor, sparsity: float) -> Tensor:
    """`½‖x − h Dᵀ‖² + λ₁‖h‖₁` of each token."""
    return 0.5 * (signal - codes @ dictionary.T).square().sum(-1) + sparsity * codes.abs().sum(-1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 9),
    atoms=st.integers(1, 20),
    sparsity=st.floats(0, 3),
    slack=st.floats(1, 4),
    dct=st.booleans(),
)
def test_a_step_within_the_bound_never_raises_the_objective(
    seed: int, width: int, atoms: int, sparsity: float, slack: float, dct: bool
) -> None:
    source = generator(seed)
    dictionary = overcomplete_dct(width, atoms) if dct else normal(source, width, atoms)
    signal, codes = normal(source, 20, width), normal(source, 20, atoms)
    step = 1 / (slack * squared_spectral_norm(dictionary).item())
    for _ in range(4):
        following = ops.lista_step(codes, signal, dictionary, step=step, threshold=sparsity * step)
        before, after = (objective(given, signal, dictionary, sparsity) for given in (codes, following))
        assert (after <= before + 1e-12 * (1 + before)).all()
        codes = following


def test_a_step_far_beyond_the_bound_does_raise_it() -> None:
    for dictionary in (normal(11, 8, 16), overcomplete_dct(16, 36)):
        signal, codes = normal(12, 20, dictionary.shape[0]), normal(13, 20, dictionary.shape[1])
        step = 6 / squared_spectral_norm(dictionary).item()
        following = ops.lista_step(codes, signal, dictionary, step=step, threshold=0.2 * step)
        rose = objective(following, signal, dictionary, 0.2) > objective(codes, signal, dictionary, 0.2)
        assert rose.any(), "the test above could not fail"


def test_many_steps_reach_the_minimizer() -> None:
    # The optimality of the lasso: |Dᵀ r| ≤ λ₁, with equality and the sign of the code where a code is not zero.
    dictionary, signal, sparsity = normal(14, 5, 8), normal(15, 3, 5), 0.5
    step = 1 / squared_spectral_norm(dictionary).item()
    codes = torch.zeros(3, 8, dtype=torch.float64)
    for _ in range(4000):
        codes = ops.lista_step(codes, signal, dictionary, step=step, threshold=sparsity * step)
    correlation = (signal - codes @ dictionary.T) @ dictionary
    assert (correlation.abs() <= sparsity + 1e-8).all()
    assert_close([correlation[codes != 0]], [sparsity * torch.sign(codes[codes != 0])], tolerance=1e-8)
    assert (codes == 0).any()
    assert (codes != 0).any()


# Autograd's contract, torch.compile, repeats, NaN, empty inputs, errors

STEP: dict[str, Any] = {"step": 0.2, "threshold": 0.1}


def step_inputs(*leading: int) -> list[Tensor]:
    return [leaf(normal(16, *leading, 5)), leaf(normal(17, *leading, 4)), leaf(normal(18, 4, 5))]


@pytest.mark.parametrize("keep_residual", [True, False])
@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "relu", "identity"])
def test_opcheck(nonlinearity: str, keep_residual: bool) -> None:
    codes, signal, dictionary = step_inputs(6)
    dictionary.requires_grad_(keep_residual)
    torch.library.opcheck(_lista_step, (codes, signal, dictionary, 0.2, 0.1, nonlinearity, keep_residual))


def test_opcheck_of_the_backward() -> None:
    codes, signal, dictionary = (tensor.detach() for tensor in step_inputs(6))
    for nonlinearity, wanted in itertools.product(("relu", "identity"), itertools.product((True, False), repeat=3)):
        kept = (codes, signal) if wanted[2] else (None, None)
        arguments = codes, codes.relu(), dictionary, *kept, 0.2, nonlinearity, wanted[0], wanted[1]
        assert len(_lista_step_backward(*arguments)) == sum(wanted)
        torch.library.opcheck(_lista_step_backward, arguments, test_utils=("test_schema", "test_faketensor"))


def test_torch_compile_sees_one_graph() -> None:
    def layer(codes: Tensor, signal: Tensor, dictionary: Tensor, threshold: Tensor) -> Tensor:
        codes = ops.lista_step(2 * codes, signal, dictionary, **STEP)
        return ops.soft_threshold(ops.soft_threshold(codes, 0.1), threshold) + ops.soft_threshold(codes, 0.0)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (6, 7):
        results = []
        for function in (layer, compiled):
            leaves = [*step_inputs(2, tokens), leaf(torch.full((5,), 0.05, dtype=torch.float64))]
            output = function(*leaves)
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
        assert_close(*results)


def test_no_upstream_gradient_is_no_gradient() -> None:
    inputs = step_inputs(6)

    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, _: Tensor) -> None:
            return None

    Drop.apply(ops.lista_step(*inputs, **STEP)).sum().backward()
    assert [tensor.grad for tensor in inputs] == [None] * 3


def test_a_frozen_dictionary_keeps_neither_codes_nor_residual() -> None:
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    for frozen, shapes in ((True, [(4, 5), (6, 5)]), (False, [(4, 5), (6, 4), (6, 5), (6, 5)])):
        inputs = step_inputs(6)
        inputs[2].requires_grad_(not frozen)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ops.lista_step(*inputs, **STEP)
        assert sorted(kept) == shapes


def test_autocast_sums_the_dictionarys_gradient_in_float32() -> None:
    codes, signal, dictionary = (tensor.detach().float() for tensor in step_inputs(400))
    dictionary.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ops.lista_step(codes, signal, dictionary, **STEP)
    assert output.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(output.float().sum(), dictionary)
    assert gradient.dtype == torch.float32
    # Each of the two products may be rounded to bfloat16 on a CPU; their difference is not.
    assert not torch.equal(gradient, gradient.bfloat16().float())


def test_a_second_derivative_is_refused() -> None:
    inputs = step_inputs(3)
    (gradient,) = torch.autograd.grad(ops.lista_step(*inputs, **STEP).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(InputError, match="differentiated once"):
        gradient.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    inputs = step_inputs(2, 3)
    expected, before = ops.lista_step(*inputs, **STEP), [tensor.detach().clone() for tensor in inputs]
    with mode():
        output = ops.lista_step(*inputs, **STEP)
    assert not output.requires_grad
    assert_equal([output, *inputs], [expected, *before])


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
def test_repeats_are_bitwise_equal_and_a_second_backward_too(dtype: torch.dtype) -> None:
    cases, step = lista_precision_cases(range(1))
    inputs = [leaf(tensor.to(dtype)) for tensor in cases[0].values()]
    upstream = normal(1, *inputs[0].shape, dtype=dtype)
    kept = upstream.clone()
    output = ops.lista_step(*inputs, step=step, threshold=0.2 * step)
    first = torch.autograd.grad(output, inputs, upstream, retain_graph=True)
    assert_equal(torch.autograd.grad(output, inputs, upstream), first)
    for _ in range(3):
        again = ops.lista_step(*inputs, step=step, threshold=0.2 * step)
        assert_equal([again, *torch.autograd.grad(again, inputs, upstream)], [output, *first])
    assert_equal([upstream], [kept])


def test_backward_called_inside_autocast_gives_the_gradients_of_the_forward() -> None:
    inputs = [leaf(tensor.detach().float()) for tensor in step_inputs(2, 3)]
    output = ops.lista_step(*inputs, **STEP)
    upstream = torch.ones_like(output)
    expected = torch.autograd.grad(output, inputs, upstream, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(torch.autograd.grad(output, inputs, upstream), expected)


@pytest.mark.parametrize("poisoned", [0, 1])
@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "relu"])
def test_a_nan_token_stays_its_own(poisoned: int, nonlinearity: str) -> None:
    def run(filling: float | None) -> list[Tensor]:
        inputs = [tensor.detach().clone() for tensor in step_inputs(6)]
        if filling is not None:
            inputs[poisoned][2, 1] = filling
        inputs = [leaf(tensor) for tensor in inputs]
        output = ops.lista_step(*inputs, **STEP, nonlinearity=nonlinearity)
        return [output, *torch.autograd.grad(output.sum(), inputs[:2])]

    rows = [0, 1, 3, 4, 5]
    poisoned_results, clean = run(float("nan")), run(None)
    assert_equal([result[rows] for result in poisoned_results], [result[rows] for result in clean])
    assert torch.isnan(poisoned_results[0][2]).any()


@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize(("width", "atoms"), [(4, 5), (0, 5), (4, 0), (0, 0)])
def test_empty_inputs(leading: tuple[int, ...], width: int, atoms: int) -> None:
    for shape in (leading, (2,)):
        sizes = [(*shape, atoms), (*shape, width), (width, atoms)]
        inputs = [leaf(torch.ones(size, dtype=torch.float64)) for size in sizes]
        output = ops.lista_step(*inputs, **STEP)
        assert output.shape == (*shape, atoms)
        output.sum().backward()
        assert [tensor.grad.shape for tensor in inputs if tensor.grad is not None] == sizes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codes": torch.tensor(1.0)}, r"codes must be .*\[\.\.\., m\], got \(\) float32"),
        ({"signal": torch.zeros(3, 4, dtype=torch.int32)}, r"signal must be a floating-point .* got .*int32"),
        ({"signal": torch.zeros(2, 4)}, r"signal must have shape \(3, 4\).*got \(2, 4\)"),
        ({"dictionary": torch.zeros(5)}, r"dictionary must be .*\[n, m\], got \(5,\)"),
        ({"dictionary": torch.zeros(5, 4)}, r"dictionary must have shape \(4, 5\).*got \(5, 4\)"),
        ({"dictionary": torch.zeros(4, 5).double()}, r"dictionary is torch.float64 but codes is torch.float32"),
        ({"signal": torch.zeros(3, 4, device="meta")}, r"signal is on meta but codes is on cpu"),
        ({"step": -1}, r"step must be a finite number >= 0, got -1"),
        ({"step": float("nan")}, r"step must be a finite number >= 0, got nan"),
        ({"threshold": -1e-9}, r"threshold must be a finite number >= 0, got -1e-09"),
        ({"threshold": torch.zeros(5)}, r"threshold must be a number, got a tensor: \(5,\) float32"),
        ({"nonlinearity": "tanh"}, r"nonlinearity must be one of 'soft_threshold', 'relu', got 'tanh'"),
    ],
)
def test_errors_name_the_argument_what_was_given_and_what_is_expected(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "codes": torch.zeros(3, 5),
        "signal": torch.zeros(3, 4),
        "dictionary": torch.zeros(4, 5),
    }
    with pytest.raises(InputError, match=message):
        ops.lista_step(**{**arguments, **STEP, **changed})


def test_numbers_of_numpy_are_numbers() -> None:
    inputs = step_inputs(3)
    expected = ops.lista_step(*inputs, step=math.pi, threshold=0.5)
    numbers: dict[str, Any] = {"step": np.float64(math.pi), "threshold": np.float32(0.5)}
    assert_equal([ops.lista_step(*inputs, **numbers)], [expected])
