"""The kernel of `residual_linear` against its formula in float64, and the op on it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.kernels.arguments import ResidualLinearArguments
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.residual_linear import ROW_TILES, residual_linear_forward
from cdt_fast.ops.residual_linear import residual_linear_reference
from tests.kernels.kernel_cases import SHAPES, normal
from tests.kernels.precision import assert_as_precise, far_apart, poisoned

SMALL = Blocks(rows=16, columns=16, depth=16, warps=4, stages=2)
NONLINEARITIES = ("relu", "soft_threshold", "hard_threshold", "identity")


def inputs(rows: int, depth: int, columns: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    tensors = normal(0, rows, depth), normal(1, depth, columns) / depth**0.5, normal(2, rows, columns)
    return [tensor.to(dtype).to(device) for tensor in tensors]


def compute(x: Tensor, weight: Tensor, residual: Tensor, *, blocks: Blocks | None = SMALL, **options: Any) -> Tensor:
    return residual_linear_forward(ResidualLinearArguments(x=x, weight=weight, residual=residual, **options), blocks)


def assert_is_its_formula(given: Tensor, x: Tensor, weight: Tensor, residual: Tensor, **options: Any) -> None:
    exact = residual_linear_reference(x.cpu().double(), weight.cpu().double(), residual.cpu().double(), **options)
    assert given.is_contiguous()
    assert_as_precise("output", given, residual_linear_reference(x, weight, residual, **options), exact)


@pytest.mark.parametrize("shape", SHAPES)
def test_sizes(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> None:
    tensors = [poisoned(tensor) for tensor in inputs(*shape, device, dtype)]
    options: dict[str, Any] = {"alpha": -0.5, "nonlinearity": "soft_threshold", "threshold": 0.25}
    assert_is_its_formula(compute(*tensors, **options), *tensors, **options)


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_nonlinearities(nonlinearity: str, device: torch.device, dtype: torch.dtype) -> None:
    tensors = inputs(35, 20, 18, device, dtype)
    options: dict[str, Any] = {"alpha": 0.7, "nonlinearity": nonlinearity, "threshold": 0.6}
    output = compute(*tensors, **options)
    assert_is_its_formula(output, *tensors, **options)
    assert (output == 0).any() == (nonlinearity != "identity")
    assert (output < 0).any() == (nonlinearity != "relu")


@pytest.mark.emulated
def test_the_default_blocks_and_a_bias(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, _ = inputs(150, 70, 140, device, dtype)
    bias = normal(3, 140).to(dtype).to(device)
    assert_is_its_formula(compute(x, weight, bias, blocks=None), x, weight, bias)


def test_more_tiles_than_are_worked_on_together(device: torch.device) -> None:
    # Eleven rows of tiles: eight together, then the three that are left, over several columns of tiles.
    tensors = inputs(16 * ROW_TILES + 16 * 2 + 5, 8, 50, device, torch.float32)
    assert_is_its_formula(compute(*tensors), *tensors)


def test_strides(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, residual = inputs(19, 18, 33, device, dtype)
    expected = compute(x, weight, residual)
    for layouts in itertools.product((lambda t: t, lambda t: t.mT.contiguous().mT, poisoned), repeat=3):
        laid_out = [layout(tensor) for layout, tensor in zip(layouts, (x, weight, residual), strict=True)]
        assert torch.equal(compute(*laid_out), expected)
    # Stride 0: one row of x for all, and one row of the residual.
    output = compute(x[:1].expand(19, -1), weight, residual[0])
    assert torch.equal(output, compute(x[:1].repeat(19, 1), weight, residual[:1].repeat(19, 1)))


@pytest.mark.parametrize("far", range(3))
@pytest.mark.parametrize("dimension", [0, 1])
def test_offsets_beyond_32_bits(far: int, dimension: int, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    tensors = inputs(3, 3, 3, device, torch.float16)
    expected = compute(*tensors)
    tensors[far] = far_apart(tensors[far], dimension)
    assert torch.equal(compute(*tensors), expected)


def test_a_wider_residual_is_not_rounded_first(device: torch.device) -> None:
    x, weight, _ = inputs(20, 18, 17, device, torch.float16)
    residual = normal(4, 20, 17).float().to(device)
    exact = residual_linear_reference(x.cpu().double(), weight.cpu().double(), residual.cpu().double())
    output = compute(x, weight, residual)
    assert output.dtype == torch.float16
    # Rounded once: by half an ulp, and the sums in float32 are off by far less than another thousandth.
    assert (
        (output.cpu().double() - exact).abs() <= torch.finfo(torch.float16).eps * (0.501 * exact.abs() + 1e-3)
    ).all()


def test_products_sum_in_float32(device: torch.device) -> None:
    # 4096 and then 64 chunks that add 1 each: float16 would stay at 4096, whose next neighbor is 4100.
    x = torch.full((16, 1024), 1 / 16, dtype=torch.float16, device=device)
    x[:, 0] = 4096
    output = compute(x, torch.ones_like(x).mT, x.new_zeros(16))
    assert (output == 4160).all()


def test_nan_and_infinities_reach_what_they_should(device: torch.device) -> None:
    for nonlinearity, value in itertools.product(NONLINEARITIES, ("nan", "inf", "-inf")):
        x, weight, residual = inputs(18, 16, 17, device, torch.float32)
        residual[5, 3] = float(value)
        x[17] = float("nan")
        output = compute(x, weight, residual, nonlinearity=nonlinearity, threshold=0.1)
        expected = float(value) if (nonlinearity, value) != ("relu", "-inf") else 0.0
        assert torch.equal(output[5, 3].cpu().nan_to_num(7.0), torch.tensor(expected).nan_to_num(7.0))
        assert torch.isnan(output[17]).all()
        output[5, 3] = 0.0
        assert torch.isfinite(output[:17]).all()


@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "hard_threshold"])
def test_what_lies_on_the_threshold_is_zero(nonlinearity: str, device: torch.device) -> None:
    values = torch.tensor([0.5, -0.5, 0.5000001, -0.5000001, 0.0, 2.0], device=device).expand(3, -1)
    nothing = values.new_zeros(3, 1)
    output = compute(nothing, values.new_zeros(1, 6), values, nonlinearity=nonlinearity, threshold=0.5)
    assert torch.equal(output != 0, torch.tensor([False, False, True, True, False, True], device=device).expand(3, -1))
    assert torch.equal(output.sign(), values.sign() * (output != 0))


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_empty(shape: tuple[int, int, int], device: torch.device) -> None:
    x, weight, residual = (torch.ones(size, device=device) for size in (shape[:2], shape[1:], (shape[0], shape[2])))
    output = compute(x, weight, residual, blocks=None)
    assert torch.equal(output, residual)


def test_repeats_are_bitwise_equal(device: torch.device, dtype: torch.dtype) -> None:
    tensors = inputs(35, 50, 35, device, dtype)
    first = compute(*tensors)
    for _ in range(2):
        assert torch.equal(compute(*tensors), first)


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_the_op_on_the_kernel_has_the_gradients_of_plain_torch(
    nonlinearity: str, device: torch.device, dtype: torch.dtype
) -> None:
    # The same codes are zero in both: no value lies nearer to a kink than rounding moves it.
    options: dict[str, Any] = {"alpha": 0.7, "nonlinearity": nonlinearity, "threshold": 0.25}
    x, weight, residual = inputs(20, 16, 12, device, dtype)
    exact_update = (residual.double() + 0.7 * x.double() @ weight.double()).abs()
    kink = {"relu": 0.0, "identity": -1.0}.get(nonlinearity, 0.25)
    residual = torch.where((exact_update - kink).abs() < 0.02, 1.5, residual)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, residual)]
    upstream = (normal(5, 20, 12)).to(dtype).to(device)
    output = ops.residual_linear(*leaves, **options)
    found = torch.autograd.grad(output, leaves, upstream)
    assert_is_its_formula(output.detach(), x, weight, residual, **options)
    results = []
    for wanted in (torch.float64, dtype):
        leaves = [tensor.cpu().to(wanted).requires_grad_() for tensor in (x, weight, residual)]
        output = residual_linear_reference(*leaves, **options)
        results.append(torch.autograd.grad(output, leaves, upstream.cpu().to(wanted)))
    for name, mine, plain, exact in zip(("x", "weight", "residual"), found, results[1], results[0], strict=True):
        assert_as_precise(f"gradient of {name}", mine.cpu(), plain, exact)
