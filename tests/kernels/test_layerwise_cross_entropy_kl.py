"""The kernel of the layerwise cross-entropy beside the last depth's logits, and the classes of the largest logits."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.ops.layerwise_cross_entropy import layerwise_cross_entropy_reference
from tests.kernels.cross_entropy_cases import BLOCK, FLAGS, SIZES, poisoned_rows, run, targets_of, untouched
from tests.kernels.kernel_cases import gradients_of, normal
from tests.kernels.precision import assert_as_precise, far_apart

WIDE = 2 * BLOCK + 3
op = importlib.import_module("cdt_fast.ops.layerwise_cross_entropy")  # the name in `ops` is the function


class Written(NamedTuple):
    """What the kernel writes of an inner depth's rows, and the terms of which the results are differences."""

    losses: Tensor
    log_sums: Tensor
    gradients: Tensor
    of_last: Tensor  # what is added to the gradient of the last depth
    terms_of_losses: Tensor
    terms_of_gradients: Tensor
    terms_of_last: Tensor


def written(
    logits: Tensor,
    last: Tensor,
    targets: Tensor,
    scales: Tensor,
    softcap: float | None,
    smoothing: float,
    share: float,
) -> Written:
    """Of rows that all count, by the formula; the probabilities from the rounded log-sum-exps."""
    scales, slopes = scales.unsqueeze(1), [torch.ones_like(logits)] * 2
    if softcap is not None:
        slopes = [1 - torch.tanh(some / softcap) ** 2 for some in (logits, last)]
        logits, last = (softcap * torch.tanh(some / softcap) for some in (logits, last))
    log_p, log_q = torch.log_softmax(logits, 1), torch.log_softmax(last, 1)
    log_sums = torch.logsumexp(logits, 1)
    p, q = torch.exp(logits - log_sums.unsqueeze(1)), torch.exp(last - torch.logsumexp(last, 1, keepdim=True))
    kl = torch.nn.functional.kl_div(log_p, log_q, reduction="none", log_target=True).sum(1, keepdim=True)
    wanted = torch.nn.functional.one_hot(targets, logits.shape[1]) * (1 - smoothing) + smoothing / logits.shape[1]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    gradients = (p - (1 - share) * wanted - share * q) * slopes[0] * scales
    of_last = share * q * (log_q - log_p - kl) * slopes[1] * scales
    # Logarithms round by a share of their own size, capped logits by one of theirs.
    sizes = log_p.abs() + log_q.abs() + (0.0 if softcap is None else logits.abs() + last.abs())
    terms = (share * q * sizes).sum(1), (p + wanted + q) * scales, share * q * (sizes + kl) * scales
    return Written((1 - share) * losses + share * kl.squeeze(1), log_sums, gradients, of_last, *terms)


