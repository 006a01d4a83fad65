"""What broke when strangers tried it: small lengths' dtypes, numbers no dtype holds, NaN beside padding, width 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.errors import InputError
from tests.ops.ops_cases import leaf, normal

LISTA: dict[str, Any] = {"step": 0.1, "threshold": 0.1}
LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


def lista(dtype: torch.dtype, **options: Any) -> Tensor:
    shapes = (3, 4), (3, 2), (2, 4)
    return ops.lista_step(*(normal(n, *shape, dtype=dtype) for n, shape in enumerate(shapes)), **LISTA | options)


def linear(dtype: torch.dtype, **options: Any) -> Tensor:
    shapes = (3, 2), (2, 4), (3, 4)
    return ops.residual_linear(
        *(normal(n, *shape, dtype=dtype) for n, shape in enumerate(shapes)),
        **{"nonlinearity": "soft_threshold", "threshold": 0.1} | options,
    )


def layer(dtype: torch.dtype, **options: Any) -> Tensor:
    shapes = (2, 3, 4), (2, 3, 2), (2, 4)
    tensors = (normal(n, *shape, dtype=dtype) for n, shape in enumerate(shapes))
    return ops.unrolled_layer(*tensors, **LISTA | options)[0]


def shrunk(dtype: torch.dtype, threshold: float) -> Tensor:
    return ops.soft_threshold(normal(1, 5, dtype=dtype), threshold)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
@pytest.mark.parametrize("tokens", [3, 300])
def test_lengths_of_few_bits(tokens: int, dtype: torch.dtype) -> None:
    z, lengths = normal(1, 2, tokens, 4), torch.tensor([100, 2], dtype=dtype)
    torch.testing.assert_close(
        ops.symmetric_attention(z, lengths=lengths), ops.symmetric_attention(z, lengths=lengths.long()), rtol=0, atol=0
    )


@LOW
@pytest.mark.parametrize("function", [lista, linear, layer, shrunk])
def test_a_threshold_above_the_largest_number_leaves_zeros(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    largest = min(3.4e38, 2 * torch.finfo(dtype).max)
    assert not function(dtype, threshold=largest).any()


@LOW
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lista, "step"),
        (lista, "threshold"),
        (linear, "alpha"),
        (linear, "threshold"),
        (layer, "scale"),
        (layer, "step"),
        (shrunk, "threshold"),
    ],
)
def test_factors_that_no_float32_holds(function: Callable[..., Tensor], name: str, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=f"{name} must be a number that float32 holds"):
        function(dtype, **{name: 1e300})
    with pytest.raises(InputError, match=f"{name} must be a finite number.*beyond the largest float"):
        function(dtype, **{name: 10**5000})
    assert function(torch.float64, **{name: 1e300}).dtype == torch.float64


def test_numbers_beyond_every_float_in_the_losses() -> None:
    states, weight, targets = [normal(1, 3, 2)], normal(2, 4, 2), torch.tensor([0, 1, 2])
    for name, value in {
        "ignore_index": 10**400,
        "chunk_tokens": 2**63,
        "softcap": 10**400,
        "label_smoothing": 10**400,
        "depth_weights": [10**400],
    }.items():
        with pytest.raises(InputError, match=name):
            ops.layerwise_cross_entropy(states, weight, targets, **{name: value})


@pytest.mark.parametrize("weights", [None, [1.0, 2.0]])
@LOW
def test_cross_entropy_of_width_zero(dtype: torch.dtype, weights: list[float] | None) -> None:
    states, weight = leaf(torch.zeros(3, 0, dtype=dtype)), leaf(torch.zeros(4, 0, dtype=dtype))
    total, per_depth, *_ = ops.layerwise_cross_entropy(
        [states, states], weight, torch.tensor([0, 1, 2]), depth_weights=weights
    )
    total.backward()
    torch.testing.assert_close(per_depth, torch.full((2,), 4.0).log())
    assert states.grad is not None


def test_lengths_out_of_range_count_as_the_nearest_in_it() -> None:
    for op in (
        lambda lengths: ops.symmetric_attention(normal(1, 2, 3, 4), lengths=lengths),
        lambda lengths: layer(torch.float64, lengths=lengths),
        lambda lengths: ops.layerwise_reconstruction_loss([normal(1, 2, 3, 4)], normal(2, 2, 3, 4), lengths=lengths)[1],
    ):
        assert torch.equal(op(torch.tensor([9, -2])), op(torch.tensor([3, 0])))


def test_tensors_without_values_have_a_shape() -> None:
    states, dictionary = torch.zeros(2, 3, 4, device="meta"), torch.zeros(4, 4, device="meta")
    for found in (
        ops.symmetric_attention(states, lengths=torch.zeros(2, dtype=torch.int64, device="meta")),
        ops.unrolled_layer(states, states, dictionary, **LISTA)[0],
        ops.lista_step(states, states, dictionary, **LISTA),
        ops.residual_linear(states, dictionary, states),
        ops.soft_threshold(states, 0.1),
    ):
        assert found.is_meta
        assert found.shape == states.shape


@pytest.mark.parametrize("lengths", [[3, 6], [1, 2]])
def test_nan_in_a_gradient_stays_away_from_padding(lengths: list[int]) -> None:
    z, values, codes = (leaf(normal(n, 2, 6, 4)) for n in range(3))
    dictionary, given = normal(3, 4, 4), torch.tensor(lengths)
    results = {
        (z, values): ops.symmetric_attention(z, values, lengths=given),
        (codes, z, values): ops.unrolled_layer(codes, z, dictionary, projection=values, lengths=given, **LISTA)[0],
    }
    for leaves, output in results.items():
        upstream = torch.ones_like(output)
        upstream[0, 0] = float("nan")
        for gradient in torch.autograd.grad(output, leaves, upstream):
            assert gradient[0, 0].isnan().all()
            assert not gradient[0, lengths[0] :].any()
            assert not gradient[1].isnan().any()
