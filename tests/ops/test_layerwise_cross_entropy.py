"""Layerwise cross-entropy: the formula, what the weights switch off, ignored tokens, sampling, dtypes and errors."""

from __future__ import annotations

import importlib
import itertools
import math
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.ops.layerwise_cross_entropy import chunked, layerwise_cross_entropy_reference, steps
from cdt_fast.ops.layerwise_cross_entropy.chunked import strategy
from cdt_fast.ops.layerwise_cross_entropy.operator import layerwise_cross_entropy_forward
from tests.ops.ops_cases import (
    LOW_DTYPES,
    assert_as_precise_as_torch,
    assert_close,
    assert_compiles,
    assert_equal,
    generator,
    gradients,
    laid_out,
    leaf,
    normal,
)

DEPTHS, WIDTH, VOCABULARY = 3, 5, 7
WEIGHTS = [0.5, -0.25, 2.0]

module = importlib.import_module("cdt_fast.ops.layerwise_cross_entropy")  # the name in `ops` is the function


def tensors(*shape: int, depths: int = DEPTHS) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets, bias; a third of the targets is ignored."""
    targets = torch.randint(VOCABULARY, shape, generator=generator(1))
    targets[torch.rand(shape, generator=generator(2)) < 0.33] = -100
    targets.view(-1)[0] = 3
    hidden = [leaf(normal(10 + depth, *shape, WIDTH)) for depth in range(depths)]
    return hidden, leaf(normal(3, VOCABULARY, WIDTH)), targets, leaf(normal(4, VOCABULARY))


def written(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The losses from exponentials alone, with the target distribution spelled out."""
    of_depths = []
    kept = targets.reshape(-1) != -100
    wanted = torch.full((int(kept.sum()), len(weight)), label_smoothing / len(weight), dtype=weight.dtype)
    wanted[torch.arange(len(wanted)), targets.reshape(-1)[kept]] += 1 - label_smoothing
    for depth in hidden:
        logits = torch.einsum("nd,vd->nv", depth.reshape(-1, depth.shape[-1])[kept], weight)
        logits = logits if bias is None else logits + bias
        if softcap is not None:
            decay = torch.exp(-2 * logits / softcap)
            logits = softcap * (1 - decay) / (1 + decay)
        of_depths.append(torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True))
    losses = torch.stack([-(wanted * torch.log(probabilities)).sum() for probabilities in of_depths])
    return losses / kept.sum() if reduction == "mean" else losses


FLAGS = [
    dict(zip(("reduction", "label_smoothing", "softcap"), values, strict=True))
    for values in itertools.product(("mean", "sum"), (0.0, 0.1), (None, 2.0))
]


@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 13, 100])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("kept", [True, False])
def test_losses_and_gradients_are_the_formula(
    monkeypatch: pytest.MonkeyPatch, kept: bool, flags: dict[str, Any], chunk_tokens: int | None
) -> None:
    if not kept:
        recompute(monkeypatch)
    hidden, weight, targets, bias = tensors(11)
    expected = written(hidden, weight, targets, bias, **flags)
    assert_close([layerwise_cross_entropy_reference(hidden, weight, targets, bias, **flags)], [expected])
    leaves = [*hidden, weight, bias]

    total, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, bias, chunk_tokens=chunk_tokens, **flags)
    factors = normal(5, DEPTHS)
    assert_close([per_depth, total], [expected, expected.sum()])
    assert_close(gradients([per_depth], leaves, [factors]), torch.autograd.grad(expected, leaves, factors, True))

    total, per_depth = ops.layerwise_cross_entropy(
        hidden, weight, targets, bias, depth_weights=WEIGHTS, chunk_tokens=chunk_tokens, **flags
    )
    expected_total = torch.dot(torch.tensor(WEIGHTS, dtype=torch.float64), expected)
    assert not per_depth.requires_grad
    assert_close([per_depth, total], [expected, expected_total])
    upstream = torch.tensor(-3.0, dtype=torch.float64)
    assert_close(gradients([total], leaves, [upstream]), torch.autograd.grad(-3 * expected_total, leaves))


# Targets of each depth


def targets_of_depths(*shape: int) -> list[Tensor]:
    """Other targets at each depth, of which others are ignored; at the second none is."""
    found = [torch.randint(VOCABULARY, shape, generator=generator(20 + depth)) for depth in range(DEPTHS)]
    found[0].view(-1)[::2] = found[2].view(-1)[1] = -100
    return found


