"""What single ops are for: the objective and the energy that they lower, and values at the ends of their range."""

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
from cdt_fast.models.dictionary import overcomplete_dct, squared_spectral_norm
from cdt_fast.ops import products
from cdt_fast.ops.denoising_layer import denoising_layer_reference
from cdt_fast.ops.soft_threshold import soft_threshold_reference
from cdt_fast.ops.symmetric_attention import attention_matrix, symmetric_attention_reference
from tests.ops.battery import (
    LOW_DTYPES,
    Case,
    assert_as_precise,
    assert_as_precise_as_torch,
    assert_close,
    assert_equal,
    build,
    call,
    differentiate,
    formula,
    generator,
    leaf,
    leaves_of,
    normal,
    results,
    variant,
)

# Shrinkage


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
def test_soft_threshold_keeps_nan_and_infinities(dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -1.0, 0.0, 0.25, -0.25], dtype=dtype)
    expected = torch.tensor([math.nan, math.inf, -math.inf, 0.75, -0.75, 0.0, 0.0, 0.0], dtype=dtype)
    # A wide copy too: vectorized code has its own treatment of NaN.
    for copies in (1, 33):
        for threshold in (0.25, torch.tensor(0.25)):
            assert_equal([ops.soft_threshold(x.repeat(copies), threshold)], [expected.repeat(copies)])


def test_a_threshold_of_zero_is_the_identity_with_gradient_one_even_at_zero() -> None:
    zeros = leaf(torch.zeros(2, 3, dtype=torch.float64))
    none = torch.zeros(2, 2, dtype=torch.float64)
    dictionary = normal(3, 2, 3)
    for output in (
        ops.soft_threshold(zeros, 0.0),
        ops.soft_threshold(zeros, torch.zeros(3, dtype=torch.float64)),
        soft_threshold_reference(zeros, 0.0),
        ops.residual_linear(none, dictionary, zeros, nonlinearity="soft_threshold", threshold=0.0),
        ops.lista_step(zeros, none, torch.zeros_like(dictionary), step=0.1, threshold=0.0),
    ):
        assert not output.any()
        assert_equal(torch.autograd.grad(output.sum(), zeros), [torch.ones_like(zeros)])


def test_on_the_threshold_nothing_is_kept_and_no_gradient_passes() -> None:
    residual = leaf(torch.tensor([[0.5, -0.5, 0.75]], dtype=torch.float64))
    case = Case(
        "residual_linear",
        {"x": torch.zeros(1, 1).double(), "weight": torch.zeros(1, 3).double(), "residual": residual},
        {"alpha": 1.0, "threshold": 0.5, "nonlinearity": "soft_threshold"},
    )
    for output in (call(case)[0], formula(case, case.tensors)[0]):
        assert_equal([output], [torch.tensor([[0.0, 0.0, 0.25]], dtype=torch.float64)])
        (gradient,) = torch.autograd.grad(output.sum(), residual)
        assert gradient.tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.parametrize("op", ["soft_threshold", "lista_step", "residual_linear", "unrolled_layer"])
def test_a_threshold_above_the_largest_number_leaves_zeros(op: str) -> None:
    for dtype in LOW_DTYPES:
        options = {"nonlinearity": "soft_threshold"} if op != "soft_threshold" else {}
        largest = min(3.4e38, 2 * torch.finfo(dtype).max)
        assert not call(build(op, threshold=largest, **options).to(dtype))[0].any()


# The LISTA step


def objective(codes: Tensor, signal: Tensor, dictionary: Tensor, sparsity: float) -> Tensor:
    """`½‖x − h Dᵀ‖² + λ₁‖h‖₁` of each token."""
    return 0.5 * (signal - codes @ dictionary.T).square().sum(-1) + sparsity * codes.abs().sum(-1)


@settings(max_examples=60, deadline=None)
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


# Attention


def energy_of(z: Tensor) -> Tensor:
    """`E₁ = −Σ_{i<j} exp(−½‖z_i − z_j‖²) + ½ Σ‖z_i‖²`."""
    distances = (z.unsqueeze(0) - z.unsqueeze(1)).square().sum(-1)
    return 0.5 * z.square().sum() - torch.exp(-0.5 * distances).triu(1).sum()


