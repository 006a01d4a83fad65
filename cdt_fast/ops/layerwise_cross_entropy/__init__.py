"""Cross-entropy at every depth against one head (docs/ops.md §5): `ℓ_l = (1/N) Σ_n CE(h_l[n] Wᵀ + b, y_n)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cdt_fast.checks import check_choice, check_integer, check_number, check_positive
from cdt_fast.errors import InputError
from cdt_fast.ops.layerwise_cross_entropy.chunked import CrossEntropyArguments, strategy
from cdt_fast.ops.layerwise_cross_entropy.operator import layerwise_cross_entropy_forward
from cdt_fast.ops.layerwise_cross_entropy.reference import (
    layerwise_cross_entropy_reference as layerwise_cross_entropy_reference,
)
from cdt_fast.ops.shared.backend import choose_backend
from cdt_fast.ops.shared.checks import check_shape, check_tensor, check_together, compute_dtype, describe
from cdt_fast.ops.shared.depths import check_depths, detach_zero_weighted, weights_of_depths

REDUCTIONS = ("mean", "sum")


class DepthLosses(NamedTuple):
    """What `layerwise_cross_entropy` returns, in float32 (float64 for float64), losses in nats.

    Attributes:
        total: `[]`, the weighted sum of the depths.
        per_depth: `[L+1]`, the losses of the depths, without weights.
    """

    total: Tensor
    per_depth: Tensor


def layerwise_cross_entropy(
    hidden_states: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    depth_weights: Tensor | Sequence[float] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    inner_fraction: float = 1.0,
    generator: torch.Generator | None = None,
) -> DepthLosses:
    """Cross-entropy of every depth's hidden states through one shared head, and the weighted sum of the depths.

    The logits of all depths are never held: chunks of rows go through the head one after the other. With weights one
    pass computes losses and gradients together, in three matrix products a chunk, and the backward only scales what
    that pass has found. Without weights, unless the head is frozen, the forward keeps a log-sum-exp a row, and the
    backward computes the logits again, a fourth product; but not those whose gradients fit a second budget of bytes
    and are kept, as a classifier's are in either case.

    Args:
        hidden_states: L+1 tensors h_l, each `[..., d]`, depth 0 first. They are never stacked.
        weight: W, `[V, d]`. Its gradient is summed over chunks and depths in at least float32.
        targets: y, `[...]` int64 in [0, V), or `ignore_index`; or a list of L+1 of them, one a depth. They may stay on
            the CPU while the rest is on a GPU: then ignored tokens cost nothing there either (on the CPU they never
            do).
        bias: b, `[V]`.
        depth_weights: `w`, L+1 numbers (negative and zero are welcome). A depth whose weight is 0 costs its forward
            product alone and gets no gradient, where the weights are numbers or a tensor on the CPU. Those on a GPU are
            not waited for: there such a depth gets a gradient of zeros, at full cost. A tensor that requires a gradient
            gets one.
        ignore_index: the target of tokens that do not count.
        reduction: "mean" over the tokens that count at a depth, or "sum".
        label_smoothing: ε in [0, 1]: the target distribution is `(1 − ε) [v = y] + ε / V`.
        softcap: c > 0: logits `c · tanh(logits / c)`.
        chunk_tokens: rows of a chunk, counted over all depths; default: as many as fit a budget of bytes.
        inner_fraction: estimate every depth but the last from this fraction of the tokens, in (0, 1], drawn anew in
            each call without replacement, the same ones for all inner depths. Losses and gradients are unbiased.
        generator: of the draw; its device may be another one.

    Returns:
        A named tuple of `total` and `per_depth`. With weights: `total = Σ_l w_l ℓ_l` is
        differentiable and `per_depth` is detached. Without: `per_depth` is differentiable and `total` is its plain sum.

    Raises:
        InputError: an argument has the wrong rank, shape, dtype, device or value; targets on the CPU are out of range,
            or a mean is asked for and all are ignored. Targets on a GPU are not waited for: one out of range makes its
            depths' losses and gradients NaN, and a mean over no token is NaN with gradients of zero, as in torch.
            Or a second derivative is asked for, or one in forward mode or inside a transform of torch.func.

    Source: "A Constrained Optimization Perspective of Unrolled Transformers", the layerwise losses of a classifier.
    """
    _check(hidden_states, weight, targets, bias)
    weights = weights_of_depths(depth_weights, len(hidden_states))
    all_targets = [targets] if isinstance(targets, Tensor) else list(targets)
    if chunk_tokens is not None:
        chunk_tokens = _int64("chunk_tokens", chunk_tokens, 1)
    smoothing = check_number("label_smoothing", label_smoothing, "a number in [0, 1]", lambda number: 0 <= number <= 1)
    fraction = check_number("inner_fraction", inner_fraction, "a number in (0, 1]", lambda number: 0 < number <= 1)
    sample = _sample(all_targets[0], fraction, generator) if len(hidden_states) > 1 else None
    hidden, dtype = detach_zero_weighted(hidden_states, weights), compute_dtype(hidden_states[0])
    loss = CrossEntropyArguments(
        hidden=hidden,
        weight=weight,
        bias=None if bias is None else bias.to(weight.dtype),
        targets=all_targets,
        sample=sample,
        depth_weights=None if weights is None else weights.detach(),
        dtype=dtype,
        ignore_index=_int64("ignore_index", ignore_index, -(2**63)),
        label_smoothing=smoothing,
        softcap=None if softcap is None else check_positive("softcap", softcap),
        chunk_tokens=chunk_tokens,
        mean=check_choice("reduction", reduction, REDUCTIONS) == "mean",
        backend=choose_backend("layerwise_cross_entropy", weight.new_empty(0, dtype=dtype)),
        fused=False,
        kept_rows=0,
        needs_hidden=[_needs_gradient(depth) for depth in hidden],
        needs_weight=_needs_gradient(weight),
        needs_bias=_needs_gradient(bias),
    )
    fused, kept_rows = strategy(loss)
    loss = replace(loss, fused=fused, kept_rows=kept_rows)
    total, per_depth, *_ = layerwise_cross_entropy_forward(loss)
    if weights is not None:
        per_depth = per_depth.detach()
    if weights is not None and weights.requires_grad:
        # The operator takes them for numbers: what is added has the value zero, and the gradient of a weight.
        weights = weights.to(per_depth.device, per_depth.dtype, non_blocking=True)
        total = total + torch.dot(weights - weights.detach(), per_depth)
    return DepthLosses(total, per_depth)


def _check(
    hidden_states: Sequence[Tensor], weight: Tensor, targets: Tensor | Sequence[Tensor], bias: Tensor | None
) -> None:
    check_depths("hidden_states", hidden_states, None, "as hidden_states[0]")
    first = hidden_states[0]
    check_tensor("weight", weight, 2, "[V, d]")
    vocabulary = weight.shape[0]
    check_shape("weight", weight, (vocabulary, first.shape[-1]), "V by the width of the hidden states")
    if not vocabulary:
        raise InputError(f"weight must hold at least one row, got shape {tuple(weight.shape)}")
    if bias is not None:
        check_tensor("bias", bias, 1, "[V]")
        check_shape("bias", bias, (vocabulary,), "one number a row of weight")
    # Their names are written only where one is wrong: it takes as long as a small product.
    if any(tensor.device != first.device or tensor.dtype != first.dtype for tensor in (*hidden_states[1:], weight)):
        named = {f"hidden_states[{depth}]": hidden for depth, hidden in enumerate(hidden_states)}
        check_together(**named, weight=weight)
    check_together(weight=weight, bias=bias)
    if isinstance(targets, Tensor):
        _check_targets("targets", targets, first)
        return
    if not isinstance(targets, Sequence) or len(targets) != len(hidden_states):
        raise InputError(
            f"targets must be an int64 tensor with one target a token, or a list of {len(hidden_states)}, one a depth, "
            f"got {f'a list of {len(targets)}' if isinstance(targets, Sequence) else describe(targets)}"
        )
    for depth, of_depth in enumerate(targets):
        _check_targets(f"targets[{depth}]", of_depth, first)
        if of_depth.device != targets[0].device:
            raise InputError(f"targets[{depth}] is on {of_depth.device} but targets[0] is on {targets[0].device}")


def _check_targets(name: str, targets: Tensor, hidden: Tensor) -> None:
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
        raise InputError(f"{name} must be an int64 tensor with one target a token, got {describe(targets)}")
    check_shape(name, targets, tuple(hidden.shape[:-1]), "one target a token")
    if targets.device != hidden.device and targets.device.type != "cpu":
        raise InputError(f"{name} is on {targets.device} but hidden_states[0] is on {hidden.device}: move one of them")


def _int64(name: str, value: int, least: int) -> int:
    number = check_integer(name, value, least)
    if number >= 2**63:
        raise InputError(f"{name} must be an integer below 2^63")
    return number


def _needs_gradient(tensor: Tensor | None) -> bool:
    return torch.is_grad_enabled() and tensor is not None and tensor.requires_grad


def _sample(targets: Tensor, fraction: float, generator: torch.Generator | None) -> Tensor | None:
    """The numbers of the tokens that the inner depths are estimated from; None for all of them."""
    if fraction == 1.0:
        return None
    tokens = targets.numel()
    # 0.7 · 10 is 7.000000000000001 in floating point.
    count = math.ceil(fraction * tokens - 1e-9)
    device = targets.device if generator is None else generator.device
    return torch.randperm(tokens, generator=generator, device=device)[:count].to(targets.device)