@pytest.mark.parametrize("flags", [{}, {"reduction": "sum", "label_smoothing": 0.1, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("kept", [True, False])
def test_targets_of_each_depth(monkeypatch: pytest.MonkeyPatch, kept: bool, flags: dict[str, Any]) -> None:
    if not kept:
        recompute(monkeypatch)
    hidden, weight, _, bias = tensors(2, 5)
    targets, leaves = targets_of_depths(2, 5), [*hidden, weight, bias]
    expected = torch.cat([written([h], weight, y, bias, **flags) for h, y in zip(hidden, targets, strict=True)])
    assert_close([layerwise_cross_entropy_reference(hidden, weight, targets, bias, **flags)], [expected])
    for weights, chunk_tokens in itertools.product((None, WEIGHTS), (None, 1, 4)):
        factors = torch.tensor(weights or [1.0] * DEPTHS, dtype=torch.float64)
        total, per_depth = ops.layerwise_cross_entropy(
            hidden, weight, targets, bias, depth_weights=weights, chunk_tokens=chunk_tokens, **flags
        )
        assert_close([total, per_depth], [torch.dot(factors, expected), expected])
        right = torch.autograd.grad(torch.dot(factors, expected), leaves, retain_graph=True)
        assert_close(torch.autograd.grad(total, leaves), right)
    sample = torch.tensor([4, 0, 3, 7])
    monkeypatch.setattr(module, "_sample", lambda *_: sample)
    _, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, bias, inner_fraction=0.4, **flags)
    for depth, (states, y) in enumerate(zip(hidden[:-1], targets, strict=False)):
        of_sample = written(
            [states.view(10, WIDTH)[sample]], weight, y.view(-1)[sample], bias, **{**flags, "reduction": "sum"}
        )
        count = 1 if "reduction" in flags else (y != -100).sum()
        assert_close([per_depth[depth]], [2.5 * of_sample[0] / count])
    assert_close([per_depth[-1]], [expected[-1]])


@pytest.mark.parametrize("wrong", ["out of range", "none counts"])
def test_an_error_of_targets_of_each_depth_names_the_depth(wrong: str) -> None:
    hidden, weight, _, _ = tensors(5)
    targets = targets_of_depths(5)
    targets[1].fill_(VOCABULARY if wrong == "out of range" else -100)
    message = r"targets\[1\] must be in \[0, 7\)" if wrong == "out of range" else r"targets\[1\] must hold at least one"
    with pytest.raises(InputError, match=message):
        ops.layerwise_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("shape", [(1,), (2, 3), (2, 1, 4), ()])
@pytest.mark.parametrize("depths", [1, 2])
def test_shapes(shape: tuple[int, ...], depths: int) -> None:
    hidden, weight, targets, _ = tensors(*shape, depths=depths)
    expected = written(hidden, weight, targets, None)
    leaves = [*hidden, weight]
    for weights in (None, [1.0] * depths):
        total, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, depth_weights=weights)
        assert_close([per_depth, total], [expected, expected.sum()])
        found = gradients([total], leaves, [torch.ones_like(total)])
        assert_close(found, torch.autograd.grad(expected.sum(), leaves, retain_graph=True))


def test_the_flags_mean_what_they_mean_in_torch() -> None:
    hidden, weight, targets, bias = tensors(11)
    expected = [
        torch.nn.functional.cross_entropy(depth @ weight.T + bias, targets, ignore_index=-100, label_smoothing=0.3)
        for depth in hidden
    ]
    _, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, bias, label_smoothing=0.3)
    assert_close(per_depth, expected)


@pytest.mark.parametrize("softcap", [0.5, 1.0, 30.0])
def test_large_logits(softcap: float) -> None:
    hidden, weight, targets, bias = tensors(11)
    hidden = [leaf(1e4 * depth.detach()) for depth in hidden]
    for cap in (None, softcap):
        expected = layerwise_cross_entropy_reference(hidden, weight, targets, bias, softcap=cap)
        total, per_depth = ops.layerwise_cross_entropy(
            hidden, weight, targets, bias, softcap=cap, depth_weights=[1.0] * DEPTHS
        )
        assert_close([per_depth], [expected])
        one = torch.ones_like(total)
        assert_close(
            gradients([total], [*hidden, weight], [one]), torch.autograd.grad(expected.sum(), [*hidden, weight])
        )


# The gradients of logits that are kept until the backward


@pytest.mark.parametrize("chunk_tokens", [None, 1, 5, 7])
@pytest.mark.parametrize("rows", [1, 6, 17, 100])
def test_kept_logits_give_what_logits_computed_again_give(
    monkeypatch: pytest.MonkeyPatch, rows: int, chunk_tokens: int | None
) -> None:
    hidden, weight, targets, bias = tensors(2, 9)
    leaves = [*hidden, weight, bias]
    factors = normal(5, DEPTHS)

    def run(zero: bool, **options: Any) -> list[Tensor | None]:
        total, per_depth = ops.layerwise_cross_entropy(
            hidden, weight, targets, bias, chunk_tokens=chunk_tokens, generator=generator(3), **options
        )
        upstream = factors * torch.tensor([1.0, 0.0 if zero else 1.0, 1.0])
        if "depth_weights" in options:
            return [per_depth, total, *gradients([total], leaves, [upstream[0]])]
        return [per_depth, *gradients([per_depth], leaves, [upstream])]

    flags = [
        {"label_smoothing": 0.1, "softcap": 2.0},
        {"reduction": "sum", "inner_fraction": 0.5},
        {"depth_weights": WEIGHTS, "reduction": "sum"},
        {"depth_weights": [0.5, 0.0, 2.0], "inner_fraction": 0.5},
    ]
    for options, zero in itertools.product(flags, (False, True)):
        recompute(monkeypatch)
        expected = run(zero, **options)
        keep(monkeypatch, rows)
        assert_close(run(zero, **options), expected)