def count_rises(energy: bool) -> int:
    source, rises = generator(12), 0
    for case in range(400):
        z = normal(source, 2 + case % 6, 1 + case % 4) * (0.1 + 2 * torch.rand((), generator=source).double())
        before, after = energy_of(z), energy_of(ops.symmetric_attention(z, energy=energy))
        rises += bool(after > before + 1e-12 * (1 + before.abs()))
    return rises


def test_with_energy_scores_no_step_raises_the_energy_and_without_them_some_do() -> None:
    assert count_rises(energy=True) == 0
    assert count_rises(energy=False) > 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_narrow_inputs_are_formed_and_normalized_in_float32(dtype: torch.dtype) -> None:
    # Two tokens whose scores differ by less than one unit of bfloat16 at 100, yet by enough to move the weights.
    z = torch.full((3, 64), 1.25, dtype=torch.float64)
    z[1, 0], z[2, :2] = 1.5, 1.125
    exact = symmetric_attention_reference(z, torch.eye(3, dtype=torch.float64))
    found, plain = (
        function(z.to(dtype), torch.eye(3, dtype=dtype)).double()
        for function in (ops.symmetric_attention, symmetric_attention_reference)
    )
    assert (found - exact).abs().max() <= torch.finfo(dtype).eps / 2
    assert (plain - exact).abs().max() > 4 * torch.finfo(dtype).eps, "the case does not test what it says"


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logits_of_ten_thousand(dtype: torch.dtype, scale: float, energy: bool) -> None:
    z = 100 * torch.nn.functional.normalize(normal(7, 3, 5, 8), dim=-1).to(dtype)
    cases = [
        Case("symmetric_attention", {"z": z.to(d)}, {"scale": scale, "energy": energy}) for d in (dtype, torch.float64)
    ]
    for each in zip(results(cases[0]), results(cases[0], formula), results(cases[1], formula), strict=True):
        assert_as_precise("output or gradient", *each, torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["symmetric_attention", "symmetric_attention with all", "unrolled_layer with all"])