def check(
    logits: Tensor,
    last: Tensor,
    softcap: float | None,
    smoothing: float,
    share: float,
    device: torch.device,
    dtype: torch.dtype,
    **options: Any,
) -> None:
    rows, vocabulary = logits.shape
    logits, last, targets = logits.to(device, dtype), last.to(device, dtype), targets_of(rows, vocabulary, device)
    scales, start = (1 + normal(3, rows).float().abs()).to(device), normal(4, rows, vocabulary).float().to(device)
    flags: Any = {"softcap": softcap, "smoothing": smoothing, "share": share}
    exact = written(logits.cpu().double(), last.cpu().double(), targets.cpu(), scales.cpu(), **flags)
    plain = written(logits.float(), last.float(), targets, scales, **flags)
    options = {**flags, **options}

    of_float32 = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    expected = {
        "losses": (plain.losses, exact.losses, exact.terms_of_losses),
        "log-sum-exps": (plain.log_sums, exact.log_sums),
        "gradients": (plain.gradients.to(dtype), exact.gradients, of_float32 * exact.terms_of_gradients),
        "of the last": (start + plain.of_last, start.cpu().double() + exact.of_last, exact.terms_of_last),
    }

    def once(names: str, scales: Tensor | None = scales, to_last: Tensor | None = None, **changed: Any) -> Tensor:
        """The log-sum-exps of a run that writes what is named, and nothing else."""
        inside, of_last = poisoned_rows(logits), poisoned_rows(last)
        rows = {"of_last": of_last, "to_last": to_last, **changed}
        results = *run(inside, targets, scales, **rows, **options), to_last
        assert all(untouched(some) for some in (inside, of_last))
        assert torch.equal(of_last, last)
        assert "gradients" in names or torch.equal(inside, logits)
        for name, result in zip(expected, results, strict=True):
            if name in names:
                assert result is not None
                assert_as_precise(name, result, *expected[name])
        return results[1]

    to_last, again = poisoned_rows(start), poisoned_rows(start)
    classes = torch.empty(rows, dtype=torch.int64, device=device)
    log_sums = once("losses, log-sum-exps, gradients, of the last", to_last=to_last, classes=classes)
    assert torch.equal(classes, logits.argmax(1))
    once("losses, log-sum-exps, gradients")
    once("losses, log-sum-exps", scales=None)
    # The gradients from what was saved, which stays as it is.
    saved: Any = {"losses": None, "log_sums": log_sums.clone()}
    log_sums_of_last = run(last, targets, None, **options)[1]
    once("gradients", log_sums_of_last=log_sums_of_last, **saved)
    once("gradients, of the last", to_last=again, **saved)
    assert torch.equal(saved["log_sums"], log_sums)
    assert untouched(to_last)
    assert untouched(again)


@pytest.mark.parametrize(("softcap", "smoothing"), FLAGS)
@pytest.mark.parametrize("vocabulary", SIZES)
def test_rows_beside_those_of_the_last_depth(
    vocabulary: int, softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype
) -> None:
    for rows, share in ((1, 1.0), (3, 0.4)):
        logits, last = 2 * normal(rows, rows, vocabulary), 2 * normal(9, rows, vocabulary)
        check(logits, last, softcap, smoothing, share, device, dtype)


@pytest.mark.parametrize(("softcap", "smoothing"), [(None, 0.0), (2.5, 0.1)])
@pytest.mark.parametrize("kind", ["large", "shifted", "equal", "confident", "opposite", "rising", "tiny"])
def test_extreme_logits(
    kind: str, softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype
) -> None:
    logits, last = normal(1, 3, WIDE), normal(2, 3, WIDE)
    falling = torch.linspace(1e4, -1e4, WIDE, dtype=torch.float64).expand(3, -1)
    certain = 30 * torch.nn.functional.one_hot(torch.tensor([0, 40, 66]), WIDE).double()
    logits, last = {
        "large": (1e4 * logits.clamp(-3, 3), 1e4 * last.clamp(-3, 3)),
        "shifted": (logits, logits + 2048),
        "equal": (torch.full_like(logits, -1e4), torch.full_like(logits, 1e4)),
        "confident": (certain, certain + 0.1 * last),
        "opposite": (falling, -falling),
        "rising": (-falling, 1.1 * -falling),
        "tiny": (1e-4 * logits, 1e-4 * last),
    }[kind]
    for share in (0.5, 1.0):
        check(logits, last, softcap, smoothing, share, device, dtype)


def test_the_kl_of_a_distribution_to_itself_is_zero(device: torch.device, dtype: torch.dtype) -> None:
    logits, targets, scales = (100 * normal(1, 3, WIDE)).to(device, dtype), targets_of(3, WIDE, device), torch.ones(3)
    to_last = torch.zeros(3, WIDE, device=device)
    given = run(logits.clone(), targets, scales.to(device), 30.0, 0.1, of_last=logits, to_last=to_last, share=1.0)
    assert all((each == 0).all() for each in (given[0], given[2], to_last))


