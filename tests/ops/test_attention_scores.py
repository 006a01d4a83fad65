"""The attention that is kept for the backward, and gradients of tokens that are much alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.kernels.arguments import SymmetricAttentionArguments
from cdt_fast.ops.shared import attention_scores
from cdt_fast.ops.symmetric_attention import plain as attention_in_torch
from cdt_fast.ops.symmetric_attention import symmetric_attention_reference
from cdt_fast.ops.symmetric_attention.plain import room_to_keep
from tests.ops.ops_cases import (
    assert_close,
    assert_equal,
    generator,
    gradients,
    leaf,
    normal,
    picture_patches,
)

EPSILON = torch.finfo(torch.bfloat16).eps
LONG = 96


def attending(z: Tensor, **options: Any) -> SymmetricAttentionArguments:
    """What the public function hands on where a gradient is wanted."""
    return SymmetricAttentionArguments(z=z, keeps=True, backend="torch", **options)


def run(function: Any, inputs: list[Tensor], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """The output and the gradient of each input, in float64."""
    leaves = [leaf(tensor.to(dtype)) for tensor in inputs]
    output = function(*leaves, **options)
    upstream = (torch.randint(-8, 9, output.shape, generator=generator(5)) / 8).to(dtype)
    found = gradients([output], leaves, [upstream])
    return [tensor.detach().double() for tensor in (output, *found) if tensor is not None]


def relative_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((one - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)]


def in_bfloat16(tensor: Tensor) -> Tensor:
    """Rounded to what bfloat16 holds."""
    return tensor.bfloat16().double()


@pytest.mark.parametrize("tokens", [20, LONG, 300])
@pytest.mark.parametrize("with_values", [False, True])
def test_gradients_of_tokens_that_are_much_alike(with_values: bool, tokens: int) -> None:
    # A still scene: what tells its tokens apart is a hundredth of their size, and so is what the gradient is made of.
    still = torch.rand(2, 1, 64, generator=generator(1), dtype=torch.float64) * 2
    inputs = [in_bfloat16(still + 0.03 * normal(2 + n, 2, tokens, 64)) for n in range(1 + with_values)]
    exact = run(symmetric_attention_reference, inputs, torch.float64)
    # Scores, attention, its gradient and that of the scores are rounded, each by half an epsilon, and so is the result.
    for error in relative_errors(run(ops.symmetric_attention, inputs, torch.bfloat16), exact):
        assert error <= 2.5 * EPSILON
    plain = relative_errors(run(symmetric_attention_reference, inputs, torch.bfloat16), exact)
    assert plain[1] > 8 * EPSILON, "the case does not test what it says"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_is_what_would_be_computed_again(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    z = picture_patches(6, 2, LONG, 16).to(dtype)
    results = []
    for most, kept in ((2 * LONG**2 * 4, (2, LONG, LONG)), (2 * LONG**2 * 4 - 1, (0,))):
        monkeypatch.setattr(attention_in_torch, "KEPT_BYTES", most)
        assert room_to_keep(attending(z)).shape == kept
        results.append(run(ops.symmetric_attention, [z], dtype))
    assert_equal(*results)


def test_an_attention_no_larger_than_its_tokens_is_always_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_in_torch, "KEPT_BYTES", 0)
    for width, kept in ((2, (2, 4, 4)), (1, (0,))):
        assert room_to_keep(attending(normal(7, 2, 4, width))).shape == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_both_ways_to_add_a_matrix_and_its_transpose(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for width_in_bytes in (0, 2**20):
        monkeypatch.setattr(attention_scores, "BYTES_OF_A_SUM", width_in_bytes)
        results.append(run(ops.symmetric_attention, [normal(10, 2, 9, 5)], dtype, scale=0.7))
    assert_close(*results, tolerance=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [5, 130])
def test_without_a_scale_the_attention_is_uniform_and_constant(width: int, dtype: torch.dtype) -> None:
    # torch writes nothing into the result of some products whose factor is zero: fresh memory holds NaN here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        z, values = normal(12, 2, LONG, width), normal(13, 2, LONG, 3)
        output, grad_z, grad_values = run(ops.symmetric_attention, [z, values], dtype, scale=0.0)
    finally:
        torch.use_deterministic_algorithms(False)
    upstream = (torch.randint(-8, 9, values.shape, generator=generator(5)) / 8).double()
    epsilon = torch.finfo(dtype).eps
    mean = values.to(dtype).double().mean(-2, keepdim=True).expand_as(values)
    assert torch.equal(grad_z, torch.zeros_like(z))
    assert_close([output], [mean], tolerance=4 * epsilon)
    assert_close([grad_values], [upstream.mean(-2, keepdim=True).expand_as(values)], tolerance=4 * epsilon)
