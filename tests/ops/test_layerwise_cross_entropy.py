"""The layerwise cross-entropy: which logits are kept or computed again, its products, the sample, errors."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.checks import InputError
from cdt_fast.ops import common
from tests.ops.battery import (
    DEPTHS,
    Noted,
    assert_close,
    assert_equal,
    build,
    by_formula,
    call,
    differentiate,
    formula,
    leaves_of,
    results,
)

module = importlib.import_module("cdt_fast.ops.layerwise_cross_entropy")  # the name in `ops` is the function
strategy = module._strategy
ALL = ("bias", "weights", "targets of depths")


def keep(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    """Have the gradients of the logits kept, or computed again."""
    monkeypatch.setattr(module, "_strategy", lambda *_: (False, keeps))


# The gradients of logits that are kept for the backward


@pytest.mark.parametrize("chunk_tokens", [None, 1, 5, 7])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("extras", [("bias",), ALL])
def test_kept_logits(monkeypatch: pytest.MonkeyPatch, extras: tuple[str, ...], keeps: bool, chunk_tokens: int) -> None:
    keep(monkeypatch, keeps)
    for options in ({"label_smoothing": 0.1, "softcap": 2.0}, {"reduction": "sum"}):
        case = build("layerwise_cross_entropy", *extras, tokens=9, chunk_tokens=chunk_tokens, **options)
        assert_close(results(case), by_formula(case))


@pytest.mark.parametrize("keeps", [True, False])
def test_an_upstream_gradient_of_zero_keeps_a_nan_out(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    keep(monkeypatch, keeps)
    case, factors = build("layerwise_cross_entropy", "bias"), torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64)
    leaves = leaves_of(case)
    right = torch.autograd.grad(formula(case, leaves)[1], list(leaves.values()), factors)
    case.tensors["h1"].fill_(float("nan"))
    leaves = leaves_of(case)
    assert_close(torch.autograd.grad(call(case, leaves)[1], list(leaves.values()), factors), right)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_backward_inside_autocast_is_the_one_outside(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    keep(monkeypatch, keeps)
    case = build("layerwise_cross_entropy", "bias", chunk_tokens=13).to(torch.float32)
    leaves = leaves_of(case)
    outputs = call(case, leaves)
    outside = differentiate(outputs, list(leaves.values()), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(differentiate(outputs, list(leaves.values())), outside)


def test_a_second_backward_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for extras, keeps in itertools.product(((), ("weights",)), (None, True, False)):
        if keeps is not None:
            keep(monkeypatch, keeps)
        case = build("layerwise_cross_entropy", *extras)
        leaves = leaves_of(case)
        outputs = call(case, leaves)
        first = differentiate(outputs, list(leaves.values()), retain_graph=True)
        kept = [gradient.clone() for gradient in first]
        assert_equal(differentiate(outputs, list(leaves.values())), kept)
        assert_equal(first, kept)


@pytest.mark.parametrize("keeps", [True, False])
def test_opcheck_of_what_is_kept(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    """The room of ignored tokens holds zeros."""
    keep(monkeypatch, keeps)
    case = build("layerwise_cross_entropy", *ALL, chunk_tokens=4)
    leaves = leaves_of(case)
    with Noted() as noted:
        differentiate(call(case, leaves), list(leaves.values()))
    forward, backward = noted.calls
    torch.library.opcheck(*forward)
    torch.library.opcheck(*backward, test_utils=("test_schema", "test_faketensor"))


def test_the_strategy() -> None:
    def chosen(rows: int, known: bool = False, given: int | None = None, width: int = 1, device: str = "cpu") -> object:
        needs = {"needs_hidden": [True] * 2, "needs_weight": True, "needs_bias": False, "fused": False, "keeps": False}
        options = {"ignore_index": -100, "label_smoothing": 0.0, "softcap": None, "chunk_tokens": given, "mean": True}
        chosen = module._Options(**options, **needs, dtype=torch.float32, backend="torch")
        return module._strategy(chosen, 2, 2 * rows, torch.empty(1024, width, device=device), known)

    # A row of two depths takes 8 KiB.
    assert [chosen(rows) for rows in (1, 2**11, 2**11 + 1)] == [(False, True), (False, True), (False, False)]
    assert [chosen(rows, given=16) for rows in (8, 9)] == [(False, True), (False, False)]
    assert [chosen(rows, known=True) for rows in (1, 2**11)] == [(True, False)] * 2
    found = [chosen(rows, known=True, width=1024) for rows in (2**8, 2**8 + 1, 2**11 + 1)]
    assert found == [(True, False), (False, True), (True, False)]
    # On a GPU, which a meta tensor stands for.
    assert [chosen(rows, device="meta") for rows in (2**14, 2**14 + 1)] == [(False, True), (False, False)]


# Products that are not needed are not computed


def products(monkeypatch: pytest.MonkeyPatch, *frozen: str, **options: Any) -> int:
    """How many matrix products of any size the forward and the backward make in one chunk a depth."""
    case = build("layerwise_cross_entropy", "bias", chunk_tokens=6, **options)
    case.options["targets"].clamp_(min=0)
    leaves = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.tensors.items()}
    count = 0
    mm, addmm = torch.mm, torch.addmm

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Tensor:
            nonlocal count
            count += 1
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", counted(mm))
        patch.setattr(torch, "addmm", counted(addmm))
        total = call(case, leaves)[0]
        if total.requires_grad:
            total.backward()
    return count


def test_what_is_not_needed_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted = {"depth_weights": [1.0, 1.0, 1.0]}
    assert products(monkeypatch, **weighted) == 9
    assert products(monkeypatch, depth_weights=[1.0, 0.0, 1.0]) == 7
    assert products(monkeypatch, depth_weights=[0.0, 0.0, 0.0]) == 3
    assert products(monkeypatch, "h1", **weighted) == 8
    assert products(monkeypatch, "weight", "bias", **weighted) == 6
    assert products(monkeypatch, "weight", "bias", "h0", **weighted) == 5
    assert products(monkeypatch, "weight", "bias", "h0") == 5
    assert products(monkeypatch, "h0", "h1", "h2", "weight", "bias", **weighted) == 3
    keep(monkeypatch, True)
    assert products(monkeypatch) == 9
    keep(monkeypatch, False)
    assert products(monkeypatch) == 12


@pytest.mark.parametrize("weights", [None, [0.5, -0.25, 2.0], [1.0, 0.0, 0.0]])
@pytest.mark.parametrize("frozen", [{"h0"}, set(DEPTHS), {"weight"}, {"bias"}, {"weight", "bias"}, {"h1", "bias"}])
def test_frozen_inputs(frozen: set[str], weights: list[float] | None) -> None:
    case = build("layerwise_cross_entropy", "bias", **({} if weights is None else {"depth_weights": weights}))
    leaves = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.tensors.items()}
    trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
    assert_close(differentiate(call(case, leaves), trained), differentiate(formula(case, leaves), trained))


# The sample of the inner depths


@pytest.mark.parametrize("extras", [(), ("weights",), ALL])
def test_the_sample_is_unbiased_over_all_subsets(monkeypatch: pytest.MonkeyPatch, extras: tuple[str, ...]) -> None:
    case = build("layerwise_cross_entropy", *extras)
    exact, estimates = results(case), []
    case.options["inner_fraction"] = 0.6
    for subset in itertools.combinations(range(6), 4):
        monkeypatch.setattr(module, "_sample", lambda *_, subset=subset: torch.tensor(subset).flip(0))
        estimates.append(results(case))
        # The last depth is exact in each of them.
        assert_close([estimates[-1][1][-1], estimates[-1][4]], [exact[1][-1], exact[4]])
    assert (estimates[0][1][0] - exact[1][0]).abs() > 1e-3
    assert_close([torch.stack(parts).mean(0) for parts in zip(*estimates, strict=True)], exact)


def test_compiles_with_a_sample() -> None:
    case = build("layerwise_cross_entropy", tokens=20, depth_weights=[0.5, -0.25, 2.0])
    exact = call(case)[1]
    case.options["inner_fraction"] = 0.25
    found = torch.compile(lambda: call(case)[1], fullgraph=True, backend="aot_eager")()
    assert_close([found[-1]], [exact[-1]])
    assert not torch.equal(found[0], exact[0])


def test_plain_torch_takes_over_from_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from cdt_fast.kernels import layerwise_cross_entropy as kernels

    calls = []

    def cross_entropy_(*arguments: Any) -> None:
        calls.append(arguments)
        raise RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 101376")

    case = build("layerwise_cross_entropy", chunk_tokens=2)
    expected = results(case)
    monkeypatch.setattr(kernels, "cross_entropy_", cross_entropy_)
    monkeypatch.setattr(common, "choose_backend", lambda *_: "triton")
    monkeypatch.setattr(common, "blocks_for", lambda *_, **__: {})
    monkeypatch.setattr(common, "interpreting", lambda: False)
    monkeypatch.setattr(common, "_disabled", set())
    with pytest.warns(RuntimeWarning, match="layerwise_cross_entropy runs on plain torch .* out of resource"):
        outputs = call(case, leaves_of(case))
    assert_equal(outputs, expected[:2])
    assert len(calls) == 1  # of all chunks


# Errors


@pytest.mark.parametrize("extras", [(), ("targets of depths",)])
@pytest.mark.parametrize("wrong", [7, -1, 2**40])
def test_a_target_out_of_range(extras: tuple[str, ...], wrong: int) -> None:
    case = build("layerwise_cross_entropy", *extras, atoms=7)
    (case.options["targets"][1] if extras else case.options["targets"])[1, 2] = wrong
    name = r"targets\[1\]" if extras else "targets"
    with pytest.raises(InputError, match=rf"{name} must be in \[0, 7\) or -100 \(ignore_index\), got {wrong}"):
        call(case)


@pytest.mark.parametrize("extras", [(), ("weights",), ("targets of depths",)])
def test_a_mean_over_no_token(extras: tuple[str, ...]) -> None:
    own = "targets of depths" in extras
    for sizes in ({}, {"tokens": 0}, {"leading": (2, 0)}):
        case = build("layerwise_cross_entropy", *extras, **sizes)
        (case.options["targets"][1] if own else case.options["targets"]).fill_(-100)
        name = r"targets\[[01]\]" if own else "targets"
        with pytest.raises(InputError, match=rf"{name} must hold at least one token that is not -100 \(ignore_index\)"):
            call(case)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_states": []}, r"hidden_states must be a list of one tensor a depth, got \[\]"),
        ({"hidden_states": torch.zeros(2, 3)}, r"hidden_states must be a list .* got \(2, 3\) float32"),
        ({"hidden_states": [None]}, r"hidden_states\[0\] must be a dense floating-point tensor .* got None"),
        (
            {"hidden_states": [torch.zeros(2, 3), torch.zeros(3, 3)]},
            r"hidden_states\[1\] must have shape \(2, 3\) \(as hidden_states\[0\]\), got \(3, 3\)",
        ),
        ({"weight": torch.zeros(3)}, r"weight must be a dense floating-point tensor \[V, d\], got \(3,\) float32"),
        ({"weight": torch.zeros(4, 2)}, r"weight must have shape \(4, 3\) .* got \(4, 2\)"),
        ({"weight": torch.zeros(4, 4, 3)}, r"weight must have shape \(4, 3\) .* got \(4, 4, 3\)"),
        ({"weight": torch.zeros(0, 3)}, r"weight must hold at least one row, got shape \(0, 3\)"),
        ({"weight": torch.zeros(4, 3).double()}, r"weight is torch.float64 but hidden_states\[0\] is torch.float32"),
        ({"weight": torch.zeros(4, 3, device="meta")}, r"weight is on meta but hidden_states\[0\] is on cpu"),
        ({"bias": torch.zeros(3)}, r"bias must have shape \(4,\) .* got \(3,\)"),
        ({"bias": [0.0] * 4}, r"bias must be a dense floating-point tensor \[V\]"),
        ({"bias": torch.zeros(4).half()}, r"bias is torch.float16 but weight is torch.float32"),
        ({"targets": torch.zeros(2)}, r"targets must be an int64 tensor .* got \(2,\) float32"),
        ({"targets": torch.zeros(2, dtype=torch.int32)}, r"targets must be an int64 tensor .* got \(2,\) int32"),
        ({"targets": 3}, r"targets must be an int64 tensor .* or a list of 1, one a depth, got 3 \(int\)"),
        ({"targets": [0, 1]}, r"targets must be an int64 tensor .* or a list of 1, one a depth, got a list of 2"),
        ({"targets": [0]}, r"targets\[0\] must be an int64 tensor with one target a token, got 0 \(int\)"),
        ({"targets": [torch.zeros(3, dtype=torch.int64)]}, r"targets\[0\] must have shape \(2,\) .* got \(3,\)"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets must have shape \(2,\) .* got \(3,\)"),
        (
            {"targets": torch.zeros(2, dtype=torch.int64, device="meta")},
            r"targets is on meta but hidden_states\[0\] is on cpu",
        ),
        ({"depth_weights": [1.0, 2.0]}, r"depth_weights must have shape \(1,\) \(one weight a depth\), got \(2,\)"),
        ({"depth_weights": torch.zeros(1, 2)}, r"depth_weights must have shape \(1,\) \(one .*\), got \(1, 2\)"),
        ({"depth_weights": ["a"]}, r"depth_weights must be 1 numbers, got \['a'\] \(list\)"),
        ({"reduction": "none"}, r"reduction must be one of 'mean', 'sum', got 'none'"),
        ({"ignore_index": 0.5}, r"ignore_index must be an integer"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be a number in \[0, 1\], got 1.5"),
        ({"softcap": 0.0}, r"softcap must be a finite number > 0, got 0.0"),
        ({"chunk_tokens": 0}, r"chunk_tokens must be an integer >= 1, got 0"),
        ({"inner_fraction": 0.0}, r"inner_fraction must be a number in \(0, 1\], got 0.0"),
        ({"inner_fraction": 1.5}, r"inner_fraction must be a number in \(0, 1\], got 1.5"),
        ({"inner_fraction": math.nan}, r"inner_fraction must be a number in \(0, 1\], got nan"),
    ],
)
def test_errors_name_the_argument_what_was_given_and_what_is_expected(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden_states": [torch.zeros(2, 3)],
        "weight": torch.zeros(4, 3),
        "targets": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(InputError, match=message):
        ops.layerwise_cross_entropy(**{**arguments, **changed})