def test_a_frozen_depth_among_kept_logits() -> None:
    hidden, weight, targets, bias = tensors(11)
    hidden[1].requires_grad_(False)
    total, _ = ops.layerwise_cross_entropy(hidden, weight, targets, bias)
    leaves = [hidden[0], hidden[2], weight, bias]
    expected = written(hidden, weight, targets, bias)
    assert_close(gradients([total], leaves, [torch.ones_like(total)]), torch.autograd.grad(expected.sum(), leaves))


def test_the_strategy() -> None:
    def chosen(rows: int, known: bool = False, given: int | None = None, width: int = 1, device: str = "cpu") -> object:
        loss = arguments([torch.empty(rows, width, device=device)] * 2, torch.empty(1024, width, device=device))
        weights = torch.ones(2) if known else None
        return strategy(replace(loss, depth_weights=weights, chunk_tokens=given))

    # A row of two depths takes 8 KiB.
    assert [chosen(rows) for rows in (1, 2**14, 2**14 + 1)] == [(False, 2), (False, 2**15), (False, 2**15)]
    assert [chosen(rows, given=16) for rows in (8, 9)] == [(False, 16), (False, 16)]
    assert [chosen(rows, known=True) for rows in (1, 2**15)] == [(True, 0), (True, 0)]
    found = [chosen(rows, known=True, width=1024) for rows in (1, 2**10, 2**10 + 1, 2**15)]
    assert found == [(True, 0), (True, 0), (False, 2**11 + 2), (True, 0)]
    # On a GPU, which a meta tensor stands for, all or none.
    assert [chosen(rows, device="meta") for rows in (2**14, 2**14 + 1)] == [(False, 2**15), (False, 0)]


# Weights


@pytest.mark.parametrize("kind", ["tensor", "list", "numpy", "float32", "trained"])
def test_weights_of_any_kind_and_depths_that_they_switch_off(kind: str) -> None:
    hidden, weight, targets, bias = tensors(11)
    numbers = [0.3, 0.0, -1.5]
    weights: Any = {
        "tensor": torch.tensor(numbers, dtype=torch.float64),
        "list": numbers,
        "numpy": np.array(numbers),
        "float32": torch.tensor(numbers),
        "trained": torch.tensor(numbers, requires_grad=True),
    }[kind]
    total, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, bias, depth_weights=weights)
    expected = written(hidden, weight, targets, bias)
    factors = torch.as_tensor(weights).detach().double()
    if kind == "list":
        factors = torch.tensor(numbers, dtype=torch.float64)
    assert_close([per_depth, total], [expected, torch.dot(factors, expected)])
    found = gradients([total], [*hidden, weight, bias], [torch.ones_like(total)])
    right: list[Tensor | None] = [*torch.autograd.grad(torch.dot(factors, expected), [*hidden, weight, bias])]
    assert found[1] is None
    right[1] = None
    assert_close(found, right)


def arguments(hidden: list[Tensor], weight: Tensor, **changed: Any) -> chunked.CrossEntropyArguments:
    """Without a bias; every gradient is needed."""
    options = {"ignore_index": -100, "label_smoothing": 0.0, "softcap": None, "chunk_tokens": None, "mean": True}
    how = {"dtype": torch.float32, "backend": "torch", "fused": False, "kept_rows": 0}
    tensors = {"bias": None, "targets": [torch.zeros(len(hidden[0]), dtype=torch.int64)], "sample": None}
    needs = {"needs_hidden": [True] * len(hidden), "needs_weight": True, "needs_bias": False}
    values: dict[str, Any] = {**tensors, "depth_weights": None, **options, **how, **needs, **changed}
    return chunked.CrossEntropyArguments(hidden=hidden, weight=weight, **values)


def recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no gradients of logits kept."""
    monkeypatch.setattr(chunked, "KEPT_BYTES", 0)
    monkeypatch.setattr(module, "strategy", lambda loss: (strategy(replace(loss, chunk_tokens=None))[0], 0))


def keep(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Have the gradients of the logits of so many rows kept."""
    monkeypatch.setattr(module, "strategy", lambda *_: (False, rows))