def test_scores_too_many_to_hold_are_computed_in_parts(name: str) -> None:
    """4,200 tokens: their scores alone take 70 MB, more than is held or kept."""
    case = variant(name, leading=(1,), tokens=4200, width=2, atoms=2).to(torch.float32)
    if "lengths" in case.options:
        case.options["lengths"] = torch.tensor([4100])
    for each in zip(results(case), results(case, formula), results(case.to(torch.float64), formula), strict=True):
        assert_as_precise("output or gradient", *each, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", ["symmetric_attention", "symmetric_attention with all", "unrolled_layer with all"])
def test_scores_of_many_narrow_tokens_have_no_sum_with_their_transpose(name: str) -> None:
    case = variant(name, tokens=70, width=2)
    assert_close(results(case), results(case, formula))


@pytest.mark.parametrize(
    ("op", "extras"),
    [("symmetric_attention", ()), ("symmetric_attention", ("values", "lengths")), ("unrolled_layer", ("lengths",))],
)
@pytest.mark.parametrize("scale", [1.0, -0.5, 0.0])
def test_many_tokens_in_bfloat16(
    op: str, extras: tuple[str, ...], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cpu_has_bf16_products", lambda: True)
    options = {"tokens": 70, "width": 40, "scale": scale, **({"threshold": 0.0} if op == "unrolled_layer" else {})}
    drawn = (build(op, *extras, seed=seed, **options) for seed in itertools.count())
    assert_as_precise_as_torch(drawn, torch.bfloat16)
    tokens = normal(0, 2, 70, 8, dtype=torch.bfloat16).requires_grad_()
    torch.library.opcheck(torch.ops.cdt_fast.symmetric_attention, (tokens, None, None, scale, False, True, "torch"))


# Lengths


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("tokens", [3, 300])
def test_lengths_of_few_bits(tokens: int, dtype: torch.dtype) -> None:
    z, lengths = normal(1, 2, tokens, 4), torch.tensor([100, 2], dtype=dtype)
    assert_equal([ops.symmetric_attention(z, lengths=lengths)], [ops.symmetric_attention(z, lengths=lengths.long())])


def test_a_nan_in_an_upstream_gradient_stays_away_from_padding_and_from_other_samples() -> None:
    for name in ("symmetric_attention with all", "unrolled_layer with all"):
        case = variant(name, tokens=6)
        case.options["lengths"] = torch.tensor([3, 6])
        leaves = leaves_of(case)
        output = call(case, leaves)[0]
        upstream = torch.ones_like(output)
        upstream[0, 0] = float("nan")
        rows = [leaf for leaf in leaves.values() if leaf.dim() == 3]
        for gradient in torch.autograd.grad(output, rows, upstream):
            assert not gradient[0, 3:].any()
            assert not gradient[1].isnan().any()


# The layer


def test_the_dictionary_itself_as_the_next_one_gets_one_gradient() -> None:
    case, leaves = build("unrolled_layer"), leaves_of(build("unrolled_layer"))
    outputs = call(case, {**leaves, "next_dictionary": leaves["dictionary"]})
    assert_close([*outputs, *differentiate(outputs, list(leaves.values()))], results(case))


@pytest.mark.parametrize("extras", [(), ("projection", "next_dictionary")])
def test_casts_of_the_caller_take_the_place_of_the_layer_s_own(extras: tuple[str, ...]) -> None:
    case, found = build("unrolled_layer", *extras).to(torch.float32), []
    for cast_before in (False, True):
        leaves = leaves_of(case)
        casts = [
            None if (d := leaves.get(n)) is None else d.detach().bfloat16() for n in ("dictionary", "next_dictionary")
        ]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            given: Any = {**leaves, **({"casts": tuple(casts)} if cast_before else {})}
            outputs = call(case, given)
        found.append([*outputs, *differentiate(outputs, list(leaves.values()))])
    assert_equal(*found)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_scores_of_bright_tokens_are_formed_in_float32(dtype: torch.dtype, requires_grad: bool) -> None:
    """Of a still scene sixteen times the noise: squares of its norm leave float16, and their digits bfloat16."""
    scene = 16 * normal(1, 256)
    noisy, features = scene + normal(2, 20, 256), scene + 0.3 * normal(3, 20, 256)
    wide = noisy, features, torch.linalg.qr(normal(4, 256, 256))[0], torch.full((256,), 3.0).double()
    numbers = {"scale": torch.tensor(0.03), "self_bias": torch.tensor(0.5), "sharpness": torch.tensor(2.0)}
    low = [tensor.to(dtype) for tensor in wide]
    lows = {name: number.to(dtype) for name, number in numbers.items()}
    right = ops.denoising_layer(*(tensor.double() for tensor in low), **{n: v.double() for n, v in lows.items()})
    found = ops.denoising_layer(*(tensor.requires_grad_(requires_grad) for tensor in low), **lows)
    error = (found.tokens.double() - right.tokens).norm() / (right.tokens - scene).norm()
    assert error < {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.6}[dtype]


def test_the_error_is_summed_in_float32_and_weight_zero_gives_no_gradient_where_it_is_infinite() -> None:
    case = build("unrolled_layer", "target").to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, projection, error = call(case)
    assert (projection.dtype, error.dtype) == (torch.bfloat16, torch.float32)
    exact = (projection.double() - case.options["target"].double()).square().sum()
    assert error.item() == pytest.approx(exact.item(), rel=1e-5)

    case.options["target"][1, 2, 0] = float("inf")
    leaves = leaves_of(case)
    outputs = call(case, leaves)
    assert torch.isinf(outputs[2])
    upstream = [torch.ones_like(output) for output in outputs[:2]]
    expected = torch.autograd.grad(outputs[:2], list(leaves.values()), upstream, retain_graph=True)
    zero = torch.zeros_like(outputs[2])
    assert_close(torch.autograd.grad(outputs, list(leaves.values()), [*upstream, zero]), expected, 1e-6)


@pytest.mark.parametrize("target_dtype", [*LOW_DTYPES, torch.float64], ids=str)
def test_a_target_in_another_dtype(target_dtype: torch.dtype) -> None:
    for dtype in LOW_DTYPES:
        case, found = build("unrolled_layer", "target").to(dtype), []
        held = case.options["target"].bfloat16().half()  # what all four hold
        for each in (target_dtype, dtype):
            case.options["target"] = held.to(each)
            found.append(results(case))
        assert found[0][2].dtype == torch.float32
        if target_dtype == torch.float64:  # Z⁺ − S is formed in it then, and rounded once
            assert_close(*found, tolerance=1e-2 if dtype != torch.float32 else 1e-6)
        else:
            assert_equal(*found)


# Numbers, and what is kept for a backward


def test_numbers_of_numpy_and_tensors_of_one_element_are_numbers() -> None:
    for op in ("lista_step", "unrolled_layer"):
        expected = results(build(op, step=0.25, threshold=0.5))
        assert_equal(results(build(op, step=np.float64(0.25), threshold=np.float32(0.5))), expected)
    assert_equal(results(build("unrolled_layer", step=torch.tensor(0.25), threshold=torch.tensor([0.5]))), expected)


@pytest.mark.parametrize(
    ("op", "trained", "most"),
    [
        ("lista_step", ("codes", "signal"), 4 * 5 + 6 * 5),
        ("lista_step", ("dictionary",), 4 * 5 + 6 * 4 + 2 * 6 * 5),
        ("residual_linear", ("x",), 4 * 5 + 6 * 5),
        ("residual_linear", ("weight",), 6 * 4 + 6 * 5),
        ("residual_linear", ("residual",), 6 * 5),
        ("symmetric_attention", (), 0),
    ],
)
def test_only_what_a_wanted_gradient_reads_is_kept(op: str, trained: tuple[str, ...], most: int) -> None:
    """Of two sequences of three tokens, four numbers wide, with five atoms: as many numbers."""
    case, kept = build(op), 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    leaves = {name: tensor.clone().requires_grad_(name in trained) for name, tensor in case.tensors.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(case, leaves)
    assert kept <= most


def test_autocast_rounds_no_gradient_of_a_bias_in_between() -> None:
    case = build("residual_linear", "bias", leading=(4000,), nonlinearity="identity").to(torch.float32)
    leaves = leaves_of(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (output,) = call(case, leaves)
    upstream = torch.randint(0, 9, output.shape, generator=generator(1)).to(torch.bfloat16)
    # Sums of thousands of small integers, which float32 holds and bfloat16 does not.
    assert_equal(torch.autograd.grad(output, leaves["residual"], upstream), [upstream.float().sum((0, 1))])


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("tokens", [30, 70])
def test_scores_of_bfloat16_are_exact_where_weights_are_large(
    tokens: int, energy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cpu_has_bf16_products", lambda: True)  # else the factors are made wide
    draw = generator(0)
    # Much alike and of norm 20: their scores, of 400, differ by little, and bfloat16 would round them by up to 1.
    z = (20 * torch.randn(64, generator=draw) / 8 + 0.3 * torch.randn(2, tokens, 64, generator=draw)).bfloat16()
    scores = 0.5 * z.double() @ z.double().mT
    own = scores.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    # What is rounded, to 2^-8: the score less its row's own, which has been rounded thrice.
    rounded = (scores - own).abs().amax(-1, keepdim=True) + 3 * 2.0**-8 * own
    found, expected = attention_matrix(z, 0.5, None, energy=energy), torch.softmax(scores - 0.5 * own.mT * energy, -1)
    # Twice: a row's sum has the error of its terms. Then the weight is rounded.
    assert ((found / expected).log().abs() <= 2.0**-8 * (2 * rounded + 1)).all()
    assert rounded.amax() < own.amin() / 4


def test_small_thresholds_denoise_in_float16() -> None:
    # In units of such thresholds the codes of this signal are beyond 65504.
    signal = (2 + normal(1, 2, 16, 32)).half()
    case = signal, signal, torch.eye(32).half(), torch.full((32,), 1e-5).half()
    scale, self_bias, sharpness = (torch.tensor(number).half() for number in (0.01, 0.0, 5.0))
    outputs = ops.denoising_layer(*case, scale=scale, self_bias=self_bias, sharpness=sharpness)
    exact = denoising_layer_reference(*(each.double() for each in (*case, scale, self_bias, sharpness)))
    for found, right in zip(outputs, exact, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=5e-3, atol=0)
