"""The kernel of the layerwise cross-entropy on logits of its own: what it touches, and rows that do not count."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_
from tests.ops.battery import generator, normal

BLOCK = 32
SIZES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
FLAGS = list(itertools.product((None, 2.5), (0.0, 0.1)))


def targets_of(rows: int, vocabulary: int, device: torch.device, seed: int = 1) -> Tensor:
    return torch.randint(vocabulary, (rows,), generator=generator(seed)).to(device)


def poisoned_rows(matrix: Tensor, padding: int = 0) -> Tensor:
    """The same values, with NaN before the first row, after each row, also in its padding, and after the last."""
    rows, columns = matrix.shape
    buffer = matrix.new_full((rows + 2, columns + padding + 3), float("nan"))
    buffer[1:-1, :columns] = matrix
    return buffer[1:-1, : columns + padding]


def untouched(inside: Tensor) -> bool:
    """Whether everything around what `poisoned_rows` has returned is still NaN."""
    whole = torch.as_strided(inside, (inside.untyped_storage().size() // inside.element_size(),), (1,), 0)
    return int((~torch.isnan(whole)).sum()) == int((~torch.isnan(inside)).sum())


def run(
    logits: Tensor,
    targets: Tensor,
    scales: Tensor | None,
    softcap: float | None,
    smoothing: float,
    z_loss: float = 0.0,
    *,
    ignore_index: int = -100,
    padding: int = 0,
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient or, without scales, the logits; the gradient `alone` if asked for."""
    losses, vocabulary = torch.empty(len(logits), device=logits.device), logits.shape[1] - padding
    given = logits, vocabulary, targets, None if alone else losses, scales
    cross_entropy_(*given, ignore_index, softcap, smoothing, z_loss, columns=BLOCK)
    return losses, logits[:, :vocabulary]


@pytest.mark.parametrize(("softcap", "smoothing"), FLAGS)
@pytest.mark.parametrize(("padding", "z_loss"), [(0, 0.0), (5, 0.02)])
def test_rows(
    padding: int, z_loss: float, softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype
) -> None:
    for vocabulary, rows in itertools.product(SIZES, (1, 3)):
        logits, targets = (2 * normal(rows, rows, vocabulary)).to(device, dtype), targets_of(rows, vocabulary, device)
        scales = (1 + normal(3, rows).float().abs()).to(device)
        exact = logits.cpu().double().requires_grad_()
        capped = exact if softcap is None else softcap * torch.tanh(exact / softcap)
        flags: Any = {"reduction": "none", "label_smoothing": smoothing}
        losses = torch.nn.functional.cross_entropy(capped, targets.cpu(), **flags)
        losses = losses + z_loss * capped.logsumexp(1).square()
        (gradients,) = torch.autograd.grad(losses, exact, scales.cpu().double())
        given, more = (targets, scales, softcap, smoothing, z_loss), dict[str, Any](padding=padding)
        inside = poisoned_rows(logits, padding)
        both = run(inside, *given, **more)
        assert untouched(inside)
        # The kernel computes in float32 throughout; only the gradient is rounded to the dtype of the logits.
        torch.testing.assert_close(both[0].cpu().double(), losses.detach(), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(both[1].cpu().double(), gradients, rtol=torch.finfo(dtype).eps, atol=2e-6)

        # Losses alone leave the logits as they are; the gradient alone is the same.
        inside = poisoned_rows(logits, padding)
        assert torch.equal(run(inside, targets, None, *given[2:], **more)[0], both[0])
        assert torch.equal(inside[:, :vocabulary], logits)
        run(inside, *given, **more, alone=True)
        if device.type == "cuda":  # ptxas fuses other products with sums in the kernel of the gradient alone
            torch.testing.assert_close(inside[:, :vocabulary], both[1], rtol=torch.finfo(dtype).eps, atol=1e-7)
        else:
            assert torch.equal(inside[:, :vocabulary], both[1])


@pytest.mark.parametrize(("softcap", "smoothing"), FLAGS)
def test_shards_of_a_row(softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype) -> None:
    """Each gives its part of λ and of what is subtracted, and with the λ of all its part of the gradient."""
    rows, sizes = 5, (BLOCK + 3, 1, 2 * BLOCK)
    logits, targets = normal(1, rows, sum(sizes)).to(device, dtype), targets_of(rows, sum(sizes), device)
    scales, flags = torch.full((rows,), 0.5, device=device), (-100, softcap, smoothing, 0.02)
    targets[1], targets[2] = -100, sum(sizes)
    expected = run(logits.clone(), targets, scales, *flags[1:])
    shards, firsts = [part.contiguous() for part in logits.split(sizes, 1)], itertools.accumulate((0, *sizes[:-1]))
    parts, calls = torch.empty(3, 2, rows, device=device), []
    for (log_sums, less), shard, first in zip(parts, shards, firsts, strict=True):
        where: Any = {"first": first, "classes": sum(sizes), "columns": BLOCK}
        cross_entropy_(shard, shard.shape[1], targets, less, None, *flags, log_sums=log_sums, **where)
        calls.append((shard, where))
    log_sums = parts[:, 0].logsumexp(0)
    losses = log_sums - parts[:, 1].sum(0) + 0.02 * log_sums**2
    for shard, where in calls:
        cross_entropy_(shard, shard.shape[1], targets, None, scales, *flags, log_sums=log_sums, **where)
    given = losses.masked_fill(targets == -100, 0.0), torch.cat(shards, 1)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=torch.finfo(one.dtype).eps * 4, atol=4e-6, equal_nan=True)


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
    given = run(poisoned_rows(logits, 2), broken, scales, softcap, smoothing, padding=2)
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one[[0, 6]], other[[0, 6]])
        assert (one[[1, 2]] == 0).all()
    assert torch.isnan(given[0][3:6]).all()
    assert torch.isnan(given[1][3:6]).all()

    # An ignore_index inside of the vocabulary is ignored as well.
    broken[0] = 5
    given = run(clean.clone(), broken, scales, softcap, smoothing, ignore_index=5)
    assert given[0][0] == 0
    assert (given[1][0] == 0).all()


