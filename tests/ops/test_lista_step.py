"""The LISTA half-step: its formula, gradients at the kinks, and the objective that a step never raises."""

from __future__ import annotations

import functools
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
from cdt_fast.kernels.arguments import ListaStepArguments, ListaStepBackwardArguments
from cdt_fast.models.dictionary import overcomplete_dct, squared_spectral_norm
from cdt_fast.ops.lista_step import lista_step_reference
from cdt_fast.ops.lista_step.operator import lista_step_backward, lista_step_forward
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
    picture_patches,
    saved_shapes,
    written_shrinkage,
)


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
            "nonlinearity": draw(st.sampled_from(["soft_threshold", "hard_threshold", "relu"])),
        },
    }


@settings(max_examples=200, deadline=None)
@given(step_cases())
def test_equals_the_formula_with_every_gradient(case: dict[str, Any]) -> None:
    assert_is_its_formulas(case, ops.lista_step, written_step, lista_step_reference)


@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "hard_threshold", "relu"])
def test_gradcheck(nonlinearity: Any) -> None:
    inputs = [leaf(normal(7, 2, 3, 4)), leaf(normal(8, 2, 3, 3)), leaf(normal(9, 3, 4))]
    options: dict[str, Any] = {"step": 0.2, "threshold": 0.1, "nonlinearity": nonlinearity}
    update = lista_step_reference(*inputs, step=0.2, threshold=0.0)
    assert (update.abs() - (0.0 if nonlinearity == "relu" else 0.1)).abs().min() > 1e-4
    assert torch.autograd.gradcheck(lambda *given: ops.lista_step(*given, **options), inputs)


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
    dtype: torch.dtype, autocast: bool, nonlinearity: Any, sparsity: float, seeds: int
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


@settings(max_examples=150, deadline=None)
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
def test_opcheck(nonlinearity: Any, keep_residual: bool) -> None:
    codes, signal, dictionary = step_inputs(6)
    dictionary.requires_grad_(keep_residual)
    lista = ListaStepArguments(
        codes=codes,
        signal=signal,
        dictionary=dictionary,
        **STEP,
        nonlinearity=nonlinearity,
        keep_residual=keep_residual,
        backend="torch",
    )
    opcheck(lista_step_forward, lista)


def test_opcheck_of_the_backward() -> None:
    codes, signal, dictionary = (tensor.detach() for tensor in step_inputs(6))
    needs = ("needs_codes", "needs_signal", "needs_dictionary")
    for nonlinearity, needed in itertools.product(("relu", "identity"), itertools.product((True, False), repeat=3)):
        lista = ListaStepBackwardArguments(
            grad_output=codes,
            output=codes.relu(),
            dictionary=dictionary,
            codes=codes if needed[2] else None,
            residual=signal if needed[2] else None,
            step=0.2,
            nonlinearity=nonlinearity,  # type: ignore[arg-type]
            **dict(zip(needs, needed, strict=True)),
            backend="torch",
        )
        assert len(lista_step_backward(lista)) == sum(needed)
        opcheck(lista_step_backward, lista, test_utils=("test_schema", "test_faketensor"))


def test_torch_compile_sees_one_graph() -> None:
    def layer(codes: Tensor, signal: Tensor, dictionary: Tensor, threshold: Tensor) -> Tensor:
        codes = ops.lista_step(2 * codes, signal, dictionary, **STEP)
        return ops.soft_threshold(ops.soft_threshold(codes, 0.1), threshold) + ops.soft_threshold(codes, 0.0)

    def make(tokens: int) -> list[Tensor]:
        return [*step_inputs(2, tokens), leaf(torch.full((5,), 0.05, dtype=torch.float64))]

    assert_compiles(layer, make, [(6,), (7,)], dynamic=True)


def test_a_frozen_dictionary_keeps_neither_codes_nor_residual() -> None:
    for frozen, shapes in ((True, [(4, 5), (6, 5)]), (False, [(4, 5), (6, 4), (6, 5), (6, 5)])):
        inputs = step_inputs(6)
        inputs[2].requires_grad_(not frozen)
        assert saved_shapes(functools.partial(ops.lista_step, **STEP), *inputs) == shapes


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


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
def test_repeats_are_bitwise_equal_and_a_second_backward_too(dtype: torch.dtype) -> None:
    cases, step = lista_precision_cases(range(1))
    inputs = [leaf(tensor.to(dtype)) for tensor in cases[0].values()]
    assert_repeats(lambda *given: [ops.lista_step(*given, step=step, threshold=0.2 * step)], inputs)


@pytest.mark.parametrize("poisoned", [0, 1])
@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "relu"])
def test_a_nan_token_stays_its_own(poisoned: int, nonlinearity: Any) -> None:
    step = functools.partial(ops.lista_step, **STEP, nonlinearity=nonlinearity)
    assert_a_nan_stays_in_its_row(step, step_inputs(6), poisoned, of_rows=(0, 1))


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
        ({"signal": torch.zeros(3, 4, dtype=torch.int32)}, r"signal must be a dense floating-point .* got .*int32"),
        ({"signal": torch.zeros(2, 4)}, r"signal must have shape \(3, 4\).*got \(2, 4\)"),
        ({"dictionary": torch.zeros(5)}, r"dictionary must be .*\[n, m\], got \(5,\)"),
        ({"dictionary": torch.zeros(5, 4)}, r"dictionary must have shape \(4, 5\).*got \(5, 4\)"),
        ({"dictionary": torch.zeros(4, 5).double()}, r"dictionary is torch.float64 but codes is torch.float32"),
        ({"signal": torch.zeros(3, 4, device="meta")}, r"signal is on meta but codes is on cpu"),
        ({"step": -1}, r"step must be a finite number >= 0, got -1"),
        ({"step": float("nan")}, r"step must be a finite number >= 0, got nan"),
        ({"threshold": -1e-9}, r"threshold must be a finite number >= 0, got -1e-09"),
        ({"threshold": torch.zeros(5)}, r"threshold must be a number, got a tensor: \(5,\) float32"),
        (
            {"nonlinearity": "tanh"},
            r"nonlinearity must be one of 'soft_threshold', 'hard_threshold', 'relu', got 'tanh'",
        ),
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