def products(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> int:
    """How many matrix products of any size the forward and the backward make in one chunk a depth."""
    hidden, weight, targets, bias = tensors(11)
    frozen = changed.pop("frozen", ())
    for name, tensor in {**{f"h{n}": h for n, h in enumerate(hidden)}, "weight": weight, "bias": bias}.items():
        tensor.requires_grad_(name not in frozen)
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
        total, _ = ops.layerwise_cross_entropy(hidden, weight, targets, bias, chunk_tokens=11, **changed)
        if total.requires_grad:
            total.backward()
    return count


def test_what_is_not_wanted_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted = {"depth_weights": [1.0, 1.0, 1.0]}
    assert products(monkeypatch, **weighted) == 9
    keep(monkeypatch, 100)
    assert products(monkeypatch) == 9
    recompute(monkeypatch)
    assert products(monkeypatch) == 12
    assert products(monkeypatch, depth_weights=[1.0, 0.0, 1.0]) == 7
    assert products(monkeypatch, depth_weights=[0.0, 0.0, 0.0]) == 3
    assert products(monkeypatch, frozen=("h1",), **weighted) == 8
    assert products(monkeypatch, frozen=("weight", "bias"), **weighted) == 6
    assert products(monkeypatch, frozen=("weight", "bias", "h0"), **weighted) == 5
    assert products(monkeypatch, frozen=("weight", "bias", "h0")) == 5
    assert products(monkeypatch, frozen=("h0", "h1", "h2", "weight", "bias"), **weighted) == 3


@pytest.mark.parametrize("weights", [None, WEIGHTS, [1.0, 0.0, 0.0]])
@pytest.mark.parametrize("frozen", [{0}, {0, 1, 2}, {3}, {4}, {3, 4}, {1, 3, 4}])
def test_frozen_inputs(frozen: set[int], weights: list[float] | None) -> None:
    hidden, weight, targets, bias = tensors(11)
    leaves = [tensor.requires_grad_(n not in frozen) for n, tensor in enumerate([*hidden, weight, bias])]
    trained = [tensor for tensor in leaves if tensor.requires_grad]
    expected = written(hidden, weight, targets, bias)
    total, _ = ops.layerwise_cross_entropy(hidden, weight, targets, bias, depth_weights=weights)
    factors = torch.tensor(weights or [1.0] * DEPTHS, dtype=torch.float64)
    found = gradients([total], trained, [torch.ones_like(total)])
    right = torch.autograd.grad(torch.dot(factors, expected), trained)
    for one, other in zip(found, right, strict=True):
        assert_close([torch.zeros_like(other) if one is None else one], [other])


def test_all_weights_zero_and_nothing_to_differentiate() -> None:
    hidden, weight, targets, _ = tensors(11)
    total, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, depth_weights=[0.0] * DEPTHS)
    assert total.item() == 0
    assert (per_depth > 0).all()
    total.backward()
    assert_equal([weight.grad, hidden[0].grad], [torch.zeros_like(weight), None])
    total, _ = ops.layerwise_cross_entropy(hidden, weight.detach(), targets, depth_weights=[0.0] * DEPTHS)
    assert not total.requires_grad


# Backward more than once


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_a_second_backward_finds_the_same_and_a_second_derivative_is_an_error(weights: list[float] | None) -> None:
    hidden, weight, targets, bias = tensors(11)
    leaves = [*hidden, weight, bias]
    total, _ = ops.layerwise_cross_entropy(hidden, weight, targets, bias, depth_weights=weights)
    three, two = (torch.tensor(number, dtype=torch.float64) for number in (3.0, 2.0))
    first = torch.autograd.grad(total, leaves, three, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(total, leaves, two, retain_graph=True)
    assert_close([gradient / 1.5 for gradient in first], second)
    assert_equal(first, kept)
    twice = torch.autograd.grad(total, leaves, three, create_graph=True)
    with pytest.raises(InputError, match="can be differentiated once; for a second derivative use its ref"):
        torch.autograd.grad(twice[0].square().sum(), leaves)


# Targets that do not count


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_ignored_tokens_take_no_part(poison: float, weights: list[float] | None) -> None:
    hidden, weight, targets, bias = tensors(2, 6)
    ignored = targets == -100
    poisoned = [leaf(depth.detach().masked_fill(ignored.unsqueeze(-1), poison)) for depth in hidden]
    results = []
    for states in (hidden, poisoned):
        total, per_depth = ops.layerwise_cross_entropy(states, weight, targets, bias, depth_weights=weights)
        found = gradients([total], [*states, weight, bias], [torch.ones_like(total)])
        results.append([total, per_depth, *found])
    assert_equal(*results)
    assert all((gradient[ignored] == 0).all() for gradient in results[0][2 : 2 + DEPTHS])


def test_another_ignore_index() -> None:
    hidden, weight, targets, _ = tensors(11)
    expected = ops.layerwise_cross_entropy(hidden, weight, targets)
    other = torch.where(targets == -100, 2**40, targets)
    assert_equal(ops.layerwise_cross_entropy(hidden, weight, other, ignore_index=2**40), expected)
    inside = ops.layerwise_cross_entropy(hidden, weight, targets.clamp(min=0), ignore_index=0)
    right = layerwise_cross_entropy_reference(hidden, weight, targets.clamp(min=0), ignore_index=0)
    assert_close([inside[1]], [right])


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("shape", [(4,), (0,), (2, 0)])
def test_a_sum_over_no_token_is_zero_and_a_mean_is_an_error(
    shape: tuple[int, ...], weights: list[float] | None
) -> None:
    hidden = [leaf(normal(depth, *shape, WIDTH)) for depth in range(DEPTHS)]
    weight, targets = leaf(normal(9, VOCABULARY, WIDTH)), torch.full(shape, -100)
    with pytest.raises(InputError, match=r"targets must hold at least one token that is not -100 \(ignore_index\)"):
        ops.layerwise_cross_entropy(hidden, weight, targets, depth_weights=weights)
    total, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, depth_weights=weights, reduction="sum")
    found = gradients([total], [*hidden, weight], [torch.ones_like(total)])
    assert_equal([total, per_depth], [torch.zeros_like(total), torch.zeros_like(per_depth)])
    assert_equal(found, [torch.zeros_like(tensor) for tensor in (*hidden, weight)])


