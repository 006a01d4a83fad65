"""The custom operators of the layerwise cross-entropy: what torch.compile and autograd see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.ops.backend import runs_on_triton
from cdt_fast.ops.cross_entropy_chunks import Head, chunk_rows, count_rows, rows_of_depths
from cdt_fast.ops.cross_entropy_pass import Pass, TorchSweep, one_pass, sweep_on_triton
from cdt_fast.ops.depths import known_zeros
from cdt_fast.ops.registration import differentiable_once

# The arguments that all of them share, in this order: the hidden states `[..., d]`, the head in its own dtype,
# the targets, the numbers of the tokens that stand for all at the inner depths; and as options the dtype of the
# products (they are cast chunk by chunk, so that the gradients are rounded once, and to the dtype of the arguments),
# ignore_index, whether a mean is asked for, label smoothing, softcap and the rows of a chunk.


@torch.library.custom_op("cdt_fast::layerwise_cross_entropy", mutates_args=())
def cross_entropy(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    dtype: torch.dtype,
    ignore_index: int,
    mean: bool,
    smoothing: float,
    softcap: float | None,
    chunk_tokens: int | None,
) -> tuple[Tensor, Tensor]:
    """The losses `[depths]`, and the log-sum-exp of each row `[depths, tokens]` that the backward starts from."""
    count = count_rows(targets, weight.shape[0], ignore_index, mean).to(weight.device, non_blocking=True)
    options = (dtype, ignore_index, smoothing, softcap, chunk_tokens)
    result = _run(hidden, weight, targets, bias, sample, None, *options)
    return result.sums / count if mean else result.sums, result.log_sums


@cross_entropy.register_fake
def _(hidden: list[Tensor], weight: Tensor, targets: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(arguments[2], torch.float32)
    depths = len(hidden)
    return weight.new_empty(depths, dtype=wide), weight.new_empty(depths, targets.numel(), dtype=wide)


@torch.library.custom_op("cdt_fast::layerwise_cross_entropy_backward", mutates_args=())
def _backward(
    grad: Tensor,
    log_sums: Tensor,
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    dtype: torch.dtype,
    ignore_index: int,
    mean: bool,
    smoothing: float,
    softcap: float | None,
    chunk_tokens: int | None,
) -> list[Tensor]:
    """The gradients that are wanted: of the hidden states, of the weight, of the bias."""
    if mean:
        grad = grad * _inverse(targets, ignore_index, grad)
    options = (dtype, ignore_index, smoothing, softcap, chunk_tokens)
    wanted = {"wants_hidden": wants_hidden, "wants_weight": wants_weight, "wants_bias": wants_bias}
    result = _run(hidden, weight, targets, bias, sample, grad, *options, log_sums=log_sums, **wanted)
    states, of_head = _gradients(hidden, result)
    return states + [gradient.to(weight.dtype) for gradient in of_head]


@_backward.register_fake
def _(
    grad: Tensor,
    log_sums: Tensor,
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    *options: Any,
) -> list[Tensor]:
    return _fake_gradients(hidden, weight, wants_hidden, wants_weight, wants_bias, weight.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    hidden, weight, targets, bias, sample, *ctx.options = inputs
    ctx.save_for_backward(output[1], weight, targets, bias, sample, *hidden)
    ctx.depths = len(hidden)


def _differentiate(ctx: Any, grad: Tensor | None, grad_log_sums: None) -> tuple[Any, ...]:
    wants_hidden, (wants_weight, wants_bias) = ctx.needs_input_grad[0], ctx.needs_input_grad[1:4:2]
    if grad is None:
        return _arranged([], [False] * ctx.depths, False, False, 11)
    log_sums, weight, targets, bias, sample, *hidden = ctx.saved_tensors
    found = _backward(
        grad,
        log_sums,
        hidden,
        weight,
        targets,
        bias,
        sample,
        list(wants_hidden),
        wants_weight,
        wants_bias,
        *ctx.options,
    )
    return _arranged(found, wants_hidden, wants_weight, wants_bias, 11)


cross_entropy.register_autograd(_differentiate, setup_context=_setup)
differentiable_once(_backward, "layerwise_cross_entropy")


@torch.library.custom_op("cdt_fast::weighted_layerwise_cross_entropy", mutates_args=())
def weighted_cross_entropy(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    layer_weights: Tensor,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    dtype: torch.dtype,
    ignore_index: int,
    mean: bool,
    smoothing: float,
    softcap: float | None,
    chunk_tokens: int | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The weighted sum of the losses, the losses `[depths]`, and what the backward scales: a factor, and the gradients
    that are wanted of the sum before the division by the number of tokens.

    That division waits for the backward so that a loss scale meets it: in float16 the quotients alone would underflow.
    """
    count = count_rows(targets, weight.shape[0], ignore_index, mean).to(weight.device, non_blocking=True)
    options = (dtype, ignore_index, smoothing, softcap, chunk_tokens)
    wanted = {"wants_hidden": wants_hidden, "wants_weight": wants_weight, "wants_bias": wants_bias}
    # Where nothing is wanted no depth has a gradient, and the pass computes losses alone.
    result = _run(hidden, weight, targets, bias, sample, layer_weights, *options, **wanted)
    per_layer = result.sums / count if mean else result.sums
    total = (layer_weights.to(per_layer.device, per_layer.dtype, non_blocking=True) * per_layer).sum()
    factor = _inverse(targets, ignore_index, per_layer) if mean else torch.ones_like(total)
    states, of_head = _gradients(hidden, result)
    return total, per_layer, factor, states + of_head