def test_classes_that_cannot_be(device: torch.device) -> None:
    logits, last = normal(1, 4, WIDE).float(), normal(2, 4, WIDE).float()
    impossible = float("-inf")
    logits[0, :BLOCK] = last[0, :BLOCK] = impossible  # the whole first block
    last[1, 5] = logits[2, 40] = impossible  # at one of the depths alone
    last[2, 40] = -200.0  # nearly so, beside a maximum that comes before it
    logits[3, 0], last[3, :BLOCK] = impossible, -200.0  # and one that comes behind it
    targets = torch.tensor([0, 1, 40, 0])  # which make a cross-entropy infinite
    finite, of_last = (some.double().clamp(min=-1e4) for some in (logits, last))
    exact = written(finite, of_last, targets, torch.ones(4), None, 0.0, 1.0)
    to_last = torch.zeros(4, WIDE, device=device)
    scales = torch.ones(4, device=device)
    rows = (logits.to(device), targets.to(device), scales, None, 0.0)
    given = run(*rows, of_last=last.to(device), to_last=to_last, share=1.0)
    for one, other in zip((*given, to_last), exact, strict=False):
        assert (one.cpu().double() - other).abs().max() <= 4e-6

    # Where the last depth knows one, the divergence is infinite.
    logits[3, WIDE - 1] = impossible
    given = run(logits.to(device), *rows[1:], of_last=last.to(device), share=0.5)
    assert given[0][3] == float("inf")
    assert torch.isfinite(given[2][3]).all()


@pytest.mark.parametrize(("softcap", "smoothing"), FLAGS)
def test_rows_that_do_not_count(
    softcap: float | None, smoothing: float, device: torch.device, dtype: torch.dtype
) -> None:
    vocabulary = BLOCK + 1
    clean, last = normal(1, 7, vocabulary).to(device, dtype), normal(2, 7, vocabulary).to(device, dtype)
    targets, start = targets_of(7, vocabulary, device), normal(4, 7, vocabulary).float().to(device)
    scales, kept = torch.full((7,), -2.0, device=device), start.clone()
    options: Any = {"softcap": softcap, "smoothing": smoothing, "share": 0.5}
    expected = run(clean.clone(), targets, scales, of_last=last, to_last=kept, **options)
    logits, broken, zeros = clean.clone(), targets.clone(), scales.clone()
    logits[1] = logits[2] = last[1] = last[2] = float("nan")
    broken[1], broken[3], broken[4], zeros[2], zeros[5] = -100, vocabulary, -1, 0.0, 0.0
    found = start.clone()
    given = run(logits, broken, zeros, of_last=last, to_last=found, **options)
    for one, other in zip((*given, found), (*expected, kept), strict=True):
        assert torch.equal(one[[0, 6]], other[[0, 6]])
    assert (torch.stack([each[1] for each in given[:2]]) == 0).all()
    assert (given[2][[1, 2, 5]] == 0).all()
    assert torch.equal(found[[1, 2, 5]], start[[1, 2, 5]])
    assert torch.isnan(given[0][2:5]).all()
    assert torch.isnan(given[2][3:5]).all()
    assert torch.isnan(found[3:5]).all()
    assert torch.equal(given[0][5], expected[0][5])