@pytest.mark.parametrize("wrong", [VOCABULARY, -1, 2**40])
def test_a_target_out_of_range(wrong: int) -> None:
    hidden, weight, targets, _ = tensors(11)
    targets[3] = wrong
    with pytest.raises(InputError, match=rf"targets must be in \[0, 7\) or -100 \(ignore_index\), got {wrong}"):
        ops.layerwise_cross_entropy(hidden, weight, targets)


def test_a_nan_stays_in_its_depth() -> None:
    hidden, weight, targets, _ = tensors(11)
    targets = targets.clamp(min=0)
    with torch.no_grad():
        hidden[1][4, 0] = float("nan")
    for weights in (None, WEIGHTS):
        total, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, depth_weights=weights, chunk_tokens=100)
        assert torch.isnan(per_depth).tolist() == [False, True, False]
        found = torch.autograd.grad(total, hidden)
        assert [torch.isnan(gradient).any(1).nonzero().flatten().tolist() for gradient in found] == [[], [4], []]


@pytest.mark.parametrize("kept", [True, False])
def test_an_upstream_gradient_of_zero_keeps_a_nan_out(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    if not kept:
        recompute(monkeypatch)
    hidden, weight, targets, bias = tensors(11)
    leaves = [*hidden, weight, bias]
    factors = torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64)
    right = torch.autograd.grad(written(hidden, weight, targets, bias), leaves, factors)
    with torch.no_grad():
        hidden[1].fill_(float("nan"))
    _, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, bias)
    assert_close(gradients([per_depth], leaves, [factors]), right)


# Memory


class _LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside have held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.most = max(self.most, self.live)

        def freed() -> None:
            self._known.discard(key)
            self.live -= size

        weakref.finalize(storage, freed)