def test_a_nan_row_stays_its_own_and_a_scale_of_zero_gives_zeros(device: torch.device, dtype: torch.dtype) -> None:
    logits, targets = normal(1, 5, BLOCK + 1).to(device, dtype), targets_of(5, BLOCK + 1, device)
    scales = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], device=device)
    expected = run(logits.clone(), targets, scales, None, 0.1)
    assert (expected[1][[2, 4]] == 0).all()
    logits[1, 3] = logits[2, 3] = float("nan")
    given = run(logits.clone(), targets, scales, None, 0.1)
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one[[0, 3, 4]], other[[0, 3, 4]])
        assert torch.isnan(one[1]).all()
    assert torch.isnan(given[0][2])
    assert (given[1][2] == 0).all()


def test_rows_that_lie_beyond_two_to_the_31_numbers(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 2**35:
        pytest.skip("needs 20 GB of the GPU's memory")
    size = 2**32 + 16
    # Lazily committed on the CPU: pages that nobody touches cost nothing.
    buffer = torch.zeros(size, device=device) if device.type == "cuda" else torch.from_numpy(np.zeros(size, np.float32))
    logits = buffer.as_strided((3, 5), (2**30, 1), 2**31)
    clean = normal(1, 3, 5).float().to(device)
    logits.copy_(clean)
    targets, scales = targets_of(3, 5, device), torch.ones(3, device=device)
    expected = run(clean.clone(), targets, scales, None, 0.0)
    given = run(logits, targets, scales, None, 0.0)
    assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))


def test_on_a_gpu_a_mean_over_no_token_is_nan_and_its_gradients_are_zero(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU: on the CPU it is an error")
    hidden, weight = (normal(seed, 33, 16).to(device, torch.float32).requires_grad_() for seed in range(2))
    targets = torch.full((33,), -100, device=device)
    for weights in ([1.0], None):
        total, _ = ops.layerwise_cross_entropy([hidden], weight, targets, depth_weights=weights)
        assert torch.isnan(total)
        assert all((gradient == 0).all() for gradient in torch.autograd.grad(total, [hidden, weight]))