@pytest.mark.parametrize("far", ["of_last", "to_last"])
def test_rows_that_lie_beyond_two_to_the_31_numbers(far: str, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 2**35:
        pytest.skip("needs 20 GB of the GPU's memory")
    made = {"of_last": normal(2, 3, 5).float().to(device), "to_last": normal(3, 3, 5).float().to(device)}
    logits, targets, scales = normal(1, 3, 5).float().to(device), targets_of(3, 5, device), torch.ones(3, device=device)
    results = []
    for matrices in ({**made, far: far_apart(made[far], 0)}, made):
        given = run(logits.clone(), targets, scales, None, 0.0, share=0.5, **matrices)
        results.append([*given, matrices["to_last"]])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("vocabulary", SIZES)
def test_the_class_of_the_largest_logit(vocabulary: int, device: torch.device, dtype: torch.dtype) -> None:
    logits = normal(1, 8, vocabulary).to(dtype)
    highest = (0, vocabulary - 1, vocabulary // 2)
    logits[0, highest[0]] = logits[1, highest[1]] = logits[2, highest[2]] = 9.0
    logits[3] = 2.0
    logits[4] = float("-inf")
    logits[5, highest[1]] = logits[5, highest[2]] = 50.0  # the first of two equals
    logits[6, highest[1]] = float("nan")
    logits[7, highest[1]], logits[7, highest[2]] = 52.0, 50.0  # which a cap of 2.5 rounds to one
    targets, classes = targets_of(8, vocabulary, device), torch.empty(8, dtype=torch.int64, device=device)
    for scales, softcap in ((None, None), (torch.ones(8, device=device), 2.5)):
        run(poisoned_rows(logits.to(device)), targets, scales, softcap, 0.0, classes=classes)
        assert torch.equal(classes.cpu(), logits.argmax(1))


@pytest.mark.emulated
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_the_blocks_that_the_card_gets(softcap: float | None, device: torch.device, dtype: torch.dtype) -> None:
    for vocabulary in (2, 130, 5000):
        logits, last = 2 * normal(1, 2, vocabulary), 2 * normal(2, 2, vocabulary)
        check(logits, last, softcap, 0.1, 0.5, device, dtype, blocks=None)


# The op on the kernel


@pytest.mark.parametrize("weights", [None, [0.5, 0.0, -2.0], [1.0, -0.5, 0.0]])
@pytest.mark.parametrize(
    ("sampled", "flags"),
    [(False, {"softcap": 3.0, "label_smoothing": 0.1}), (False, {"detach_last": False}), (True, {})],
    ids=str,
)
def test_the_kl_to_the_last_depth(
    sampled: bool,
    flags: dict[str, Any],
    weights: list[float] | None,
    device: torch.device,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = torch.tensor([11, 1, 2, 7, 0, 4]) if sampled else torch.arange(12)
    monkeypatch.setattr(op, "_sample", lambda *_: sample if sampled else None)
    vocabulary, width = 41, 16
    targets = targets_of(12, vocabulary, device)
    targets[::3] = -100
    made = [*(normal(depth, 12, width) for depth in range(3)), normal(8, vocabulary, width) / 2, normal(9, vocabulary)]
    factors = [1.0, 0.5, -1.0] if weights is None else weights
    results: list[list[Tensor]] = []
    terms: list[Any] = []
    for run_device, run_dtype in ((device, dtype), (device, dtype), (torch.device("cpu"), torch.float64)):
        leaves = [tensor.to(dtype).to(run_device, run_dtype).requires_grad_() for tensor in made]
        options: dict[str, Any] = {"inner_kl": 0.6, "reduction": "sum", **flags}
        if not results:
            total, per_depth, *_ = ops.layerwise_cross_entropy(
                leaves[:3], leaves[3], targets, leaves[4], depth_weights=weights, chunk_tokens=5, **options
            )
            total = total if weights else torch.dot(per_depth.new_tensor(factors), per_depth)
        else:
            drawn = sample.to(run_device)
            inner, whole = (
                layerwise_cross_entropy_reference(
                    [depth[some] for depth in leaves[:3]], leaves[3], targets.to(run_device)[some], leaves[4], **options
                )
                for some in (drawn, slice(None))
            )
            per_depth = torch.cat([inner[:-1] * (12 / len(sample)), whole[-1:]])
            total = torch.dot(per_depth.new_tensor(factors), per_depth)
        if len(results) == 2:
            # A gradient is a difference of those of the depths, each of which rounds by a share of its own size.
            apart = [torch.autograd.grad(one, leaves, retain_graph=True, allow_unused=True) for one in per_depth]
            terms = [None, *(torch.zeros_like(leaf) for leaf in leaves)]
            for factor, of_depth in zip(factors, apart, strict=True):
                for place, one in enumerate(of_depth, start=1):
                    terms[place] += 0.0 if one is None else abs(factor) * one.abs()
        results.append([per_depth.detach(), *gradients_of(total, leaves)])
    for name, given, plain, exact, of_depths in zip(
        ["losses", "h0", "h1", "h2", "weight", "bias"], *results, terms, strict=True
    ):
        assert_as_precise(name, given.to(dtype), plain, exact, of_depths)
