"""Products of float32 in TF32, where torch's own setting allows it: tests of the kernels again, in that setting.

The criterion is that of `precision`, where plain torch's factors lose what TF32 has not, and eps is that of TF32.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cdt_fast.kernels import cards
from cdt_fast.kernels.aot.case import float32_products
from tests.kernels import test_lista_step as lista
from tests.kernels import test_residual_linear as residual_linear
from tests.kernels import test_symmetric_attention as attention
from tests.kernels.kernel_cases import LENGTHS, RUNS, SOME, Inputs, Shape, assert_is_the_formula
from tests.kernels.precision import TF32Products


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    if cards.interpreting():
        pytest.skip("the interpreter has no TF32")
    with float32_products(True), TF32Products():
        yield


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize(("kernel", "shape"), SOME)
def test_attention(kernel: str, shape: Shape, energy: bool, device: torch.device) -> None:
    inputs = Inputs.of(shape, device, torch.float32, lengths=LENGTHS, energy=energy)
    assert_is_the_formula(RUNS[kernel](inputs), inputs)


def test_blocks_that_pack(device: torch.device) -> None:
    attention.test_every_block_that_packs("tf32", device)


def test_blocks_that_stream(device: torch.device) -> None:
    attention.test_every_block_that_streams("tf32", device)


@pytest.mark.emulated
@pytest.mark.parametrize("width", [40, 256])
def test_blocks_of_lista(width: int, device: torch.device) -> None:
    lista.test_the_default_blocks(width, device, torch.float32)


@pytest.mark.emulated
def test_blocks_of_residual_linear(device: torch.device) -> None:
    residual_linear.test_the_default_blocks_and_a_bias(device, torch.float32)


def test_the_setting_counts(device: torch.device) -> None:
    x, weight, residual = residual_linear.inputs(64, 64, 64, device, torch.float32)
    given = residual_linear.compute(x, weight, residual, blocks=None)
    with float32_products(False):
        exact = residual_linear.compute(x, weight, residual, blocks=None)
    # Ten bits of a factor, and not the 23 of a float32.
    assert 1e-5 < (given - exact).abs().max() < 1e-2
