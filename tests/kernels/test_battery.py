"""Every op on its kernels against its formula: what `tests/ops/test_battery.py` asks of plain torch.

Sizes lie around the tiles of the kernels, inputs lie between NaN, and fresh memory is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.checks import InputError
from cdt_fast.ops import common
from cdt_fast.ops.layerwise_cross_entropy import layerwise_cross_entropy_reference
from cdt_fast.ops.symmetric_attention import symmetric_attention_reference
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference
from tests.ops.battery import (
    OF_SAMPLES,
    OPERATORS,
    OPTIONS,
    PADDED,
    VARIANTS,
    Case,
    assert_a_nan_shows_in_its_sample,
    assert_as_precise_as_torch,
    assert_close,
    assert_equal,
    assert_frozen_tensors_change_nothing,
    assert_padding_reaches_nothing,
    assert_repeats,
    between_nan,
    build,
    call,
    differentiate,
    formula,
    laid_out,
    leaves_of,
    normal,
    results,
    variant,
)

DENOISING = tuple(name for name, (op, _, _) in VARIANTS.items() if op == "denoising_layer")
EVERY = pytest.mark.parametrize("name", [*OPERATORS, *DENOISING])
F32 = 2.0**-23
# Sequences, tokens, width and atoms: one, around a tile of 16, over several tiles of every table, beyond what a tile
# holds (64 tokens, a width of 256).
SIZES = {
    "ones": (1, 1, 1, 1),
    "below and above a tile": (3, 15, 17, 16),
    "above and below a tile": (3, 17, 15, 17),
    "several in a tile": (7, 5, 33, 33),
    "several tiles": (2, 64, 70, 140),
    "long": (1, 200, 20, 41),
    "wide": (2, 3, 259, 20),
}
QUICK_SIZES = ("ones", "several in a tile")
# A call of each op with all that it can take: the rest of `VARIANTS` is slow where a test says so.
FULLEST = (
    *("lista_step", "residual_linear with a bias", "symmetric_attention with all", "unrolled_layer with all"),
    *("layerwise_reconstruction_loss with all", "layerwise_cross_entropy with all"),
    "denoising_layer with numbers of sequences",
)


def slow_unless(quick: Sequence[str], names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]


FULLEST_FIRST = pytest.mark.parametrize("name", slow_unless(FULLEST, (*OPERATORS, *DENOISING)))


def drawn(name: str, sizes: str, **changes: Any) -> Iterator[Case]:
    """Cases of one size; without a kink where there are too many codes for none to lie on it."""
    op, extras, options = VARIANTS[name]
    sequences, tokens, width, atoms = SIZES[sizes]
    if sizes not in ("ones", "several in a tile") and "nonlinearity" in OPTIONS[op]:
        options = {**options, "threshold": 0.0, "nonlinearity": "soft_threshold"}
    if options.get("chunk_tokens"):
        options = {**options, "chunk_tokens": 20}
    given = {"leading": (sequences,), "tokens": tokens, "width": width, "atoms": atoms, **options, **changes}
    return (build(op, *extras, seed=seed, **given) for seed in itertools.count())


@pytest.mark.parametrize("sizes", slow_unless(QUICK_SIZES, SIZES))
@EVERY
def test_is_its_formula_with_every_gradient(name: str, sizes: str, device: torch.device, dtype: torch.dtype) -> None:
    assert_as_precise_as_torch(drawn(name, sizes), dtype, device, draws=2, placed=between_nan, products=F32)


# What `make test` emulates: rows that are aligned, with the blocks that the card gets.
@pytest.mark.emulated
@FULLEST_FIRST
def test_is_its_formula_with_the_blocks_of_the_card(name: str, device: torch.device, dtype: torch.dtype) -> None:
    sizes = {"leading": (2,), "tokens": 20, "width": 40, "atoms": 72}
    given = drawn(name, "several tiles", **sizes)
    draws = 4 if device.type == "cuda" else 1  # the emulator takes seconds for each
    assert_as_precise_as_torch(given, dtype, device, draws=draws, placed=Tensor.clone, products=F32)


def test_a_layer_with_the_blocks_of_an_h200(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of four warps: dU Hᵀ is summed in the loop that computes dU.
    monkeypatch.setattr(common, "card_of", lambda tensor: common.CARDS["H200"])
    given = drawn("unrolled_layer", "several tiles", leading=(7,), tokens=20, scale=0.02)
    assert_as_precise_as_torch(given, torch.float16, device, draws=1, placed=between_nan, products=F32)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        *(("lista_step", {"nonlinearity": name}) for name in ("relu",)),
        *(("residual_linear", {"nonlinearity": name}) for name in ("soft_threshold", "identity")),
        *(("unrolled_layer", {"nonlinearity": name}) for name in ("relu",)),
        *(("symmetric_attention", {"scale": scale, "energy": True}) for scale in (-0.5, 0.0)),
        ("layerwise_cross_entropy", {"softcap": 3.0, "reduction": "sum"}),
        ("layerwise_cross_entropy", {"depth_weights": [0.5, 0.0, -2.0]}),
        ("layerwise_reconstruction_loss", {"depth_weights": [0.5, 0.0, -2.0]}),
    ],
)
def test_options(op: str, options: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    given = drawn(op, "several in a tile", **options)
    assert_as_precise_as_torch(given, dtype, device, draws=2, placed=between_nan, products=F32)


@pytest.mark.parametrize("name", ["symmetric_attention", "lista_step", "residual_linear with a bias"])
def test_products_in_tf32(name: str, device: torch.device, emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if common.interpreting():
        pytest.skip("the interpreter has no TF32")
    monkeypatch.setattr(common, "dot_precision", lambda dtype: "tf32" if dtype == torch.float32 else "ieee")
    assert_as_precise_as_torch(drawn(name, "several in a tile"), torch.float32, device, draws=2, products=2.0**-10)
    case = next(drawn(name, "several in a tile")).to(device, torch.float32)
    found = call(case)[0]
    monkeypatch.setattr(common, "dot_precision", lambda dtype: "ieee")
    # Ten bits of a factor, and not the 23 of a float32.
    assert 1e-5 < (found - call(case)[0]).abs().max() < 1e-1


# Places in memory


@pytest.mark.parametrize("layout", ["transposed", "inside a poisoned buffer", "stride 0"])
@FULLEST_FIRST
def test_strides(name: str, layout: str, dtype: torch.dtype, device: torch.device) -> None:
    case = variant(name, leading=(3,), tokens=19, width=18, atoms=33).to(device, dtype)
    found = []
    for place in ("contiguous", layout):
        leaves = {name: tensor.detach() for name, tensor in case.tensors.items()}
        if layout == "stride 0":  # one sequence for all
            leaves = {name: t[:1].expand_as(t) if t.dim() == 3 else t for name, t in leaves.items()}
        if place == "contiguous" or layout != "stride 0":
            leaves = {name: laid_out(tensor, place) for name, tensor in leaves.items()}
        leaves = {name: tensor.requires_grad_() for name, tensor in leaves.items()}
        outputs = call(case, leaves)
        found.append(
            [*outputs, *differentiate(outputs, list(leaves.values()), place if layout != "stride 0" else layout)]
        )
    # Where sixteen divides the addresses another kernel is compiled, which may sum in another order.
    assert_close(*found, tolerance=1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("far", ["x", "weight", "residual"])
def test_offsets_beyond_32_bits(far: str, dimension: int, device: torch.device) -> None:
    """The 2³¹ numbers before the first are zero: an offset that wraps around reads those, and does not crash."""
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    case = build("residual_linear", leading=(), tokens=3, width=3, atoms=3).to(device, torch.float16)
    expected, near, size = call(case), case.tensors[far], 2**32 + 16
    lazy = torch.zeros if device.type == "cuda" else lambda *_, **__: torch.from_numpy(np.zeros(2 * size, np.uint8))
    buffer = lazy(size, dtype=torch.float16, device=device).view(torch.float16)
    strides = [1, 1]
    strides[dimension] = 2**30
    case.tensors[far] = buffer.as_strided(near.shape, strides, 2**31).copy_(near)
    assert_equal(call(case), expected)


@pytest.mark.parametrize("tokens", [64, 80])
def test_more_sequences_than_32_bits_count_numbers_of(tokens: int, device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs a GPU with 40 GiB")
    last = normal(1, 1, tokens, 256).to(device, torch.float16) / 4
    z = last.new_zeros(2**31 // (tokens * 256) + 1, tokens, 256)
    z[-1:] = last
    found = []
    for given in (last, z):
        leaf = given.requires_grad_()
        output = ops.symmetric_attention(leaf, scale=0.5)
        (gradient,) = torch.autograd.grad(output, leaf, torch.ones((), device=device).half().expand_as(output))
        found.append([output[-1:].detach(), gradient[-1:]])
    assert_equal(*found)


@EVERY
def test_empty(name: str, device: torch.device) -> None:
    op, extras, options = VARIANTS[name]
    every: Any = ({"leading": (0,)}, {"tokens": 0}, {"width": 0}, {"atoms": 0}, {"tokens": 70, "width": 0})
    for sizes in every:
        if op.startswith("layerwise") and set(sizes) != {"width"}:
            continue  # which has no mean
        given = build(op, *extras, **options, **sizes)
        with ops.use_backend("torch"):
            expected = results(given.to(device, torch.float32))
        assert_close(results(given.to(device, torch.float32)), expected, 1e-6)


# Values


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", PADDED)
def test_what_stands_in_the_padding_reaches_nothing(name: str, poison: float, device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        assert_padding_reaches_nothing(name, poison, dtype, device)


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_a_sample_that_is_not_finite_shows(name: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        assert_a_nan_shows_in_its_sample(name, dtype, device, alone=False)


@FULLEST_FIRST
def test_repeats_are_bitwise_equal(name: str, device: torch.device, dtype: torch.dtype) -> None:
    assert_repeats(name, dtype, device)


@FULLEST_FIRST
def test_frozen_tensors_get_no_gradient_and_change_no_other(name: str, device: torch.device) -> None:
    assert_frozen_tensors_change_nothing(name, torch.float32, device, 1e-5)


def test_rows_of_padding_read_no_key(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not common.interpreting():
        pytest.skip("counts calls in the interpreter")
    from cdt_fast.kernels import symmetric_attention as kernels

    calls, scores = [], kernels.pair_scores
    monkeypatch.setattr(kernels, "pair_scores", lambda *given: calls.append(given[4]) or scores(*given))
    z = normal(1, 3, 200, 16).float().requires_grad_()
    ops.symmetric_attention(z, lengths=torch.tensor([0, 5, 70])).sum().backward()
    # Of 64 and then of 32 rows, against 32 keys and then 64: one block, and of 70 tokens two and three.
    assert len(calls) == (1 + 2 * 3) + (1 + 3 * 2)


def test_products_sum_in_float32(device: torch.device) -> None:
    # 4096 and then 64 chunks that add 1 each: float16 would stay at 4096, whose next neighbor is 4100.
    codes = torch.full((16, 1024), 1 / 16, dtype=torch.float16, device=device)
    codes[:, 0] = 4096
    ones, none = torch.ones_like(codes), codes.new_zeros(16, 16)
    assert (ops.residual_linear(codes, ones.mT, none) == 4160).all()
    dictionary = ones.requires_grad_()
    output = ops.lista_step(none, codes.mT.new_zeros(16, 1024), ones.mT, step=1.0, threshold=0.0)
    assert output.shape == (16, 16)
    _, projection = ops.unrolled_layer(codes[None], none[None], dictionary, step=0.0, threshold=0.0)[:2]
    assert (projection == 4160).all()


@pytest.mark.parametrize("tokens", [7, 70])
@pytest.mark.parametrize(("scale", "energy"), [(1.0, False), (-1.0, True)])
def test_attention_to_logits_of_ten_thousand(tokens: int, scale: float, energy: bool, device: torch.device) -> None:
    options = {"leading": (2,), "tokens": tokens, "width": 17, "scale": scale, "energy": energy}
    case = build("symmetric_attention", "values", **options)
    z = 100 * torch.nn.functional.normalize(case.tensors["z"], dim=-1)
    # Where all tokens are alike a gradient cancels only if their logits are equal: of integers they are exact, in
    # whatever order a processor sums them.
    for given in (z, z[:1, :1].round().expand_as(z)):
        case.tensors["z"] = given.float().double()
        narrow = case.to(torch.float32)
        found = results(narrow.to(device)), results(narrow, formula), results(case, formula)
        for mine, torchs, true in zip(*found, strict=True):
            errors = [(one.double().cpu() - true).abs().max() for one in (mine, torchs)]
            # A logit rounds by a share of its size. Its gradient is a difference of two sums of five products, which
            # are equal where a token sees itself alone, and is multiplied by z twice.
            assert errors[0] <= 1.5 * errors[1] + F32 * (2e4 * true.abs().max() + 4 * 100 * 5)


@pytest.mark.parametrize("tokens", [7, 70])
def test_gradients_of_tokens_that_are_much_alike(tokens: int, device: torch.device, dtype: torch.dtype) -> None:
    # A still scene: what tells its tokens apart is a hundredth of their size, and so is what the gradient is made of.
    if dtype == torch.float32:
        pytest.skip("keeps no remainder")
    still = torch.rand(2, 1, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    z = (2 * still + 0.03 * normal(4, 2, tokens, 64)).to(dtype)
    upstream = normal(6, 2, tokens, 64).to(dtype)
    found = []
    for function, kept, place in (
        (ops.symmetric_attention, dtype, device),
        (symmetric_attention_reference, torch.float64, torch.device("cpu")),
    ):
        leaf = z.to(place, kept).requires_grad_()
        found.append(torch.autograd.grad(function(leaf, scale=0.6), leaf, upstream.to(leaf))[0].double().cpu())
    # Weights, gradient of the scores and result are rounded, each by half an epsilon.
    assert (found[0] - found[1]).norm() <= 2 * torch.finfo(dtype).eps * found[1].norm()


@pytest.mark.parametrize("tokens", [7, 70])
@pytest.mark.parametrize("op", ["symmetric_attention", "unrolled_layer"])
def test_gradients_of_tokens_in_gray_levels(op: str, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
    # Float16 does not hold the product of their β and the gradient of the scores.
    scale, upstream = 1 / (32 * 300**2), normal(4, 2, tokens, 40).to(dtype)
    codes, dictionary = normal(1, 2, tokens, 40).to(dtype), (300 / 40**0.5 * normal(2, 32, 40)).to(dtype)
    found = []
    for own, kept, place in ((True, dtype, device), (False, torch.float64, torch.device("cpu"))):
        h, leaf = codes.to(place, kept), dictionary.to(place, kept).requires_grad_()
        if op == "symmetric_attention":
            attention: Any = ops.symmetric_attention if own else symmetric_attention_reference
            output = attention(h @ leaf.mT, h, scale=scale)
        else:
            layer: Any = ops.unrolled_layer if own else unrolled_layer_reference
            output = layer(h, h.new_zeros(2, tokens, 32), leaf, step=0.0, threshold=0.0, scale=scale)[0]
        found.append(torch.autograd.grad(output, leaf, upstream.to(output))[0].double().cpu())
    assert (found[0] - found[1]).norm() <= (4 * torch.finfo(dtype).eps + F32) * found[1].norm()


# The cross-entropy of given logits: its head is the identity


def of_logits(
    logits: Tensor, targets: Tensor, device: torch.device, dtype: torch.dtype, **options: Any
) -> list[list[Tensor]]:
    """Losses and gradients of the logits, by the op, by the formula in float32 and in float64."""
    found = []
    for function, kept, place in (
        (lambda *given, **more: ops.layerwise_cross_entropy(*given, **more)[1], dtype, device),
        (layerwise_cross_entropy_reference, torch.float32, device),
        (layerwise_cross_entropy_reference, torch.float64, torch.device("cpu")),
    ):
        leaf = logits.to(dtype).to(place, kept).requires_grad_()
        head = torch.eye(logits.shape[1], device=place, dtype=kept)
        losses = function([leaf], head, targets.to(place), reduction="sum", **options)
        found.append([losses.detach().double().cpu(), torch.autograd.grad(losses.sum(), leaf)[0].double().cpu()])
    return found


@pytest.mark.parametrize(("softcap", "smoothing"), [(None, 0.0), (None, 0.1), (2.5, 0.1)])
@pytest.mark.parametrize("kind", ["large", "equal", "confident", "falling", "rising", "tiny"])
def test_extreme_logits(
    kind: str, softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype
) -> None:
    vocabulary = 4200  # more than a block
    targets = torch.tensor([0, 40, 4199])
    logits = {
        "large": 1e4 * normal(1, 3, vocabulary).clamp(-3, 3),
        "equal": torch.full((3, vocabulary), -1e4, dtype=torch.float64),
        "confident": 30 * torch.nn.functional.one_hot(targets, vocabulary).double(),
        "falling": torch.linspace(1e4, -1e4, vocabulary, dtype=torch.float64).expand(3, -1),
        "rising": torch.linspace(-1e4, 1e4, vocabulary, dtype=torch.float64).expand(3, -1),
        "tiny": 1e-4 * normal(2, 3, vocabulary),
    }[kind]
    given, plain, exact = of_logits(logits, targets, device, dtype, softcap=softcap, label_smoothing=smoothing)
    # The log-sum-exp of a row is kept in float32, and probabilities are taken from it.
    size = logits.abs().max() if softcap is None else softcap
    bounds = F32 * (exact[0].abs().max() + size), torch.finfo(dtype).eps + F32 * size
    for mine, torchs, true, rounding in zip(given, plain, exact, bounds, strict=True):
        assert torch.isfinite(mine).all()
        assert (mine - true).abs().max() <= 1.5 * (torchs - true).abs().max() + rounding


def test_the_softcap_keeps_its_digits(device: torch.device) -> None:
    # exp alone would be off by 6e-8 · softcap, whatever the logits' size.
    values = torch.logspace(-6, 1, 24, dtype=torch.float64)
    logits = torch.stack([values, torch.zeros_like(values)], 1)
    targets = torch.ones(24, dtype=torch.int64)
    for softcap in (4.0, 1000.0):
        given, _, exact = of_logits(logits, targets, device, torch.float32, softcap=softcap)
        assert ((given[1] - exact[1]).abs() <= 1e-6 * exact[1].abs() + 2e-7).all()
    ratios = torch.linspace(-8, 8, 17, dtype=torch.float64)
    logits = torch.stack([2 * ratios, torch.zeros_like(ratios)], 1)
    given, _, _ = of_logits(logits, targets[:17], device, torch.float32, softcap=2.0)
    right = torch.sigmoid(2 * torch.tanh(ratios)) / torch.cosh(ratios) ** 2
    assert ((given[1][:, 0] - right).abs() <= 5e-6 * right).all()


def test_a_bias_of_minus_infinity_is_a_class_that_cannot_be(device: torch.device) -> None:
    case = build("layerwise_cross_entropy", "bias", atoms=4200)
    case.tensors["bias"][:2048] = float("-inf")  # a whole block without a finite number, and the first one
    case.options["targets"].fill_(2060)
    found = results(case.to(device, torch.float32))
    with ops.use_backend("torch"):
        assert_close(found, results(case.to(device, torch.float32)), 1e-5)


# The choice of the backend


def test_float64_is_refused_with_the_reason(device: torch.device) -> None:
    for name in OPERATORS:
        case = variant(name).to(device)
        with pytest.raises(InputError, match=rf"cannot run {case.op} here: .* not in float64"):
            call(case)
        with ops.use_backend("auto"):
            found = call(case)
        with ops.use_backend("torch"):
            assert_equal(call(case), found)
    depths = [torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device, dtype=torch.float64)]
    with pytest.raises(InputError, match=r"cannot run layerwise_reconstruction_loss here: .* not in float64"):
        ops.layerwise_reconstruction_loss(depths, torch.zeros(2, 3, device=device))


@FULLEST_FIRST
def test_the_gradient_runs_where_the_forward_has_run(name: str, device: torch.device) -> None:
    case = variant(name, tokens=20, width=30, atoms=50).to(device, torch.float32)
    orders: Any = (("torch", "triton"), ("triton", "torch"))
    for forward, backward in orders:
        with ops.use_backend(forward):
            expected, leaves = results(case), leaves_of(case)
            outputs = call(case, leaves)
        with ops.use_backend(backward):
            found = differentiate(outputs, list(leaves.values()))
        assert_equal(found, expected[len(outputs) :])


@pytest.mark.parametrize(
    "name", slow_unless(FULLEST, [name for name in OPERATORS if VARIANTS[name][0] != "layerwise_cross_entropy"])
)
def test_a_compiled_function_follows_the_backend(name: str, device: torch.device) -> None:
    case = variant(name, tokens=20, width=30, atoms=50).to(device, torch.float16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **given: call(case, given), fullgraph=True, backend="aot_eager")
    for backend in ("torch", "triton", "torch"):
        with ops.use_backend(backend):
            leaves = leaves_of(case)
            outputs = compiled(**leaves)
            assert_equal([*outputs, *differentiate(outputs, list(leaves.values()))], results(case))


@pytest.mark.parametrize("name", [name for name in OPERATORS if VARIANTS[name][0].startswith("layerwise")])
def test_on_a_gpu_the_host_never_waits(name: str, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    case = variant(name).to(device, torch.float32)
    leaves = leaves_of(case)
    call(case, leaves)[0].backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(case, leaves)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
