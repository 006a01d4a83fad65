"""The losses of all depths: what their weights switch off, dtypes, memory, and the sample of the inner depths."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cdt_fast import ops
from cdt_fast.ops.layerwise_cross_entropy import CHUNK_BYTES, layerwise_cross_entropy_reference
from tests.ops.battery import (
    DEPTHS,
    LOSSES,
    LOW_DTYPES,
    Case,
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
)

BOTH = pytest.mark.parametrize("op", LOSSES)

# Weights


@BOTH
@pytest.mark.parametrize("kind", ["tensor", "list", "numpy", "float32", "trained"])
def test_weights_of_any_kind_and_depths_that_they_switch_off(op: str, kind: str) -> None:
    numbers = [0.3, 0.0, -1.5]
    weights: Any = {
        "tensor": torch.tensor(numbers, dtype=torch.float64),
        "list": numbers,
        "numpy": np.array(numbers),
        "float32": torch.tensor(numbers),
        "trained": torch.tensor(numbers, requires_grad=True),
    }[kind]
    case = build(op)
    exact = [leaves_of(case), torch.as_tensor(weights, dtype=torch.float64).detach()]
    expected = torch.dot(exact[1], formula(case, exact[0])[1])
    leaves = leaves_of(case)
    case.options["depth_weights"] = weights
    total, losses = call(case, leaves)
    assert not losses.requires_grad
    assert_close([total, losses], [expected, formula(build(op), leaves)[1]])
    losses.mul_(2.0)  # as ranks do that add them up
    total.backward()
    right = torch.autograd.grad(expected, list(exact[0].values()))
    for (name, each), gradient in zip(leaves.items(), right, strict=True):
        if name == "h1":
            assert each.grad is None, "a depth with weight 0 must cost no backward"
        else:
            assert each.grad is not None
            assert_close([each.grad], [gradient])
    if kind == "trained":
        assert_close([weights.grad], [losses.float() / 2], 1e-6)


@BOTH
def test_weights_as_numbers_in_a_mode_without_values(op: str) -> None:
    with FakeTensorMode():
        case = build(op, depth_weights=[0.3, 0.0, -1.5])
        leaves = leaves_of(case)
        call(case, leaves)[0].backward()
        assert all(each.grad is not None and each.grad.shape == each.shape for each in leaves.values())


@BOTH
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_weights_as_numbers_in_a_graph_of_make_fx(op: str, mode: Any) -> None:
    case = build(op, depth_weights=[0.3, 0.0, -1.5])
    given = case.tensors, {name: each for name, each in case.options.items() if isinstance(each, torch.Tensor)}
    traced = make_fx(lambda tensors, others: call(Case(op, {}, case.options | others), tensors), tracing_mode=mode)
    assert_close(traced(*given)(*given), call(case))


@BOTH
@pytest.mark.parametrize("numbers", [None, [0.3, 0.0, -1.5]])
def test_torchs_default_device_is_not_that_of_the_tensors(op: str, numbers: Any) -> None:
    case = build(op, depth_weights=numbers)
    leaves = leaves_of(case)
    with torch.device("meta"):
        total, _ = call(case, leaves)
        total.backward()
    assert total.isfinite()
    assert (leaves["h1"].grad is None) == (numbers is not None)


@BOTH
def test_weights_that_are_all_zero_leave_a_total_of_zero_and_no_graph_of_the_depths(op: str) -> None:
    case = build(op, depth_weights=[0.0] * 3)
    total, losses = call(case, {name: tensor.requires_grad_(name in DEPTHS) for name, tensor in case.tensors.items()})
    assert (total.item(), total.requires_grad) == (0.0, False)
    assert (losses > 0).all()


@BOTH
def test_one_depth_and_no_leading_dimension(op: str) -> None:
    case = build(op, leading=(), tokens=1)
    depth = leaf(case.tensors["h0"][0])
    others = {name: tensor for name, tensor in case.tensors.items() if name not in DEPTHS}
    options = {name: value for name, value in case.options.items() if name != "chunk_tokens"}
    if op == "layerwise_cross_entropy":
        total, losses = ops.layerwise_cross_entropy([depth], **others, **{**options, "targets": torch.tensor(1)})[:2]
        expected = torch.nn.functional.cross_entropy(depth @ others["weight"].T, torch.tensor(1))
    else:
        total, losses = ops.layerwise_reconstruction_loss([depth], others["target"][0])[:2]
        expected = (depth - others["target"][0]).square().sum()
    assert_close([total, losses[0]], [expected, expected])


@BOTH
@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 2.0]])
def test_an_upstream_gradient_or_weight_of_zero_keeps_a_nan_out(op: str, weights: list[float] | None) -> None:
    options: dict[str, Any] = {} if weights is None else {"depth_weights": weights}
    case = build(op, **options)
    expected = build(op)
    right = torch.autograd.grad(
        formula(expected, leaves := leaves_of(expected))[1],
        list(leaves.values()),
        torch.tensor([1.0, 0.0, 2.0]).double(),
    )
    case.tensors["h1"].fill_(float("nan"))
    leaves = leaves_of(case)
    total, losses = call(case, leaves)
    assert losses.isnan().tolist() == [False, True, False]
    factors = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    outputs = (losses, factors) if weights is None else (total, torch.ones_like(total))
    found = torch.autograd.grad(outputs[0], list(leaves.values()), outputs[1], allow_unused=True)
    for one, other in zip(found, right, strict=True):
        assert_close([torch.zeros_like(other) if one is None else one], [other])


# Dtypes


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_squared_errors_are_formed_and_summed_in_float32(dtype: torch.dtype) -> None:
    # 16,000 tokens: a sum in bfloat16 would stop growing after a few hundred of them.
    target = normal(1, 16_000, 32).to(dtype)
    depth = leaf((target.double() + 0.05 * normal(2, 16_000, 32)).to(dtype))
    total, losses = ops.layerwise_reconstruction_loss([depth], target)[:2]
    exact = (depth.detach().double() - target.double()).square().sum(-1).mean()
    assert losses.dtype == torch.float32
    assert abs(losses.item() - exact) <= 2e-6 * exact
    total.backward()
    right = 2 * (depth.detach().double() - target.double()) / 16_000
    # Three roundings in float32 and one to the dtype; float16's smallest steps where the gradient is that small.
    relative = torch.finfo(dtype).eps / 2 + 2 * torch.finfo(torch.float32).eps
    allowed = relative * right.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert depth.grad is not None
    assert ((depth.grad.double() - right).abs() <= allowed).all()


def test_reconstructions_and_target_may_have_other_dtypes_and_autocast_changes_nothing() -> None:
    case = build("layerwise_reconstruction_loss").to(torch.float32)
    case.tensors["h0"] = case.tensors["h0"].bfloat16()
    expected = results(case)
    assert [tensor.dtype for tensor in expected[1:3]] == [torch.float32, torch.bfloat16]
    exact = (case.tensors["h0"].double() - case.tensors["target"].double()).square().sum(-1).mean()
    assert abs(expected[1][0].item() - exact) <= 1e-6 * exact
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(results(case), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_confident_tokens_keep_their_gradient(dtype: torch.dtype) -> None:
    # p = 1 − 2e-4 · 6: p − 1 of a p that was rounded to bfloat16 would be 0, and in float16 off by a fifth.
    logits = torch.zeros(1, 7, dtype=dtype)
    logits[0, 2] = 8.5
    hidden = leaf(logits)
    ops.layerwise_cross_entropy([hidden], torch.eye(7, dtype=dtype), torch.tensor([2]))[0].backward()
    right = torch.softmax(logits.double(), 1)
    right[0, 2] -= 1
    assert hidden.grad is not None
    assert ((hidden.grad.double() - right).abs() <= 2 * torch.finfo(dtype).eps * right.abs()).all()


@pytest.mark.parametrize("weights", [None, [1.0]])
def test_gradients_of_the_head_are_summed_in_float32_or_better(weights: list[float] | None) -> None:
    hidden, half = torch.ones(1024, 2, dtype=torch.bfloat16), torch.tensor([-0.5, 0.5], dtype=torch.bfloat16)
    weight, bias = leaf(torch.zeros(2, 2, dtype=torch.bfloat16)), leaf(torch.zeros(2, dtype=torch.bfloat16))
    targets = torch.zeros(1024, dtype=torch.int64)
    options: dict[str, Any] = {"depth_weights": weights, "chunk_tokens": 4}
    total = ops.layerwise_cross_entropy([hidden], weight, targets, bias, **options)[0]
    # In bfloat16 a sum of 0.5 stops growing at 128.
    assert_equal(torch.autograd.grad(total, [weight, bias]), [half.unsqueeze(1).expand(2, 2), half])

    # Over thousands of chunks that of a bias would lose a digit in float32.
    hidden, weight, bias = normal(1, 3000, 2).float(), normal(2, 3, 2).float(), leaf(torch.zeros(3))
    targets = torch.zeros(3000, dtype=torch.int64)
    options = {"depth_weights": weights, "chunk_tokens": 1, "reduction": "sum"}
    total = ops.layerwise_cross_entropy([hidden], weight, targets, bias, **options)[0]
    exact = torch.softmax(hidden.double() @ weight.double().mT, 1).sum(0) - torch.tensor([3000.0, 0, 0])
    (found,) = torch.autograd.grad(total, bias)
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("weight", [1e-2, 1e-5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_loss_scale_reaches_the_gradients_before_they_are_rounded(dtype: torch.dtype, weight: float) -> None:
    tokens, scale = 8192, 65536.0
    given = [(normal(seed, rows, 4) / 4).to(dtype) for seed, rows in ((1, tokens), (2, 50))]
    targets = torch.randint(50, (tokens,), generator=generator(3))
    leaves, exact = [leaf(tensor) for tensor in given], [leaf(tensor.double()) for tensor in given]
    total = ops.layerwise_cross_entropy([leaves[0]], leaves[1], targets, depth_weights=[weight])[0]
    found = torch.autograd.grad(scale * total, leaves)
    loss = layerwise_cross_entropy_reference([exact[0]], exact[1], targets)[0]
    for one, other in zip(found, torch.autograd.grad(scale * weight * loss, exact), strict=True):
        error = (one.double() - other).square().mean().sqrt() / other.square().mean().sqrt()
        assert error <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_large_logits(softcap: float | None) -> None:
    case = build("layerwise_cross_entropy", softcap=softcap)
    for name in DEPTHS:
        case.tensors[name] *= 1e4
    leaves = leaves_of(case)
    outputs = formula(case, leaves)
    assert_close(results(case), [*outputs, *differentiate(outputs, list(leaves.values()))])


# Targets that do not count


def test_another_ignore_index_and_flags_as_in_torch() -> None:
    case = build("layerwise_cross_entropy", "bias", label_smoothing=0.3)
    targets = case.options["targets"]
    for ignored, other in ((2**40, torch.where(targets == -100, 2**40, targets)), (3, targets.clamp(min=0))):
        case.options.update(ignore_index=ignored, targets=other)
        _, losses = call(case)
        for depth, loss in zip(DEPTHS, losses, strict=True):
            logits = case.tensors[depth] @ case.tensors["weight"].T + case.tensors["bias"]
            flags: dict[str, Any] = {"ignore_index": ignored, "label_smoothing": 0.3}
            assert_close([loss], [torch.nn.functional.cross_entropy(logits.flatten(0, 1), other.flatten(), **flags)])


@pytest.mark.parametrize("weights", [(), ("weights",)])
def test_a_sum_over_no_token_is_zero(weights: tuple[str, ...]) -> None:
    for sizes in ({}, {"tokens": 0}, {"leading": (2, 0)}):
        case = build("layerwise_cross_entropy", *weights, reduction="sum", **sizes)
        case.options["targets"].fill_(-100)
        assert not any(result.any() for result in results(case))


# Memory


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_logits_of_all_depths_are_never_in_memory_together(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, weighted: bool
) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2**20)  # no more than the 128 tokens of the smallest chunk by default
    tokens, width = 512, 8
    for depths, vocabulary, chunk in ((4, 8192, None), (8, 8192, 64), (4, 16384, None)):
        hidden = [leaf(normal(depth, tokens, width, dtype=dtype)) for depth in range(depths)]
        weight = leaf(normal(9, vocabulary, width, dtype=dtype))
        targets = torch.randint(vocabulary, (tokens,), generator=generator(1))
        weights = [1.0] * depths if weighted else None
        # Not by a dispatch mode, which would see the op as one call.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            total = ops.layerwise_cross_entropy(hidden, weight, targets, depth_weights=weights, chunk_tokens=chunk)[0]
            torch.autograd.grad(total, [*hidden, weight])
        profiler: Any = profile.profiler
        allocated = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
        head, states = 2 * 4 * vocabulary * width, 2 * depths * tokens * width * dtype.itemsize
        logits, swept = (chunk or 128) * vocabulary * dtype.itemsize, 4 * 2**20
        assert max(itertools.accumulate(allocated)) <= head + states + 40 * depths * tokens + logits + swept
