"""The reconstruction loss at every depth: the formula, what the weights switch off, padding, dtypes and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import ReconstructionLossArguments
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.layerwise_reconstruction_loss import plain as reconstruction_in_torch
from cdt_fast.ops.layerwise_reconstruction_loss.operator import layerwise_reconstruction_loss_forward
from tests.ops.ops_cases import (
    LAYOUTS,
    LOW_DTYPES,
    assert_close,
    assert_compiles,
    assert_equal,
    laid_out,
    leaf,
    normal,
    opcheck,
    picture_patches,
)

DEPTHS = 4


def tensors(*shape: int) -> tuple[list[Tensor], Tensor]:
    return [leaf(normal(depth, *shape)) for depth in range(DEPTHS)], leaf(normal(100, *shape))


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 5, 3), (2, 2, 5, 3), (1, 1, 1)])
def test_losses_are_the_formula_and_differentiable_without_weights(shape: tuple[int, ...]) -> None:
    depths, target = tensors(*shape)
    total, per_layer = ops.layerwise_reconstruction_loss(depths, target)
    tokens = target.numel() // shape[-1]
    expected = [((depth - target) ** 2).sum() / tokens for depth in depths]
    assert_close([per_layer, total], [torch.stack(expected), torch.stack(expected).sum()])
    assert_close([per_layer], [layerwise_reconstruction_loss_reference(depths, target)])

    factors = normal(5, DEPTHS)
    found = torch.autograd.grad(per_layer, [*depths, target], factors, retain_graph=True)
    differences = [2 * (depth - target) * factor / tokens for depth, factor in zip(depths, factors, strict=True)]
    assert_close(found, [*differences, -torch.stack(differences).sum(0)])
    assert_close(
        torch.autograd.grad(total, [*depths, target]),
        torch.autograd.grad(torch.stack(expected).sum(), [*depths, target]),
    )


@pytest.mark.parametrize("numbers", [1, 4, 9, 10**6])  # of blocks of one row, of one, of three, and of all seven
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_block_after_block_gives_what_the_formula_does(
    monkeypatch: pytest.MonkeyPatch, numbers: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(reconstruction_in_torch, "NUMBERS_A_BLOCK", numbers)
    depths = [leaf(normal(depth, 7, 3).to(dtype)) for depth in range(DEPTHS)]
    target = leaf(normal(100, 7, 3))
    lengths = torch.tensor(5)
    weights = [0.5, 0.0, -1.0, 2.0]
    total, per_layer = ops.layerwise_reconstruction_loss(depths, target, depth_weights=weights, lengths=lengths)
    found = torch.autograd.grad(total, [depths[0], depths[2], depths[3], target])
    exact = [leaf(depth.detach().double()) for depth in depths]
    expected = layerwise_reconstruction_loss_reference([depth[:5] for depth in exact], target[:5])
    wanted = torch.autograd.grad(
        (torch.tensor(weights, dtype=torch.float64) * expected).sum(), [exact[0], exact[2], exact[3], target]
    )
    rtol, atol = (1e-12, 1e-14) if dtype == torch.float64 else (2**-8, 2**-20)  # a rounding to bfloat16
    for one, other in zip([per_layer, *found], [expected, *wanted], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", ["tensor", "list", "numpy", "float32", "trained"])
def test_with_weights_the_total_is_differentiable_and_the_losses_are_not(kind: str) -> None:
    depths, target = tensors(2, 5, 3)
    numbers = [0.3, -1.25, 0.0, 2.0]
    weights: Any = {
        "tensor": torch.tensor(numbers, dtype=torch.float64),
        "list": numbers,
        "numpy": np.array(numbers),
        "float32": torch.tensor(numbers),
        "trained": torch.tensor(numbers, requires_grad=True),
    }[kind]
    total, per_layer = ops.layerwise_reconstruction_loss(depths, target, depth_weights=weights)
    assert not per_layer.requires_grad
    if kind in ("float32", "trained"):
        numbers = weights.double().tolist()  # 0.3 is another number in float32; that of a list keeps its precision
    expected = layerwise_reconstruction_loss_reference(depths, target)
    assert_close([per_layer, total], [expected, torch.dot(torch.tensor(numbers, dtype=torch.float64), expected)])
    total.backward()
    for depth, weight in zip(depths, numbers, strict=True):
        if weight == 0:
            assert depth.grad is None, "a depth with weight 0 must cost no backward"
        else:
            assert_close([depth.grad], [2 * weight * (depth - target).detach() / 10])
    assert_close([target.grad], [-torch.stack([depth.grad for depth in depths if depth.grad is not None]).sum(0)])


def test_a_depth_of_weight_zero_changes_no_other_gradient() -> None:
    def gradients(weights: list[float], used: list[int]) -> list[Tensor | None]:
        depths, target = tensors(2, 5, 3)
        total, _ = ops.layerwise_reconstruction_loss(
            [depths[index] for index in used], target, depth_weights=[weights[index] for index in used]
        )
        total.backward()
        return [depths[index].grad for index in (0, 1, 3)]

    assert_equal(gradients([1.0, -0.5, 0.0, 2.0], [0, 1, 2, 3]), gradients([1.0, -0.5, 0.0, 2.0], [0, 1, 3]))


def test_all_weights_zero_and_nothing_to_differentiate() -> None:
    depths, target = tensors(2, 3)
    total, per_layer = ops.layerwise_reconstruction_loss(depths, target.detach(), depth_weights=[0] * DEPTHS)
    assert total.item() == 0
    assert not total.requires_grad
    assert (per_layer > 0).all()


def test_exact_reconstructions_have_loss_zero_and_gradient_zero() -> None:
    target = normal(1, 2, 5, 3)
    depth = leaf(target)
    total, per_layer = ops.layerwise_reconstruction_loss([depth], target)
    total.backward()
    assert_equal([per_layer, depth.grad], [torch.zeros(1, dtype=torch.float64), torch.zeros_like(target)])


@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
def test_strides(layout: str) -> None:
    base, target = normal(2, 3, 4), normal(3, 3, 4)
    if layout == "expanded":
        depth = normal(2, 4).expand(3, 4)
        base = depth.contiguous()
    else:
        depth = laid_out(base, layout)
    expected = (base - target).square().sum(-1).mean()
    other = target if layout == "expanded" else laid_out(target, layout)
    assert_close(ops.layerwise_reconstruction_loss([depth], other), [expected, expected[None]])


# Padding


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("weights", [None, [1.0, -2.0, 0.0, 0.5]])
def test_padding_takes_no_part(poison: float, weights: list[float] | None) -> None:
    lengths = torch.tensor([[5, 0], [2, 3]])
    kept = torch.arange(5) < lengths.unsqueeze(-1)
    depths = [leaf(normal(depth, 2, 2, 5, 3).masked_fill(~kept.unsqueeze(-1), poison)) for depth in range(DEPTHS)]
    target = leaf(normal(9, 2, 2, 5, 3).masked_fill(~kept.unsqueeze(-1), poison))
    total, per_layer = ops.layerwise_reconstruction_loss(depths, target, depth_weights=weights, lengths=lengths)
    expected = torch.stack([(depth[kept] - target[kept]).square().sum() / 10 for depth in depths])
    factors = torch.tensor(weights or [1.0] * DEPTHS, dtype=torch.float64)
    assert_close([per_layer, total], [expected, torch.dot(factors, expected)])
    total.backward()
    for depth, factor in zip(depths, factors, strict=True):
        if factor:
            difference = torch.where(kept.unsqueeze(-1), 2 * factor * (depth - target).detach() / 10, 0.0)
            assert_close([depth.grad], [difference])
    assert target.grad is not None
    assert (target.grad[~kept] == 0).all()


def test_full_lengths_equal_none() -> None:
    depths, target = tensors(2, 5, 3)
    with_lengths = ops.layerwise_reconstruction_loss(depths, target, lengths=torch.tensor([5, 5]))
    assert_close(with_lengths, ops.layerwise_reconstruction_loss(depths, target))


def test_a_nan_stays_in_its_depth() -> None:
    depths, target = tensors(2, 5, 3)
    with torch.no_grad():
        depths[1][0, 0, 0] = float("nan")
    _, per_layer = ops.layerwise_reconstruction_loss(depths, target)
    assert torch.isnan(per_layer).tolist() == [False, True, False, False]
    (gradient,) = torch.autograd.grad(per_layer.sum(), depths[2])
    assert torch.isfinite(gradient).all()


# Dtypes


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_narrow_inputs_are_subtracted_and_summed_in_float32(dtype: torch.dtype) -> None:
    # 16 000 tokens: a sum in bfloat16 would stop growing after a few hundred of them.
    target = picture_patches(1, 400, 40, 64).to(dtype)
    depth = (target.double() + 0.05 * normal(2, *target.shape)).to(dtype).requires_grad_()
    total, per_layer = ops.layerwise_reconstruction_loss([depth], target)
    exact = (depth.detach().double() - target.double()).square().sum(-1).mean()
    assert per_layer.dtype == torch.float32
    assert abs(per_layer.item() - exact) <= 2e-6 * exact
    total.backward()
    assert depth.grad is not None
    assert depth.grad.dtype == dtype
    right = 2 * (depth.detach().double() - target.double()) / 16000
    # Three roundings in float32 and one to the dtype; float16's smallest steps where the gradient is that small.
    relative = torch.finfo(dtype).eps / 2 + 2 * torch.finfo(torch.float32).eps
    allowed = relative * right.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((depth.grad.double() - right).abs() <= allowed).all()


def test_the_target_may_have_another_dtype_than_the_reconstructions() -> None:
    target = picture_patches(1, 2, 5, 16)
    depths = [target.to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    _, per_layer = ops.layerwise_reconstruction_loss(depths, target.float())
    assert per_layer.dtype == torch.float32
    exact = (depths[0].double() - target.float().double()).square().sum(-1).mean()
    assert abs(per_layer[0].item() - exact) <= 1e-6 * exact
    assert per_layer[1] == 0


def test_autocast_changes_nothing() -> None:
    depths, target = ([tensor.float() for tensor in part] for part in (tensors(2, 5, 3)[0], [normal(9, 2, 5, 3)]))
    expected = ops.layerwise_reconstruction_loss(depths, target[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(ops.layerwise_reconstruction_loss(depths, target[0]), expected)


@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 1])])
@pytest.mark.parametrize("weights", [None, [1.0, -2.0, 0.0, 0.5]])
def test_gradcheck(weights: list[float] | None, lengths: Tensor | None) -> None:
    depths, target = tensors(2, 2, 3)
    assert torch.autograd.gradcheck(
        lambda *given: ops.layerwise_reconstruction_loss(given[:-1], given[-1], depth_weights=weights, lengths=lengths),
        (*depths, target),
    )


@pytest.mark.parametrize("trained", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("padded", [False, True])
def test_opcheck(trained: tuple[bool, bool], padded: bool) -> None:
    depths, target = tensors(2, 3, 4)
    states = [depth.detach().float().requires_grad_(trained[0]) for depth in depths]
    states[1] = states[1].detach()
    padding = torch.tensor([[False, False, True], [False, True, True]]) if padded else None
    target = target.detach().float().requires_grad_(trained[1])
    loss = ReconstructionLossArguments(reconstructions=states, target=target, padding=padding, backend="torch")
    opcheck(layerwise_reconstruction_loss_forward, loss)


@pytest.mark.parametrize("kind", ["none", "list", "tensor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic: bool, kind: str) -> None:
    def network(depths: list[Tensor], target: Tensor, lengths: Tensor, numbers: Any) -> Tensor:
        states = [torch.relu(depth) for depth in depths]
        total, per_layer = ops.layerwise_reconstruction_loss(states, target, depth_weights=numbers, lengths=lengths)
        return 2 * total + per_layer.detach().sum()

    def make(tokens: int, numbers: list[float]) -> list[Any]:
        weights = {"none": None, "list": numbers, "tensor": torch.tensor(numbers)}[kind]
        return [*tensors(2, tokens, 3), torch.tensor([2, tokens]), weights]

    assert_compiles(network, make, [(3, [0.5, 0.0, 2.0, 1.0]), (5, [0.25, 1.0, 0.0, -1.0])], dynamic)


def test_repeats_are_bitwise_equal() -> None:
    def run() -> list[Tensor | None]:
        target = picture_patches(1, 40, 20, 64).float()
        depths = [leaf(picture_patches(seed, 40, 20, 64).float()) for seed in (2, 3)]
        total, per_layer = ops.layerwise_reconstruction_loss(depths, target, depth_weights=[-0.5, 2])
        total.backward()
        return [total, per_layer, *(depth.grad for depth in depths)]

    assert_equal(run(), run())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reconstructions": []}, r"reconstructions must be a list of one tensor a depth, got \[\]"),
        ({"reconstructions": torch.zeros(2, 3, 4)}, r"reconstructions must be a list .* got \(2, 3, 4\) float32"),
        ({"reconstructions": None}, r"reconstructions must be a list .* got None"),
        ({"reconstructions": iter([torch.zeros(2, 3)])}, r"reconstructions must be a list .* got <list_iterator"),
        ({"reconstructions": [torch.zeros(2, 4)]}, r"reconstructions\[0\] must have shape \(2, 3\).*got \(2, 4\)"),
        (
            {"reconstructions": [torch.zeros(2, 3), torch.zeros(3)]},
            r"reconstructions\[1\] must have shape \(2, 3\).*got \(3,\)",
        ),
        (
            {"reconstructions": [torch.zeros(2, 3, dtype=torch.int64)]},
            r"reconstructions\[0\] must be a dense floating.*int64",
        ),
        ({"reconstructions": [None]}, r"reconstructions\[0\] must be a dense floating-point tensor .* got None"),
        (
            {"reconstructions": [torch.zeros(2, 3, device="meta")]},
            r"reconstructions\[0\] is on meta but target is on cpu",
        ),
        ({"target": torch.tensor(1.0)}, r"target must be .*\[\.\.\., n\], got \(\) float32"),
        ({"target": [1.0]}, r"target must be a dense floating-point tensor .* got \[1.0\]"),
        ({"depth_weights": [1.0, 2.0]}, r"depth_weights must have shape \(1,\) \(one weight a depth\), got \(2,\)"),
        ({"depth_weights": 1.0}, r"depth_weights must have shape \(1,\).*got \(\)"),
        ({"depth_weights": "1"}, r"depth_weights must be 1 numbers, got '1' \(str\)"),
        ({"depth_weights": ["a"]}, r"depth_weights must be 1 numbers, got \['a'\] \(list\)"),
        ({"lengths": torch.tensor([1, 1])}, r"lengths must have shape \(\).*got \(2,\)"),
        ({"lengths": torch.tensor(1.0)}, r"lengths must be an integer tensor .* got \(\) float32"),
        ({"lengths": torch.tensor(0)}, r"target must hold at least one token that counts"),
    ],
)
def test_errors_name_the_argument_what_was_given_and_what_is_expected(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"reconstructions": [torch.zeros(2, 3)], "target": torch.zeros(2, 3)}
    with pytest.raises(InputError, match=message):
        ops.layerwise_reconstruction_loss(**{**arguments, **changed})


def test_lengths_need_tokens() -> None:
    with pytest.raises(InputError, match=r"target must be .*\[\.\.\., T, n\], got \(3,\)"):
        ops.layerwise_reconstruction_loss([torch.zeros(3)], torch.zeros(3), lengths=torch.tensor(1))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (0, 5, 3)])
def test_no_tokens_have_no_mean(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"at least one token that counts, got shape \("):
        ops.layerwise_reconstruction_loss([torch.zeros(shape)], torch.zeros(shape))


@pytest.mark.parametrize("lengths", [None, [3, 1]])
def test_a_sum_is_the_mean_times_the_tokens_that_count(lengths: list[int] | None) -> None:
    results = []
    for reduction in ("mean", "sum"):
        depths, target = tensors(2, 4, 3)
        leaves = [depth.detach().requires_grad_() for depth in depths]
        counted = None if lengths is None else torch.tensor(lengths)
        total, losses = ops.layerwise_reconstruction_loss(leaves, target, lengths=counted, reduction=reduction)  # type: ignore[arg-type]
        results.append([losses, *torch.autograd.grad(total, leaves)])
    tokens = 8 if lengths is None else sum(lengths)
    for mean, summed in zip(*results, strict=True):
        torch.testing.assert_close(summed, mean * tokens)


def test_an_unknown_reduction_is_refused() -> None:
    depths, target = tensors(2, 3)
    with pytest.raises(InputError, match="reduction"):
        ops.layerwise_reconstruction_loss(depths, target, reduction="median")  # type: ignore[arg-type]
