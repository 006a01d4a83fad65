"""Symmetric attention against its formula: gradients, precision, extreme logits, padding, and the energy it lowers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import SymmetricAttentionArguments
from cdt_fast.ops.symmetric_attention import plain as attention_in_torch
from cdt_fast.ops.symmetric_attention import symmetric_attention_reference
from cdt_fast.ops.symmetric_attention.operator import symmetric_attention_forward
from tests.ops.ops_cases import (
    LAYOUTS,
    LOW_DTYPES,
    assert_as_precise_as_torch,
    assert_close,
    assert_compiles,
    assert_equal,
    assert_is_its_formulas,
    assert_repeats,
    generator,
    gradients,
    leaf,
    normal,
    opcheck,
    picture_patches,
    written_attention,
)


def written_out(
    z: Tensor,
    values: Tensor | None = None,
    *,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    energy: bool = False,
) -> Tensor:
    values = z if values is None else values
    if lengths is not None:
        mask = (torch.arange(z.shape[-2]) < lengths.unsqueeze(-1)).unsqueeze(-1)
        z, values = torch.where(mask, z, 0.0), torch.where(mask, values, 0.0)
    return written_attention(z, scale, lengths, energy) @ values


@st.composite
def attention_cases(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.integers(1, 6)
    leading, tokens = tuple(draw(st.lists(st.integers(1, 3), max_size=2))), draw(sizes)
    source = generator(draw(st.integers(0, 10_000)))
    inputs = {"z": normal(source, *leading, tokens, draw(sizes))}
    if draw(st.booleans()):
        inputs["values"] = normal(source, *leading, tokens, draw(sizes))
    lengths = None
    if draw(st.booleans()):
        count = torch.Size(leading).numel()
        drawn = draw(st.lists(st.integers(0, tokens), min_size=count, max_size=count))
        lengths = torch.tensor(drawn).reshape(leading)
    return {
        "inputs": inputs,
        "layouts": {name: draw(st.sampled_from(LAYOUTS)) for name in inputs},
        "upstream_layout": draw(st.sampled_from([*LAYOUTS, "stride 0"])),
        "options": {
            "scale": draw(st.sampled_from([1.0, 0.3, -0.5, 0.0])),
            "energy": draw(st.booleans()),
            "lengths": lengths,
        },
    }


@settings(max_examples=300, deadline=None)
@given(attention_cases())
def test_equals_the_formula_with_every_gradient(case: dict[str, Any]) -> None:
    assert_is_its_formulas(case, ops.symmetric_attention, written_out, symmetric_attention_reference)


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 3])])
@pytest.mark.parametrize("with_values", [False, True])
def test_gradcheck(energy: bool, lengths: Tensor | None, with_values: bool) -> None:
    inputs = [leaf(normal(2, 2, 3, 4)), *([leaf(normal(3, 2, 3, 2))] if with_values else [])]
    assert torch.autograd.gradcheck(
        lambda *given: ops.symmetric_attention(*given, scale=0.7, lengths=lengths, energy=energy), inputs
    )


def test_values_that_are_the_projection_itself_get_both_gradients() -> None:
    alone, handed = leaf(normal(5, 2, 4, 3)), leaf(normal(5, 2, 4, 3))
    upstream = normal(6, 2, 4, 3)
    ops.symmetric_attention(alone).backward(upstream)
    ops.symmetric_attention(handed, handed).backward(upstream)
    assert_close([alone.grad], [handed.grad])


# Precision and extreme values


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_as_precise_as_plain_torch(dtype: torch.dtype, energy: bool) -> None:
    cases = [
        {"z": picture_patches(seed, 4, 20, 64), "values": picture_patches(seed + 50, 4, 20, 144)[..., :100]}
        for seed in range(8)
    ]

    def operation(z: Tensor, values: Tensor) -> list[Tensor]:
        return [ops.symmetric_attention(z, energy=energy), ops.symmetric_attention(z, values, energy=energy)]

    def reference(z: Tensor, values: Tensor) -> list[Tensor]:
        return [symmetric_attention_reference(z, given, energy=energy) for given in (None, values)]

    assert_as_precise_as_torch(operation, reference, cases, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_that_of_the_inputs(dtype: torch.dtype) -> None:
    cases = [
        {"z": picture_patches(seed, 4, 20, 64), "values": picture_patches(seed + 50, 4, 20, 64)} for seed in range(4)
    ]
    assert_as_precise_as_torch(
        lambda **inputs: [ops.symmetric_attention(**inputs)],
        lambda **inputs: [symmetric_attention_reference(**inputs)],
        cases,
        dtype,
        autocast=True,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_narrow_inputs_are_formed_and_normalized_in_float32(dtype: torch.dtype) -> None:
    # Two tokens whose scores differ by less than one unit of bfloat16 at 100, yet by enough to move the weights.
    z = torch.full((3, 64), 1.25, dtype=torch.float64)
    z[1, 0], z[2, :2] = 1.5, 1.125
    exact = symmetric_attention_reference(z, torch.eye(3, dtype=torch.float64))
    given = ops.symmetric_attention(z.to(dtype), torch.eye(3, dtype=dtype))
    assert (given.double() - exact).abs().max() <= torch.finfo(dtype).eps / 2
    plain = symmetric_attention_reference(z.to(dtype), torch.eye(3, dtype=dtype))
    assert (plain.double() - exact).abs().max() > 4 * torch.finfo(dtype).eps, "the case does not test what it says"


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logits_of_ten_thousand(dtype: torch.dtype, energy: bool) -> None:
    z = normal(7, 3, 5, 8)
    z = (100 * z / z.norm(dim=-1, keepdim=True)).to(dtype).double()
    assert ((z @ z.mT).amax() - 1e4).abs() < 1

    def run(function: Any, run_dtype: torch.dtype, scale: float) -> list[Tensor]:
        given = leaf(z.to(run_dtype))
        output = function(given, scale=scale, energy=energy)
        (gradient,) = torch.autograd.grad(output, given, normal(8, *output.shape).to(run_dtype))
        return [output.detach().double(), gradient.double()]

    for scale in (1.0, -1.0):
        exact = run(symmetric_attention_reference, torch.float64, scale)
        given = run(ops.symmetric_attention, dtype, scale)
        plain = run(symmetric_attention_reference, dtype, scale)
        for index in range(2):
            assert torch.isfinite(given[index]).all()
            error, torchs = ((found[index] - exact[index]).abs().max().item() for found in (given, plain))
            assert error <= 1.5 * torchs + torch.finfo(dtype).eps * exact[index].abs().max().item()


@pytest.mark.parametrize("size", [1.0, 100.0, 1e-30])
@pytest.mark.parametrize("energy", [False, True])
def test_tokens_that_are_all_equal_get_their_mean(size: float, energy: bool) -> None:
    z = leaf(size * torch.ones(2, 4, 3, dtype=torch.float64))
    values = normal(9, 2, 4, 5)
    output = ops.symmetric_attention(z, values, energy=energy)
    assert_close([output], [values.mean(-2, keepdim=True).expand(2, 4, 5)])
    output.sum().backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


def test_one_token_sees_itself_alone() -> None:
    z, values = leaf(normal(10, 3, 1, 4)), leaf(normal(11, 3, 1, 2))
    output = ops.symmetric_attention(z, values)
    assert_equal([output], [values])
    found = gradients([output], [z, values], [torch.ones_like(output)])
    assert_equal(found, [torch.zeros_like(z), torch.ones_like(values)])


# The energy


def energy_of(z: Tensor) -> Tensor:
    """`E₁ = −Σ_{i<j} exp(−½‖z_i − z_j‖²) + ½ Σ‖z_i‖²`."""
    distances = (z.unsqueeze(0) - z.unsqueeze(1)).square().sum(-1)
    pairs = torch.exp(-0.5 * distances).triu(1).sum()
    return 0.5 * z.square().sum() - pairs


def count_rises(energy: bool) -> int:
    source, rises = generator(12), 0
    for case in range(400):
        tokens, width = 2 + case % 6, 1 + case % 4
        z = (0.1 + 2 * torch.rand((), generator=source).double()) * normal(source, tokens, width)
        before, after = energy_of(z), energy_of(ops.symmetric_attention(z, energy=energy))
        rises += bool(after > before + 1e-12 * (1 + before.abs()))
    return rises


def test_with_energy_scores_no_step_raises_the_energy_and_without_them_some_do() -> None:
    assert count_rises(energy=True) == 0
    assert count_rises(energy=False) > 20


# Padding


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("with_values", [False, True])
def test_whatever_stands_in_the_padding_reaches_nothing(poison: float, energy: bool, with_values: bool) -> None:
    lengths = torch.tensor([0, 2, 5, 1])
    padding = torch.arange(5) >= lengths.unsqueeze(-1)

    def run(filling: float) -> list[Tensor | None]:
        tensors = [normal(13, 4, 5, 3), *([normal(14, 4, 5, 2)] if with_values else [])]
        leaves = [leaf(tensor.masked_fill(padding.unsqueeze(-1), filling)) for tensor in tensors]
        output = ops.symmetric_attention(*leaves, lengths=lengths, energy=energy)
        return [output, *gradients([output], leaves, [normal(15, *output.shape)])]

    poisoned = run(poison)
    for result in poisoned:
        assert result is not None
        assert torch.isfinite(result).all()
        assert (result[padding] == 0).all()
        assert (result[~padding] != 0).any()
    assert_equal(poisoned, run(0.0))


@pytest.mark.parametrize("tokens", [7, 40])
@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_each_sequence_is_what_it_is_without_its_padding(dtype: torch.dtype, with_values: bool, tokens: int) -> None:
    # More tokens than numbers a token: nothing is kept for the backward. Some lengths are shared, some are not.
    lengths = [3, tokens, 0, 3, tokens + 5, 1, -2, 3]
    leaves = [leaf(normal(40 + n, 8, tokens, width).to(dtype)) for n, width in enumerate((6, 4)[: 1 + with_values])]
    output = ops.symmetric_attention(*leaves, scale=0.5, lengths=torch.tensor(lengths))
    upstream = normal(42, *output.shape).to(dtype)
    found = torch.autograd.grad(output, leaves, upstream)
    for sequence, length in enumerate(lengths):
        count = min(max(length, 0), tokens)
        alone = [leaf(tensor[sequence, :count]) for tensor in leaves]
        expected = ops.symmetric_attention(*alone, scale=0.5)
        right = torch.autograd.grad(expected, alone, upstream[sequence, :count])
        for one, other in zip((output, *found), (expected, *right), strict=True):
            assert_close([one[sequence, :count]], [other], 1e-12 if dtype == torch.float64 else 2e-2)
            assert not one[sequence, count:].any()


@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 3])])
def test_the_attention_is_kept_only_where_a_backward_may_come(lengths: Tensor | None) -> None:
    z = normal(43, 2, 3, 4)
    attention = [
        SymmetricAttentionArguments(z=z, lengths=lengths, keeps=keeps, backend="torch") for keeps in (True, False)
    ]
    kept = [symmetric_attention_forward(one)[2].shape for one in attention]
    assert kept == [(2, 3, 3), (0,)]
    seen = []

    class _Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is symmetric_attention_forward.overload:
                seen.append(args[-2])
            return function(*args, **(kwargs or {}))

    with _Operators():
        ops.symmetric_attention(z, lengths=lengths)
        ops.symmetric_attention(leaf(z), lengths=lengths)
        ops.symmetric_attention(z, leaf(z), lengths=lengths)
        with torch.no_grad():
            ops.symmetric_attention(leaf(z), lengths=lengths)
    assert seen == [False, True, True, False]


@pytest.mark.parametrize("poisoned", [0, 1])
def test_a_nan_token_stays_in_its_sequence(poisoned: int) -> None:
    def run(filling: float | None) -> list[Tensor | None]:
        tensors = [normal(13, 3, 4, 3), normal(14, 3, 4, 2)]
        if filling is not None:
            tensors[poisoned][1, 2] = filling
        leaves = [leaf(tensor) for tensor in tensors]
        output = ops.symmetric_attention(*leaves)
        return [output, *gradients([output], leaves, [normal(15, *output.shape)])]

    poisoned_results, clean = run(float("nan")), run(None)
    for result, expected in zip(poisoned_results, clean, strict=True):
        assert result is not None
        assert expected is not None
        assert_equal([result[[0, 2]]], [expected[[0, 2]]])
    assert poisoned_results[0] is not None
    assert torch.isnan(poisoned_results[0][1]).any(), "a NaN must not vanish either"


# Autograd's contract, repeats, empty inputs, errors


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
def test_repeats_are_bitwise_equal(dtype: torch.dtype) -> None:
    assert_repeats(lambda z: [ops.symmetric_attention(z)], [leaf(picture_patches(1, 4, 20, 64).to(dtype))])


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (0, 4), (3, 0), (0, 0, 0)])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_empty_batches_sequences_and_widths(shape: tuple[int, ...], with_lengths: bool) -> None:
    z = leaf(torch.zeros(shape, dtype=torch.float64))
    lengths = torch.zeros(shape[:-2], dtype=torch.int64) if with_lengths else None
    output = ops.symmetric_attention(z, lengths=lengths)
    assert output.shape == shape
    output.sum().backward()
    assert z.grad is not None
    assert z.grad.shape == shape


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"z": torch.zeros(4)}, r"z must be .*\[\.\.\., T, d\], got \(4,\) float32"),
        ({"z": None}, r"z must be a dense floating-point tensor .* got None"),
        ({"z": torch.zeros(2, 3, 4, dtype=torch.int64)}, r"z must be a dense floating-point .* got .*int64"),
        ({"values": torch.zeros(3)}, r"values must be .*\[\.\.\., T, k\], got \(3,\)"),
        ({"values": torch.zeros(2, 4, 4)}, r"values must have shape \(2, 3, 4\).*got \(2, 4, 4\)"),
        ({"values": torch.zeros(3, 4)}, r"values must have shape \(2, 3, 4\).*got \(3, 4\)"),
        ({"values": torch.zeros(2, 3, 4).double()}, r"values is torch.float64 but z is torch.float32"),
        ({"values": torch.zeros(2, 3, 4, device="meta")}, r"values is on meta but z is on cpu"),
        ({"lengths": torch.tensor([1, 2, 3])}, r"lengths must have shape \(2,\).*got \(3,\)"),
        ({"lengths": torch.tensor(1)}, r"lengths must have shape \(2,\).*got \(\)"),
        ({"lengths": torch.tensor([1.0, 2.0])}, r"lengths must be an integer tensor .* got \(2,\) float32"),
        ({"lengths": torch.tensor([1, 2], device="meta")}, r"lengths is on meta but the tokens are on cpu"),
        ({"scale": float("nan")}, r"scale must be a finite number, got nan"),
        ({"scale": None}, r"scale must be a finite number, got None"),
    ],
)
def test_errors_name_the_argument_what_was_given_and_what_is_expected(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.symmetric_attention(**{"z": torch.zeros(2, 3, 4), **changed})


# The custom op's contract


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 3])])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True), (True, None)])
def test_opcheck(energy: bool, lengths: Tensor | None, trained: tuple[bool, bool | None]) -> None:
    z = normal(30, 2, 3, 4, dtype=torch.float32).requires_grad_(trained[0])
    values = None if trained[1] is None else normal(31, 2, 3, 5, dtype=torch.float32).requires_grad_(trained[1])
    keeps = any(wanted for wanted in trained)
    attention = SymmetricAttentionArguments(
        z=z, values=values, lengths=lengths, scale=0.7, energy=energy, keeps=keeps, backend="torch"
    )
    opcheck(symmetric_attention_forward, attention)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic: bool) -> None:
    def network(z: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        mixed = ops.symmetric_attention(z, values, scale=0.5, lengths=lengths)
        return ops.symmetric_attention(torch.relu(mixed), energy=True)

    def make(tokens: int) -> list[Tensor]:
        return [leaf(normal(32, 2, tokens, 4)), leaf(normal(33, 2, tokens, 6)), torch.tensor([2, tokens])]

    assert_compiles(network, make, [(3,), (5,)], dynamic)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("energy", [False, True])
def test_panels_give_what_all_rows_at_once_give(energy: bool, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    # All three sequences at once; two; one; four rows of its seven; one row.
    for panel_bytes in (2**26, 2 * 7 * 7 * 8, 7 * 7 * 8, 4 * 7 * 8, 1):
        monkeypatch.setattr(attention_in_torch, "PANEL_BYTES", panel_bytes)
        leaves = [leaf(normal(34, 3, 7, 4)), *([] if tied else [leaf(normal(35, 3, 7, 5))])]
        output = ops.symmetric_attention(*leaves, lengths=torch.tensor([7, 0, 4]), energy=energy)
        results.append([output, *gradients([output], leaves, [normal(36, *output.shape)])])
    for found in results[1:]:
        assert_close(found, results[0])


def test_no_gradient_of_padding_arrives_even_where_the_upstream_one_is_nan() -> None:
    z = leaf(normal(37, 2, 3, 4))
    output = ops.symmetric_attention(z, lengths=torch.tensor([3, 1]))
    upstream = torch.ones_like(output)
    upstream[1, 1:] = float("nan")
    (gradient,) = torch.autograd.grad(output, z, upstream)
    assert torch.isfinite(gradient).all()
    assert not gradient[1, 1:].any()
