"""Shrinkage: its formula, gradients at the kinks, and what it minimizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.ops.soft_threshold import soft_threshold_reference
from tests.ops.ops_cases import LAYOUTS, LOW_DTYPES, assert_close, assert_equal, gradients, leaf, normal


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
        (torch.zeros(3, dtype=torch.int64), 0.1, r"x must be a dense .* tensor of any shape, got \(3,\) int64"),
        (torch.eye(3).to_sparse(), 0.1, r"x must be a dense .* got \(3, 3\) float32 sparse_coo on cpu"),
        (1.0, 0.1, r"x must be a dense floating-point tensor .* got 1.0 \(float\)"),
        (torch.zeros(3), -0.1, r"threshold must be a finite number >= 0, got -0.1"),
        (torch.zeros(3), float("nan"), r"threshold must be a finite number >= 0, got nan"),
        (torch.zeros(3), float("inf"), r"threshold must be a finite number >= 0, got inf"),
        (torch.zeros(3), "0.1", r"threshold must be a finite number >= 0, got '0.1' \(str\)"),
        (torch.zeros(3), torch.zeros(2), r"threshold must broadcast against x \(3,\), got \(2,\)"),
        (torch.zeros(3), torch.zeros(3, 3), r"threshold must broadcast against x \(3,\), got \(3, 3\)"),
        (torch.zeros(1), torch.zeros(3), r"threshold must broadcast against x \(1,\), got \(3,\)"),
        (torch.zeros(3), torch.tensor(1), r"threshold must be a dense .* tensor or a number, got \(\) int64"),
    ],
)
def test_soft_threshold_errors(x: Any, threshold: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.soft_threshold(x, threshold)