@weighted_cross_entropy.register_fake
def _(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    layer_weights: Tensor,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    dtype: torch.dtype,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    wide = torch.promote_types(dtype, torch.float32)
    total, factor = weight.new_empty((), dtype=wide), weight.new_empty((), dtype=wide)
    gradients = _fake_gradients(hidden, weight, wants_hidden, wants_weight, wants_bias, wide)
    return total, weight.new_empty(len(hidden), dtype=wide), factor, gradients


@torch.library.custom_op("cdt_fast::weighted_layerwise_cross_entropy_backward", mutates_args=())
def _scale(gradients: list[Tensor], states: int, factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The gradients times a factor `[]`; all but the first `states` come out in `dtype`.

    Out of place, so that a second backward finds what the first one has found.
    """
    # With one dimension the factor takes part in the promotion: the products are rounded once, from float32.
    factor = factor.reshape(1)
    scaled = []
    for number, gradient in enumerate(gradients):
        to = gradient.dtype if number < states else dtype
        scaled.append(torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=to)))
    return scaled


@_scale.register_fake
def _(gradients: list[Tensor], states: int, factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.empty_like(gradient) if number < states else torch.empty_like(gradient, dtype=dtype)
        for number, gradient in enumerate(gradients)
    ]


def _weighted_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, list[Tensor]]) -> None:
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[1].dtype
    ctx.wants = inputs[6:9]
    ctx.save_for_backward(output[2], *output[3])


def _weighted_differentiate(ctx: Any, grad_total: Tensor | None, *others: None) -> tuple[Any, ...]:
    wants_hidden, wants_weight, wants_bias = ctx.wants
    if grad_total is None:
        return _arranged([], [False] * len(wants_hidden), False, False, 15)
    factor, *gradients = ctx.saved_tensors
    found = _scale(gradients, sum(wants_hidden), factor * grad_total, ctx.dtype)
    return _arranged(found, wants_hidden, wants_weight, wants_bias, 15)


weighted_cross_entropy.register_autograd(_weighted_differentiate, setup_context=_weighted_setup)
differentiable_once(_scale, "layerwise_cross_entropy")


def _run(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    factors: Tensor | None,
    dtype: torch.dtype,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
    chunk_tokens: int | None,
    **wanted: Any,
) -> Pass:
    """One pass; `factors` `[depths]` are what the gradients of each depth are multiplied by."""
    head = Head(weight.to(dtype), None if bias is None else bias.to(dtype), ignore_index, softcap, smoothing)
    rows = rows_of_depths(targets.reshape(-1), ignore_index, sample, len(hidden), weight.device)
    result = one_pass(
        [depth.reshape(targets.numel(), weight.shape[1]) for depth in hidden],
        head,
        rows,
        sweep_on_triton if runs_on_triton("layerwise_cross_entropy", head.weight) else TorchSweep(),
        most=chunk_rows(chunk_tokens, weight.shape[0], dtype, weight.device),
        scales=None if factors is None else _scales(factors, [depth.factor for depth in rows], head.weight),
        **wanted,
    )
    for sums, depth in zip(result.sums.unbind(), rows, strict=True):
        sums *= depth.factor
    return result


def _scales(factors: Tensor, of_sample: list[float], weight: Tensor) -> list[Tensor | None]:
    wide = factors.to(weight.device, torch.promote_types(weight.dtype, torch.float32), non_blocking=True)
    return [
        None if zero else factor * multiple
        for zero, factor, multiple in zip(known_zeros(factors), wide.unbind(), of_sample, strict=True)
    ]


def _inverse(targets: Tensor, ignore_index: int, like: Tensor) -> Tensor:
    """One over the number of tokens that count, `[]`, on the device and in the dtype of `like`; finite for none."""
    count = (targets != ignore_index).sum().clamp_(min=1)
    return count.to(like.device, like.dtype, non_blocking=True).reciprocal()


def _gradients(hidden: list[Tensor], result: Pass) -> tuple[list[Tensor], list[Tensor]]:
    """What a pass has found, without the gaps: of the hidden states in their shapes, and of the head."""
    states = [
        gradient.view(depth.shape)
        for depth, gradient in zip(hidden, result.hidden, strict=True)
        if gradient is not None
    ]
    return states, [gradient for gradient in (result.weight, result.bias) if gradient is not None]


def _fake_gradients(
    hidden: list[Tensor],
    weight: Tensor,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    states = [depth.new_empty(depth.shape) for depth, want in zip(hidden, wants_hidden, strict=True) if want]
    of_weight = [weight.new_empty(weight.shape, dtype=dtype)] if wants_weight else []
    return states + of_weight + ([weight.new_empty(weight.shape[:1], dtype=dtype)] if wants_bias else [])


def _arranged(
    found: list[Tensor], wants_hidden: list[bool], wants_weight: bool, wants_bias: bool, arguments: int
) -> tuple[Any, ...]:
    """The gradients in the places of the operator's arguments: hidden states, weight, targets, bias, others."""
    rest = iter(found)
    states = [next(rest) if want else None for want in wants_hidden]
    of_weight = next(rest) if wants_weight else None
    of_bias = next(rest) if wants_bias else None
    return states, of_weight, None, of_bias, *(None,) * (arguments - 4)
