"""Scores in bfloat16 that are taken relative to their row, and gradients of tokens that are much alike."""

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
from cdt_fast.ops.symmetric_attention.operator import symmetric_attention_forward
from cdt_fast.ops.symmetric_attention.plain import room_to_keep
from tests.ops.ops_cases import (
    assert_as_precise_as_torch,
    assert_close,
    assert_equal,
    generator,
    gradients,
    leaf,
    normal,
    opcheck,
    picture_patches,
)

EPSILON = torch.finfo(torch.bfloat16).eps
LONG = attention_scores.SHORTEST_IN_BFLOAT16


def attending(z: Tensor, **options: Any) -> SymmetricAttentionArguments:
    """What the public function hands on where a gradient is wanted."""
    return SymmetricAttentionArguments(z=z, keeps=True, backend="torch", **options)


@pytest.fixture(params=[True, False], ids=["bf16 products", "no bf16 products"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """One that multiplies bfloat16 by instructions of its own, and one that does not."""
    monkeypatch.setattr(attention_scores, "cpu_has_bf16_products", lambda: request.param)
    return request.param


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


def test_the_dtype_of_the_softmax(processor: bool) -> None:
    narrow = torch.bfloat16 if processor else torch.float32
    for dtype, tokens, energy, expected in (
        (torch.bfloat16, LONG, False, narrow),
        (torch.bfloat16, LONG - 1, False, torch.float32),
        (torch.bfloat16, LONG, True, torch.float32),
        (torch.float16, LONG, False, torch.float32),
        (torch.float32, LONG, False, torch.float32),
        (torch.float64, LONG, False, torch.float64),
    ):
        z = torch.empty(2, tokens, 3, dtype=dtype)
        assert attention_scores.softmax_dtype(z, energy) == expected
        assert attention_scores.softmax_dtype(z.to("meta"), energy) == torch.promote_types(dtype, torch.float32)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_as_precise_as_plain_torch(scale: float) -> None:
    cases = [
        {"z": picture_patches(seed, 2, LONG + 7, 64), "values": picture_patches(seed + 50, 2, LONG + 7, 144)[..., :100]}
        for seed in range(4)
    ]

    def operation(z: Tensor, values: Tensor) -> list[Tensor]:
        return [ops.symmetric_attention(z, scale=scale), ops.symmetric_attention(z, values, scale=scale)]

    def reference(z: Tensor, values: Tensor) -> list[Tensor]:
        return [symmetric_attention_reference(z, given, scale=scale) for given in (None, values)]

    assert_as_precise_as_torch(operation, reference, cases, torch.bfloat16)


@pytest.mark.usefixtures("processor")
def test_scores_that_differ_by_less_than_bfloat16_holds_move_the_weights() -> None:
    # Scores of about 100 that differ by less than one unit of bfloat16 there.
    z = torch.full((3, 64), 1.25, dtype=torch.float64)
    z[1, 0], z[2, :2] = 1.5, 1.125
    z = z.repeat(LONG // 3 + 1, 1)
    values = torch.eye(3, dtype=torch.float64).repeat(LONG // 3 + 1, 1)
    exact = symmetric_attention_reference(z, values)
    # An attention is rounded once, as is its score, which is no larger than 2 here.
    assert (z @ z.mT - z.square().sum(-1, keepdim=True)).abs().max() <= 2
    error = (ops.symmetric_attention(z.bfloat16(), values.bfloat16()).double() - exact).abs()
    assert (error <= EPSILON * exact + EPSILON / 2).all()
    plain = symmetric_attention_reference(z.bfloat16(), values.bfloat16()).double()
    assert (plain - exact).abs().max() > 8 * EPSILON, "the case does not test what it says"


@pytest.mark.usefixtures("processor")
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


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.25])
def test_scores_far_above_that_of_a_token_with_itself(scale: float) -> None:
    # All look to two tokens of larger norm (with a negative scale, of smaller), by weights that are not far apart.
    z = in_bfloat16(2 + 0.01 * normal(1, 2, LONG, 16))
    z[:, 0] *= 3
    z[:, 1] = z[:, 0]
    z[:, 1, 0] += 0.125 * z[:, 1, 0].sign()
    z[:, 2:4] = z[:, :2] * (1 / 64)
    z = in_bfloat16(z)
    values = torch.eye(LONG, dtype=torch.float64).expand(2, -1, -1)
    exact = run(symmetric_attention_reference, [z, values], torch.float64, scale=scale)
    found = run(ops.symmetric_attention, [z, values], torch.bfloat16, scale=scale)
    assert (found[0] - exact[0]).abs().max() <= 2 * EPSILON
    assert not torch.isnan(torch.cat([tensor.flatten() for tensor in found])).any()


def test_no_row_depends_on_what_else_is_in_the_batch() -> None:
    z = picture_patches(3, 3, LONG, 64).bfloat16()
    alone = ops.symmetric_attention(z[:1])
    for index, change in enumerate((20.0, float("inf"), float("nan"))):
        other = z.clone()
        other[1, index] *= change
        assert_equal([ops.symmetric_attention(other)[:1]], [alone])


@pytest.mark.parametrize("filling", [float("nan"), float("inf"), 1e30])
def test_padding_that_is_masked_reaches_nothing(filling: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_in_torch, "COST_OF_A_LENGTH", 2**60)
    lengths = torch.tensor([LONG, 0, 5, 40])
    padding = torch.arange(LONG) >= lengths.unsqueeze(-1)
    tokens = [picture_patches(4, 4, LONG, 64), normal(5, 4, LONG, 8)]
    results = []
    for poison in (filling, 0.0):
        inputs = [tensor.masked_fill(padding.unsqueeze(-1), poison) for tensor in tokens]
        results.append(run(ops.symmetric_attention, inputs, torch.bfloat16, lengths=lengths))
    assert_equal(*results)
    for result in results[0]:
        assert torch.isfinite(result).all()
        assert not result[padding].any()
    exact = run(symmetric_attention_reference, tokens, torch.float64, lengths=lengths)
    assert max(relative_errors(results[0], exact)) <= 2.5 * EPSILON


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_is_what_would_be_computed_again(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    z = picture_patches(6, 2, LONG, 16).to(dtype)
    results = []
    for most, kept in ((2 * LONG**2 * 4, (2, LONG, LONG)), (2 * LONG**2 * 2 - 1, (0,))):
        monkeypatch.setattr(attention_in_torch, "KEPT_BYTES", most)
        assert room_to_keep(attending(z)).shape == kept
        results.append(run(ops.symmetric_attention, [z], dtype))
    assert_equal(*results)


def test_an_attention_no_larger_than_its_tokens_is_always_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_in_torch, "KEPT_BYTES", 0)
    for width, kept in ((2, (2, 4, 4)), (1, (0,))):
        assert room_to_keep(attending(normal(7, 2, 4, width))).shape == kept


@pytest.mark.parametrize("tied", [False, True])
def test_panels_give_what_all_rows_at_once_give(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [picture_patches(8, 2, LONG, 64), *([] if tied else [normal(9, 2, LONG, 8)])]
    exact = run(symmetric_attention_reference, inputs, torch.float64)
    for panel_bytes in (2**26, LONG**2 * 2, 24 * LONG * 2):  # all at once; a sequence; 24 rows of one
        monkeypatch.setattr(attention_in_torch, "PANEL_BYTES", panel_bytes)
        assert max(relative_errors(run(ops.symmetric_attention, inputs, torch.bfloat16), exact)) <= 2.5 * EPSILON


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


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("energy", [False, True])
def test_opcheck(energy: bool) -> None:
    z = normal(11, 2, LONG, 4).bfloat16().requires_grad_()
    opcheck(symmetric_attention_forward, attending(z, scale=0.7, energy=energy))


@pytest.mark.usefixtures("processor")
def test_compiles_without_a_graph_break() -> None:
    def network(codes: Tensor, signal: Tensor, dictionary: Tensor) -> Tensor:
        _, projection = ops.unrolled_layer(codes, signal, dictionary, step=0.1, threshold=0.05)
        return ops.symmetric_attention(projection).float().square().sum()

    results = []
    for function in (network, torch.compile(network, fullgraph=True, backend="aot_eager")):
        shapes = ((2, LONG, 8), (2, LONG, 4), (4, 8))
        leaves = [leaf(normal(20 + index, *shape).bfloat16()) for index, shape in enumerate(shapes)]
        total = function(*leaves)
        results.append([total, *gradients([total], leaves, [torch.ones_like(total)])])
    assert_equal(*results)
