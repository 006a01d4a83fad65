"""Cross-entropy at every depth against one head (docs/maths.md §8): `ℓ_l = (1/N) Σ_n CE(h_l[n] Wᵀ + b, y_n)`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cdt_fast.checks import check_choice, check_integer, check_number, check_positive
from cdt_fast.errors import InputError
from cdt_fast.ops.layerwise_cross_entropy.chunks import depths_kept, gradients_fit
from cdt_fast.ops.layerwise_cross_entropy.operator import cross_entropy
from cdt_fast.ops.shared.backend import runs_on_triton
from cdt_fast.ops.shared.checks import check_shape, check_tensor, check_together, compute_dtype, describe
from cdt_fast.ops.shared.depths import check_depths, detach_zero_weighted, weights_of_depths

REDUCTIONS = ("mean", "sum")


def layerwise_cross_entropy(
    hidden_states: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every depth's hidden states through one shared head, and the weighted sum of the depths.

    The logits of all depths are never held, but where they are no more than a chunk's may be: chunks of rows go through
    the head one after the other. With weights one pass computes losses and gradients together, in three matrix products
    a chunk, and the backward only scales what that pass has kept. Without weights it does so too where the gradients of
    the head of every depth fit a chunk's budget of bytes (a classifier's do), or none is wanted. Elsewhere the forward
    keeps a log-sum-exp a row, and the backward computes the logits again, a fourth product: on a CPU only those of the
    depths whose logits go beyond a second budget of bytes.

    Args:
        hidden_states: L+1 tensors h_l, each `[..., d]`, depth 0 first. They are never stacked.
        weight: W, `[V, d]`. Its gradient is summed over chunks and depths in at least float32.
        targets: y, `[...]` int64 in [0, V), or `ignore_index`. They may stay on the CPU while the rest is on a GPU:
            then ignored tokens cost nothing there either (on the CPU they never do).
        bias: b, `[V]`.
        depth_weights: `w`, L+1 numbers (negative and zero are welcome). A depth whose weight is 0 costs its forward
            product alone and gets no gradient, where the weights are numbers or a tensor on the CPU. Those on a GPU
            are not waited for: there such a depth gets a gradient of zeros, at full cost.
        ignore_index: the target of tokens that do not count.
        reduction: "mean" over the tokens that count, or "sum".
        label_smoothing: ε in [0, 1]: the target distribution is `(1 − ε) [v = y] + ε / V`.
        softcap: c > 0: logits `c · tanh(logits / c)`.
        chunk_tokens: rows of a chunk, counted over all depths; default: as many as fit a budget of bytes.
        inner_fraction: estimate every depth but the last from this fraction of the tokens, in (0, 1], drawn anew in
            each call without replacement, the same ones for all inner depths. Losses and gradients are unbiased.
        generator: of the draw; its device may be another one.

    Returns:
        `(total, per_layer)`, in nats, in float32 (float64 for float64). `per_layer` is `[L+1]`. With weights: `total =
        Σ_l w_l ℓ_l` is differentiable and `per_layer` is detached. Without: `per_layer` is differentiable and `total`
        is its plain sum.

    Raises:
        InputError: an argument has the wrong rank, shape, dtype, device or value; targets on the CPU are out of range,
            or a mean is asked for and all are ignored. Targets on a GPU are not waited for: one out of range makes its
            depths' losses and gradients NaN, and a mean over no token is NaN with gradients of zero, as in torch.
            Or a second derivative is asked for.

    Source: "A Constrained Optimization Perspective of Unrolled Transformers", the layerwise losses of a classifier.
    """
    _check(hidden_states, weight, targets, bias)
    weights = weights_of_depths(depth_weights, len(hidden_states))
    mean = check_choice("reduction", reduction, REDUCTIONS) == "mean"
    smoothing = check_number("label_smoothing", label_smoothing, "a number in [0, 1]", lambda number: 0 <= number <= 1)
    fraction = check_number("inner_fraction", inner_fraction, "a number in (0, 1]", lambda number: 0 < number <= 1)
    options = (
        compute_dtype(hidden_states[0]),
        check_integer("ignore_index", ignore_index, -(2**63)),
        mean,
        smoothing,
        None if softcap is None else check_positive("softcap", softcap),
        None if chunk_tokens is None else check_integer("chunk_tokens", chunk_tokens, 1),
    )
    sample = _sample(targets, fraction, generator) if len(hidden_states) > 1 else None
    if bias is not None:
        bias = bias.to(weight.dtype)
    hidden = detach_zero_weighted(hidden_states, weights)
    grad = torch.is_grad_enabled()
    wants_hidden = [grad and depth.requires_grad for depth in hidden]
    wants_weight, wants_bias = grad and weight.requires_grad, grad and bias is not None and bias.requires_grad
    wanted = (wants_hidden, wants_weight, wants_bias)
    road = _road(len(hidden), weight, targets, sample, weights is not None, wanted, options[0], options[-1])
    value, per_layer = cross_entropy(hidden, weight, targets, bias, sample, weights, *road, *wanted, *options)
    return (value.sum(), value) if weights is None else (value, per_layer)


