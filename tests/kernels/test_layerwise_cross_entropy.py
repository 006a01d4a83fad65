"""The kernel of the layerwise cross-entropy against its formula in float64, and the op on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.ops.layerwise_cross_entropy import layerwise_cross_entropy_reference
from tests.kernels.cross_entropy_cases import (
    BLOCK,
    FLAGS,
    SIZES,
    poisoned_rows,
    run,
    targets_of,
    untouched,
    written,
)
from tests.kernels.kernel_cases import gradients_of, normal
from tests.kernels.precision import assert_as_precise


def check(
    logits: Tensor, targets: Tensor, softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype
) -> None:
    logits = logits.to(device, dtype)
    scales = (1 + normal(3, len(logits)).float().abs()).to(device)
    exact = written(logits.cpu().double(), targets.cpu(), scales.cpu(), softcap, smoothing)
    # The kernel computes in float32 throughout; only the gradient is rounded to the dtype of the logits.
    plain = written(logits.float(), targets, scales, softcap, smoothing)
    inside = poisoned_rows(logits)
    both = run(inside, targets, scales, softcap, smoothing)
    assert untouched(inside)
    # Both results are differences of terms that the compiler may fuse with the cap's product, so that one of them is
    # not rounded: of the logits, and of probabilities, which are computed in float32.
    at_target = logits.cpu().double().gather(1, targets.cpu().unsqueeze(1)).squeeze(1)
    share = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    of_losses = None if softcap is None else softcap * torch.tanh(at_target / softcap)
    of_gradients = None if softcap is None else share * scales.cpu().double()
    assert_as_precise("losses", both[0], plain[0], exact[0], of_losses)
    assert_as_precise("log-sum-exps", both[1], plain[1], exact[1])
    assert_as_precise("gradients", both[2], plain[2].to(dtype), exact[2], of_gradients)

    # Losses alone leave the logits as they are; the gradient alone, from the saved log-sum-exps, is the same.
    inside = poisoned_rows(logits)
    alone = run(inside, targets, None, softcap, smoothing)
    assert torch.equal(inside, logits)
    assert all(torch.equal(one, other) for one, other in zip(alone[:2], both[:2], strict=True))
    run(inside, targets, scales, softcap, smoothing, losses=None, log_sums=alone[1])
    assert torch.equal(inside, both[2])


@pytest.mark.parametrize(("softcap", "smoothing"), FLAGS)
@pytest.mark.parametrize("vocabulary", SIZES)
def test_rows(
    vocabulary: int, softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype
) -> None:
    for rows in (1, 3):
        targets = targets_of(rows, vocabulary, device)
        check(2 * normal(rows, rows, vocabulary), targets, softcap, smoothing, device, dtype)


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 2])
def test_the_target_at_the_edges_of_a_block(place: int, device: torch.device, dtype: torch.dtype) -> None:
    targets = torch.full((2,), place, device=device)
    check(normal(1, 2, 2 * BLOCK + 3), targets, None, 0.1, device, dtype)


# Without the softcap the smoothed loss sums the large logits themselves; with it they are small again.
@pytest.mark.parametrize(("softcap", "smoothing"), [(None, 0.0), (None, 0.1), (2.5, 0.1)])
@pytest.mark.parametrize("kind", ["large", "equal", "confident", "falling", "rising", "tiny"])
def test_extreme_logits(
    kind: str, softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype
) -> None:
    vocabulary = 2 * BLOCK + 3
    logits = {
        "large": 1e4 * normal(1, 3, vocabulary).clamp(-3, 3),
        "equal": torch.full((3, vocabulary), -1e4, dtype=torch.float64),
        "confident": 30 * torch.nn.functional.one_hot(torch.tensor([0, 40, 66]), vocabulary).double(),
        "falling": torch.linspace(1e4, -1e4, vocabulary, dtype=torch.float64).expand(3, -1),
        "rising": torch.linspace(-1e4, 1e4, vocabulary, dtype=torch.float64).expand(3, -1),
        "tiny": 1e-4 * normal(2, 3, vocabulary),
    }[kind]
    check(logits, torch.tensor([0, 40, 66], device=device), softcap, smoothing, device, dtype)


@pytest.mark.parametrize("softcap", [4.0, 1000.0])
def test_the_softcap_of_small_logits_keeps_its_digits(softcap: float, device: torch.device) -> None:
    # exp alone would be off by 6e-8 · softcap, whatever the logits' size. One class beside a logit of 0: the loss's
    # gradient is p − 1 = −1 / (1 + exp(x)), and x itself shows in the difference of the losses of both classes.
    values = torch.logspace(-6, 1, 24, dtype=torch.float64)
    logits = torch.stack([values, torch.zeros_like(values)], 1).to(device, torch.float32)
    zeros = torch.zeros(len(values), dtype=torch.int64, device=device)
    cap = softcap * torch.tanh(logits.cpu().double()[:, 0] / softcap)
    losses = [run(logits.clone(), zeros + side, None, softcap, 0.0)[0].cpu().double() for side in (0, 1)]
    # Each loss is rounded to 2^-24 of its size, up to ten.
    assert (losses[1] - losses[0] - cap).abs().max() <= 2e-6
    slope = 1 - (cap / softcap) ** 2
    gradient = run(logits.clone(), zeros + 1, torch.ones(len(values), device=device), softcap, 0.0)[2][:, 0]
    right = slope * torch.sigmoid(cap)
    assert ((gradient.cpu().double() - right).abs() <= 1e-6 * right + 2e-7).all()


def test_the_slope_of_the_softcap_near_its_cap_keeps_its_digits(device: torch.device) -> None:
    ratios = torch.linspace(-8, 8, 17, dtype=torch.float64)
    logits = torch.stack([2 * ratios, torch.zeros_like(ratios)], 1).to(device, torch.float32)
    second, scales = torch.ones(17, dtype=torch.int64, device=device), torch.ones(17, device=device)
    gradient = run(logits, second, scales, 2.0, 0.0)[2][:, 0].cpu().double()
    right = torch.sigmoid(2 * torch.tanh(ratios)) / torch.cosh(ratios) ** 2
    assert ((gradient - right).abs() <= 5e-6 * right).all()


@pytest.mark.parametrize(("softcap", "smoothing"), [(None, 0.0), (2.5, 0.1)])
def test_minus_infinity_is_a_class_that_cannot_be(
    softcap: float | None, smoothing: float, device: torch.device
) -> None:
    logits = normal(1, 4, 2 * BLOCK + 3)
    if softcap is None:
        logits[:, :BLOCK] = float("-inf")  # a whole block without a finite number, and the first one
        logits[1, BLOCK:] = torch.where(torch.arange(BLOCK + 3) == 7, logits[1, BLOCK:], float("-inf"))
    targets = torch.full((4,), BLOCK + 7, device=device)
    scales = torch.ones(4, device=device)
    exact = written(logits, targets.cpu(), scales.cpu(), softcap, smoothing)
    given = run(logits.to(device, torch.float32), targets, scales, softcap, smoothing)
    for one, other in zip(given, exact, strict=True):
        assert (one.cpu().double() - other).abs().max() <= 4e-6


@pytest.mark.parametrize(("softcap", "smoothing"), FLAGS)
def test_ignored_rows_and_targets_out_of_range(
    softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype
) -> None:
    vocabulary = BLOCK + 1
    clean = normal(1, 7, vocabulary).to(device, dtype)
    targets = targets_of(7, vocabulary, device)
    scales = torch.full((7,), -2.0, device=device)
    expected = run(clean.clone(), targets, scales, softcap, smoothing)
    logits, broken = clean.clone(), targets.clone()
    logits[1] = float("nan")
    broken[1] = broken[2] = -100
    broken[3], broken[4], broken[5] = vocabulary, -1, 2**40
    given = run(poisoned_rows(logits), broken, scales, softcap, smoothing)
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one[[0, 6]], other[[0, 6]])
        assert (one[[1, 2]] == 0).all()
    assert torch.isnan(given[0][3:6]).all()
    assert torch.isnan(given[2][3:6]).all()

    # An ignore_index inside of the vocabulary is ignored as well.
    broken[0] = 5
    given = run(clean.clone(), broken, scales, softcap, smoothing, ignore_index=5)
    assert given[0][0] == 0
    assert (given[2][0] == 0).all()


def test_a_nan_row_stays_its_own_and_a_scale_of_zero_gives_zeros(device: torch.device, dtype: torch.dtype) -> None:
    logits, targets = normal(1, 5, BLOCK + 1).to(device, dtype), targets_of(5, BLOCK + 1, device)
    scales = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], device=device)
    expected = run(logits.clone(), targets, scales, None, 0.1)
    assert (expected[2][[2, 4]] == 0).all()
    logits[1, 3] = logits[2, 3] = float("nan")
    given = run(logits.clone(), targets, scales, None, 0.1)
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one[[0, 3, 4]], other[[0, 3, 4]])
        assert torch.isnan(one[1]).all()
    assert torch.isnan(given[0][2])
    assert (given[2][2] == 0).all()


def test_rows_that_lie_beyond_two_to_the_31_numbers(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 2**35:
        pytest.skip("needs 20 GB of the GPU's memory")
    size = 2**32 + 16
    # Lazily committed on the CPU: pages that nobody touches cost nothing.
    buffer = torch.zeros(size, device=device) if device.type == "cuda" else _lazy_zeros(size)
    logits = buffer.as_strided((3, 5), (2**30, 1), 2**31)
    clean = normal(1, 3, 5).float().to(device)
    logits.copy_(clean)
    targets, scales = targets_of(3, 5, device), torch.ones(3, device=device)
    expected = run(clean.clone(), targets, scales, None, 0.0)
    given = run(logits, targets, scales, None, 0.0)
    assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))


def _lazy_zeros(size: int) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.zeros(size, np.float32))


@pytest.mark.emulated
def test_the_blocks_that_the_card_gets(device: torch.device, dtype: torch.dtype) -> None:
    for vocabulary in (2, 130, 5000):
        logits = normal(1, 2, vocabulary).to(device, dtype)
        targets, scales = targets_of(2, vocabulary, device), torch.ones(2, device=device)
        exact = written(logits.cpu().double(), targets.cpu(), scales.cpu(), None, 0.0)
        plain = written(logits.float(), targets, scales, None, 0.0)
        given = run(logits.clone(), targets, scales, None, 0.0, blocks=None)
        assert_as_precise("losses", given[0], plain[0], exact[0])
        assert_as_precise("gradients", given[2], plain[2].to(dtype), exact[2])


# The op on the kernel


@pytest.mark.parametrize("weights", [None, [0.5, 0.0, -2.0]])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0, "label_smoothing": 0.1}, {"reduction": "sum", "chunk_tokens": 5}], ids=str
)
def test_the_cross_entropy_op(
    options: dict[str, Any], weights: list[float] | None, device: torch.device, dtype: torch.dtype
) -> None:
    vocabulary, width = 41, 16
    targets = targets_of(13, vocabulary, device)
    targets[::3] = -100
    made = [*(normal(depth, 13, width) for depth in range(3)), normal(8, vocabulary, width) / 2, normal(9, vocabulary)]
    flags = {name: value for name, value in options.items() if name != "chunk_tokens"}
    factors = [1.0] * 3 if weights is None else weights
    results = []
    for run_device, run_dtype in ((device, dtype), (device, dtype), (torch.device("cpu"), torch.float64)):
        leaves = [tensor.to(dtype).to(run_device, run_dtype).requires_grad_() for tensor in made]
        if not results:
            total, per_layer = ops.layerwise_cross_entropy(
                leaves[:3], leaves[3], targets, leaves[4], depth_weights=weights, **options
            )
        else:
            per_layer = layerwise_cross_entropy_reference(
                leaves[:3], leaves[3], targets.to(run_device), leaves[4], **flags
            )
            total = torch.dot(per_layer.new_tensor(factors), per_layer)
        results.append([per_layer.detach(), *gradients_of(total, leaves)])
    names = ["losses", "h0", "h1", "h2", "weight", "bias"]
    for name, given, plain, exact in zip(names, *results, strict=True):
        assert_as_precise(name, given.to(dtype), plain, exact)


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("weights", [None, [0.5, -2.0]])
def test_the_cross_entropy_of_strided_inputs(weights: list[float] | None, depths: int, device: torch.device) -> None:
    table = torch.stack([targets_of(13, 41, device), torch.full((13,), 10**6, device=device)], 1)
    assert not table[:, 0].is_contiguous()
    made = [*(normal(depth, 13, 16) for depth in range(depths)), normal(8, 41, 16), torch.ones(41)]
    made = [tensor.float().to(device) for tensor in made]
    strided = [tensor.mT.contiguous().mT if tensor.ndim == 2 else tensor[:1].expand(41) for tensor in made]
    results = []
    for targets, tensors in ((table[:, 0].contiguous(), made), (table[:, 0], strided)):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        given = None if weights is None else weights[:depths]
        total, losses = ops.layerwise_cross_entropy(leaves[:-2], leaves[-2], targets, leaves[-1], depth_weights=given)
        results.append([losses.detach(), *gradients_of(total, leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_dtype_that_the_kernel_cannot_load_is_refused(device: torch.device) -> None:
    hidden = torch.zeros(2, 3, device=device, dtype=torch.float64)
    with pytest.raises(Exception, match=r"cannot run layerwise_cross_entropy here: .* not in float64"):
        ops.layerwise_cross_entropy([hidden], hidden, torch.zeros(2, dtype=torch.int64, device=device))


def test_repeats_are_bitwise_equal(device: torch.device, dtype: torch.dtype) -> None:
    def once() -> list[Tensor]:
        leaves = [normal(seed, 19, 16).to(device, dtype).requires_grad_() for seed in range(3)]
        targets = targets_of(19, 19, device)
        total, per_layer = ops.layerwise_cross_entropy(leaves[:2], leaves[2], targets, depth_weights=[1.0, 0.5])
        return [total, per_layer, *gradients_of(total, leaves)]

    assert all(torch.equal(one, other) for one, other in zip(once(), once(), strict=True))


def test_on_a_gpu_the_host_never_waits(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    hidden = [normal(seed, 33, 16).to(device, torch.float32).requires_grad_() for seed in range(2)]
    weight, weights = normal(5, 40, 16).to(device, torch.float32).requires_grad_(), torch.ones(2, device=device)
    targets = targets_of(33, 40, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in (weights, None):
            ops.layerwise_cross_entropy(hidden, weight, targets, depth_weights=given, chunk_tokens=16)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_on_a_gpu_a_mean_over_no_token_is_nan_and_its_gradients_are_zero(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU: on the CPU it is an error")
    hidden, weight = (normal(seed, 33, 16).to(device, torch.float32).requires_grad_() for seed in range(2))
    targets = torch.full((33,), -100, device=device)
    for weights in ([1.0], None):
        total, _ = ops.layerwise_cross_entropy([hidden], weight, targets, depth_weights=weights)
        assert torch.isnan(total)
        assert all((gradient == 0).all() for gradient in torch.autograd.grad(total, [hidden, weight]))