@pytest.mark.parametrize(("weighted", "kept_bytes"), [(True, 0), (False, 0), (False, 2**21)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, weighted: bool, kept_bytes: int) -> None:
    monkeypatch.setitem(chunked.CHUNK_BYTES, "cpu", 2**19)
    monkeypatch.setattr(chunked, "KEPT_BYTES", kept_bytes)
    monkeypatch.setitem(steps.SWEEP_BYTES, "cpu", 2**17)
    tokens, width = 512, 8
    for depths, vocabulary in ((4, 1024), (8, 1024), (4, 2048)):
        hidden = [leaf(normal(depth, tokens, width, dtype=dtype)) for depth in range(depths)]
        weight = leaf(normal(9, vocabulary, width, dtype=dtype))
        targets = torch.randint(vocabulary, (tokens,), generator=generator(1))
        with _LiveBytes() as memory:
            total, _ = ops.layerwise_cross_entropy(
                hidden, weight, targets, depth_weights=[1.0] * depths if weighted else None
            )
            torch.autograd.grad(total, [*hidden, weight])
        of_head = 2 * 4 * vocabulary * width
        of_states = 2 * depths * tokens * width * dtype.itemsize
        of_rows = 40 * depths * tokens
        logits = 2 * 128 * vocabulary * dtype.itemsize
        assert memory.most <= of_head + of_states + of_rows + logits + kept_bytes + 3 * 2**17
        assert memory.most <= kept_bytes + depths * tokens * vocabulary * dtype.itemsize / 4


# The sample of the inner depths


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_sample_is_unbiased_over_all_subsets(monkeypatch: pytest.MonkeyPatch, weights: list[float] | None) -> None:
    hidden, weight, targets, bias = tensors(2, 3)
    leaves = [*hidden, weight, bias]

    def run(**options: Any) -> list[Tensor]:
        total, per_depth = ops.layerwise_cross_entropy(hidden, weight, targets, bias, depth_weights=weights, **options)
        return [per_depth.detach(), *torch.autograd.grad(total, leaves)]

    exact, estimates = run(), []
    for subset in itertools.combinations(range(6), 4):
        monkeypatch.setattr(module, "_sample", lambda *_, subset=subset: torch.tensor(subset).flip(0))
        estimates.append(run(inner_fraction=0.6))
        # The last depth is exact in each of them.
        assert_close([estimates[-1][0][-1], estimates[-1][DEPTHS]], [exact[0][-1], exact[DEPTHS]])
    assert (estimates[0][0][0] - exact[0][0]).abs() > 1e-3
    assert_close([torch.stack(parts).mean(0) for parts in zip(*estimates, strict=True)], exact)


def test_the_sample_is_drawn_by_the_generator_and_has_the_size_that_was_asked_for() -> None:
    hidden, weight, targets, _ = tensors(40)
    targets = targets.clamp(min=0)

    def run(seed: int | None, fraction: float = 0.3) -> Tensor:
        source = None if seed is None else generator(seed)
        return ops.layerwise_cross_entropy(hidden, weight, targets, inner_fraction=fraction, generator=source)[1]

    assert_equal([run(1)], [run(1)])
    assert not torch.equal(run(1)[:-1], run(2)[:-1])
    assert torch.equal(run(1)[-1], run(2)[-1])
    assert not torch.equal(run(None)[:-1], run(None)[:-1])
    assert_equal([run(1, 1.0)], [ops.layerwise_cross_entropy(hidden, weight, targets)[1]])
    total, _ = ops.layerwise_cross_entropy(hidden, weight, targets, inner_fraction=0.7, generator=generator(1))
    found = torch.autograd.grad(total, hidden)
    assert [int((gradient != 0).any(1).sum()) for gradient in found] == [28, 28, 40]
    for fraction, count in ((1e-9, 1), (0.01, 1), (0.05, 2), (0.0501, 3), (0.999, 40)):
        sample = module._sample(targets, fraction, None)
        assert sample is not None
        assert len(sample) == count


# Dtypes


def precise_cases() -> list[dict[str, Tensor]]:
    return [
        {
            "first": normal(seed, 20, 16),
            "second": normal(seed + 1, 20, 16),
            "weight": normal(seed + 2, 33, 16) / 2,
            "bias": normal(seed + 3, 33),
        }
        for seed in range(0, 40, 4)
    ]


@pytest.mark.parametrize("weights", [None, [-0.5, 1.5]])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_as_precise_as_torch(dtype: torch.dtype, autocast: bool, weights: list[float] | None) -> None:
    if autocast and dtype == torch.float32:
        pytest.skip("autocast has no float32")
    targets = torch.randint(33, (20,), generator=generator(3))

    def operation(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        total, per_depth = ops.layerwise_cross_entropy(
            [first, second], weight, targets, bias, depth_weights=weights, chunk_tokens=7
        )
        assert per_depth.dtype == (torch.float64 if first.dtype == torch.float64 else torch.float32)
        return [total.to(dtype)]

    def reference(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        losses = [
            torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight, bias), targets)
            for hidden in (first, second)
        ]
        total = losses[0] + losses[1] if weights is None else weights[0] * losses[0] + weights[1] * losses[1]
        return [total if first.dtype == torch.float64 else total.to(dtype)]

    assert_as_precise_as_torch(operation, reference, precise_cases(), dtype, autocast=autocast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_confident_tokens_keep_their_gradient(dtype: torch.dtype) -> None:
    # p = 1 − 2e-4 · 6: p − 1 of a p that was rounded to bfloat16 would be 0, and in float16 off by a fifth.
    logits = torch.zeros(1, VOCABULARY, dtype=dtype)
    logits[0, 2] = 8.5
    hidden, weight = leaf(logits), torch.eye(VOCABULARY, dtype=dtype)
    total, _ = ops.layerwise_cross_entropy([hidden], weight, torch.tensor([2]), depth_weights=[1.0])
    total.backward()
    right = torch.softmax(logits.double(), 1)
    right[0, 2] -= 1
    assert hidden.grad is not None
    assert ((hidden.grad.double() - right).abs() <= 2 * torch.finfo(dtype).eps * right.abs()).all()


def test_the_weights_gradient_is_summed_in_float32() -> None:
    tokens = 1024
    hidden = torch.ones(tokens, 2, dtype=torch.bfloat16)
    weight, bias = leaf(torch.zeros(2, 2, dtype=torch.bfloat16)), leaf(torch.zeros(2, dtype=torch.bfloat16))
    for weights in ([1.0], None):
        total, _ = ops.layerwise_cross_entropy(
            [hidden], weight, torch.zeros(tokens, dtype=torch.int64), bias, depth_weights=weights, chunk_tokens=4
        )
        # In bfloat16 a sum of 0.5 stops growing at 128.
        found = torch.autograd.grad(total, [weight, bias])
        half = torch.tensor([-0.5, 0.5], dtype=torch.bfloat16)
        assert_equal(found, [half.unsqueeze(1).expand(2, 2), half])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_loss_scale_reaches_the_gradients_before_they_are_rounded(dtype: torch.dtype) -> None:
    tokens, scale = 8192, 65536.0
    hidden = leaf((normal(1, tokens, 4) / 4).to(dtype))
    weight = leaf((normal(2, 50, 4) / 4).to(dtype))
    targets = torch.randint(50, (tokens,), generator=generator(3))
    total, _ = ops.layerwise_cross_entropy([hidden], weight, targets, depth_weights=[1e-2])
    found = torch.autograd.grad(scale * total, [hidden, weight])
    exact = [leaf(tensor.detach().double()) for tensor in (hidden, weight)]
    right = torch.autograd.grad(
        scale * 1e-2 * layerwise_cross_entropy_reference([exact[0]], exact[1], targets)[0], exact
    )
    for one, other in zip(found, right, strict=True):
        error = (one.double() - other).square().mean().sqrt() / other.square().mean().sqrt()
        assert error <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_under_autocast_the_gradients_keep_the_dtype_of_the_arguments(weights: list[float] | None) -> None:
    states, weight, targets, bias = tensors(11)
    hidden = [depth.float() for depth in states]
    leaves = [leaf(tensor) for tensor in (*hidden, weight.float(), bias.float())]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, per_depth = ops.layerwise_cross_entropy(
            leaves[:DEPTHS], leaves[-2], targets, leaves[-1], depth_weights=weights, chunk_tokens=4
        )
        found = torch.autograd.grad(total, leaves)
    assert total.dtype == per_depth.dtype == torch.float32
    assert all(gradient.dtype == torch.float32 for gradient in found)
    exact = written(hidden, weight.float(), targets, bias.float())
    assert ((per_depth - exact).abs() > 1e-6).any(), "the products must have run in bfloat16"
    # A gradient that was rounded to bfloat16 would have no digit beyond the eighth bit.
    assert (found[-2] != found[-2].bfloat16().float()).any()


@pytest.mark.parametrize("kept", [True, False])
def test_a_backward_inside_autocast_is_the_one_outside(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    if not kept:
        recompute(monkeypatch)
    states, weight, targets, bias = tensors(11)
    leaves = [leaf(tensor.float()) for tensor in (*states, weight, bias)]
    total, _ = ops.layerwise_cross_entropy(leaves[:DEPTHS], leaves[-2], targets, leaves[-1], chunk_tokens=13)
    outside = torch.autograd.grad(total, leaves, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(torch.autograd.grad(total, leaves), outside)


# Layouts, modes, compilation


@pytest.mark.parametrize("layout", ["transposed", "inside a poisoned buffer", "expanded"])
def test_strides(layout: str) -> None:
    hidden, weight, targets, bias = tensors(11)
    states = [depth.detach() for depth in hidden]
    other_bias = bias.detach()
    if layout == "expanded":
        states[1] = normal(2, WIDTH).expand(11, WIDTH)
        given, other_weight = states, weight.detach()
        other_bias = torch.zeros(1, dtype=torch.float64).expand(VOCABULARY)
    else:
        given = [laid_out(depth, layout) for depth in states]
        other_weight = laid_out(weight.detach(), layout)
    for chunk_tokens, weights in itertools.product((4, None), (None, WEIGHTS)):
        leaves = [*(depth.requires_grad_() for depth in given), other_weight.requires_grad_()]
        total, _ = ops.layerwise_cross_entropy(
            given, other_weight, targets, other_bias, depth_weights=weights, chunk_tokens=chunk_tokens
        )
        plain = [leaf(depth) for depth in (*given, other_weight)]
        expected = written(plain[:-1], plain[-1], targets, other_bias)
        factors = torch.tensor(weights or [1.0] * DEPTHS, dtype=torch.float64)
        found = gradients([total], leaves, [torch.ones_like(total)])
        assert_close(found, torch.autograd.grad(torch.dot(factors, expected), plain))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any, weights: list[float] | None) -> None:
    hidden, weight, targets, bias = tensors(11)
    expected = ops.layerwise_cross_entropy(hidden, weight, targets, bias, depth_weights=weights)
    with mode():
        given = ops.layerwise_cross_entropy(hidden, weight, targets, bias, depth_weights=weights)
    assert not any(result.requires_grad for result in given[:2])
    assert_equal(given[:2], expected[:2])


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_under_checkpointing(weights: list[float] | None) -> None:
    states, *head = tensors(11)
    leaves = [leaf(tensor) for tensor in (*states, head[0], head[2])]

    def network(*leaves: Tensor) -> Tensor:
        return ops.layerwise_cross_entropy(
            list(leaves[:DEPTHS]), leaves[-2], head[1], leaves[-1], depth_weights=weights, chunk_tokens=13
        )[0]

    results = [network(*leaves), checkpoint.checkpoint(network, *leaves, use_reentrant=False)]
    assert_equal(*([total, *torch.autograd.grad(total, leaves)] for total in results))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_gradcheck(weights: list[float] | None) -> None:
    hidden, weight, targets, bias = tensors(4)
    assert torch.autograd.gradcheck(
        lambda *given: ops.layerwise_cross_entropy(
            given[:DEPTHS], given[-2], targets, given[-1], depth_weights=weights, softcap=2.0, label_smoothing=0.1
        )[0],
        (*hidden, weight, bias),
    )
    assert torch.autograd.gradcheck(
        lambda *given: ops.layerwise_cross_entropy(
            given[:DEPTHS], given[-2], targets_of_depths(4), bias.detach(), depth_weights=given[-1]
        )[0],
        (*hidden, weight, leaf(normal(6, DEPTHS))),
    )


def test_repeats_are_bitwise_equal() -> None:
    def run(weights: list[float] | None) -> list[Tensor | None]:
        hidden, weight, targets, bias = tensors(50)
        leaves = [leaf(tensor.float()) for tensor in (*hidden, weight, bias)]
        total, per_depth = ops.layerwise_cross_entropy(
            leaves[:DEPTHS], leaves[-2], targets, leaves[-1], depth_weights=weights
        )
        return [total, per_depth, *gradients([total], leaves, [torch.ones_like(total)])]

    for weights in (None, WEIGHTS):
        assert_equal(run(weights), run(weights))


@pytest.mark.parametrize(
    ("sampled", "trained"),
    [
        (False, (True, True, True)),
        (True, (True, True, True)),
        (True, (False, True, False)),
        (False, (True, False, False)),
        (True, (False, False, False)),
    ],
)
def test_opcheck(trained: tuple[bool, bool, bool], sampled: bool) -> None:
    hidden, weight, targets, bias = tensors(2, 3)
    states = [depth.detach().float().requires_grad_(trained[0]) for depth in hidden]
    head = [
        tensor.detach().float().requires_grad_(want) for tensor, want in zip((weight, bias), trained[1:], strict=True)
    ]
    changed = {"chunk_tokens": 4, "label_smoothing": 0.1, "bias": head[1], "targets": [targets]}
    changed |= {"sample": torch.tensor([4, 1, 0])} if sampled else {"softcap": 3.0}
    needs = {"needs_hidden": [trained[0]] * DEPTHS, "needs_weight": trained[1], "needs_bias": trained[2]}
    loss = arguments(states, head[0], **changed, **needs)

    def check(**changed: Any) -> None:
        operator = layerwise_cross_entropy_forward
        torch.library.opcheck(operator.overload, operator.flat(replace(loss, **changed)))

    check()
    if loss.needs_any:
        check(fused=True, depth_weights=torch.tensor(WEIGHTS))
        if all(trained):
            own = [targets.view(2, 3) for targets in targets_of_depths(6)]
            check(fused=True, depth_weights=torch.tensor(WEIGHTS), targets=own)
        # What is kept has room for rows that do not count, which stays as it is.
        for kept_rows in (6, 12):
            check(kept_rows=kept_rows, chunk_tokens=3, targets=[targets.clamp(min=0)])


@pytest.mark.parametrize(("dynamic", "kind"), [(False, "list"), (True, "none"), (True, "list"), (True, "tensor")])
def test_compiles_without_a_graph_break(dynamic: bool, kind: str) -> None:
    def network(hidden: list[Tensor], weight: Tensor, targets: Tensor, bias: Tensor, numbers: Any) -> Tensor:
        states = [torch.relu(depth) for depth in hidden]
        total, per_depth = ops.layerwise_cross_entropy(states, weight, targets, bias, depth_weights=numbers)
        return 2 * total + per_depth.detach().sum()

    def make(tokens: int, numbers: list[float]) -> list[Any]:
        return [*tensors(2, tokens), {"none": None, "list": numbers, "tensor": torch.tensor(numbers)}[kind]]

    assert_compiles(network, make, [(3, [0.5, 0.0, 2.0]), (5, [0.25, 1.0, 0.0])], dynamic)


def test_compiles_with_a_sample() -> None:
    hidden, weight, targets, _ = tensors(40)
    function = torch.compile(
        lambda: ops.layerwise_cross_entropy(hidden, weight, targets, depth_weights=WEIGHTS, inner_fraction=0.25),
        fullgraph=True,
        backend="aot_eager",
    )
    _, per_depth = function()
    exact = ops.layerwise_cross_entropy(hidden, weight, targets)[1]
    assert_close([per_depth[-1]], [exact[-1]])
    assert not torch.equal(per_depth[0], exact[0])


# Errors


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


def test_the_gradient_of_a_bias_is_exact_over_thousands_of_chunks() -> None:
    """Its sum over the chunks would lose a digit in float32."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3000, 2, generator=generator), torch.randn(3, 2, generator=generator)
    bias, targets = torch.zeros(3, requires_grad=True), torch.zeros(3000, dtype=torch.int64)
    total, _ = ops.layerwise_cross_entropy([hidden], weight, targets, bias, reduction="sum", chunk_tokens=1)
    (gradient,) = torch.autograd.grad(total, bias)
    expected = torch.softmax(hidden.double() @ weight.double().mT, 1).sum(0) - torch.tensor([3000.0, 0, 0])
    torch.testing.assert_close(gradient.double(), expected, rtol=torch.finfo(torch.float32).eps, atol=0)