def layerwise_cross_entropy_reference(
    hidden_states: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The formula of the per-depth losses `[L+1]`, in any dtype, differentiated by torch."""
    counted = targets != ignore_index
    losses = []
    for hidden in hidden_states:
        logits = hidden[counted] @ weight.mT
        if bias is not None:
            logits = logits + bias
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_probabilities = torch.log_softmax(logits, -1)
        at_target = log_probabilities.gather(-1, targets[counted].unsqueeze(-1)).squeeze(-1)
        loss = -(1 - label_smoothing) * at_target - label_smoothing * log_probabilities.mean(-1)
        losses.append(loss.sum() / counted.sum() if reduction == "mean" else loss.sum())
    return torch.stack(losses)


def _check(hidden_states: Sequence[Tensor], weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
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
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
        raise InputError(f"targets must be an int64 tensor with one target a token, got {describe(targets)}")
    check_shape("targets", targets, tuple(first.shape[:-1]), "one target a token")
    if targets.device != first.device and targets.device.type != "cpu":
        raise InputError(f"targets is on {targets.device} but hidden_states[0] is on {first.device}: move one of them")


def _road(
    depths: int,
    weight: Tensor,
    targets: Tensor,
    sample: Tensor | None,
    weights_known: bool,
    wanted: tuple[list[bool], bool, bool],
    dtype: torch.dtype,
    chunk_tokens: int | None,
) -> tuple[bool, int]:
    """Whether the forward computes the gradients at once, and of how many depths it keeps those of the logits."""
    wants_hidden, wants_weight, wants_bias = wanted
    kept, tokens = 0, targets.numel()
    # Under torch.compile the sizes may have no values yet.
    if (
        weight.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and any((wants_weight, wants_bias, *wants_hidden))
    ):
        counts = [tokens if sample is None else sample.numel()] * (depths - 1) + [tokens]
        kept = depths_kept(counts, chunk_tokens, len(weight), dtype, weights_known)
        if kept and runs_on_triton("layerwise_cross_entropy", weight.new_empty(0, dtype=dtype)):
            kept = 0
    if kept == depths:
        return False, depths
    # Whether the gradients of the head can be kept for every depth, until the weights of the depths are known.
    # Not times a truth value, which torch 2.11 cannot trace with sizes that vary.
    entries = (weight.numel() if wants_weight else 0) + (len(weight) if wants_bias else 0)
    if weights_known or depths == 1 or gradients_fit(depths * entries, dtype, weight.device):
        return True, 0
    return False, kept


def _sample(targets: Tensor, fraction: float, generator: torch.Generator | None) -> Tensor | None:
    """The numbers of the tokens that the inner depths are estimated from; None for all of them."""
    if fraction == 1.0:
        return None
    tokens = targets.numel()
    # 0.7 · 10 is 7.000000000000001 in floating point.
    count = math.ceil(fraction * tokens - 1e-9)
    device = targets.device if generator is None else generator.device
    return torch.randperm(tokens, generator=generator, device=device)[:count].to(targets.device)
