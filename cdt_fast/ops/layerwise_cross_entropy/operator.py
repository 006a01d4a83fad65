"""`layerwise_cross_entropy` as an operator with a gradient, in one pass or two over the chunks of all rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import SweepArguments
from cdt_fast.ops.layerwise_cross_entropy.chunked import (
    CrossEntropyArguments,
    chunks_of,
    kept_shapes,
    number_of_rows,
    rows_of_depths,
    times_factors,
    with_room,
)
from cdt_fast.ops.layerwise_cross_entropy.steps import Gradients, Logits, sweep
from cdt_fast.ops.shared.depths import zero_weight_mask
from cdt_fast.ops.shared.products import rows_of
from cdt_fast.ops.shared.registration import Operator, save, saved

Loss = TypeVar("Loss", bound=CrossEntropyArguments)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyBackwardArguments(CrossEntropyArguments):
    """What the gradients are computed from where the forward is not fused."""

    factors: Tensor  # [depths]; one that is known to be zero gives zeros even where the depth's gradients are NaN
    log_sums: Tensor  # from the forward, as what follows
    kept: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class ScaleArguments:
    """The gradients that a fused forward has found, and what they are multiplied by."""

    gradients: list[Tensor]  # of the hidden states that need one, and of the head
    factors: Tensor  # [depths]; all the same where the head has gradients
    needs_hidden: list[bool]
    dtype_of_head: torch.dtype  # of what is returned


def _forward(loss: CrossEntropyArguments) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The total `[]`, the losses `[depths]`, a factor `[]`, and what the backward starts from.

    Fused, these are the gradients that are needed, of sums over the tokens. Else they are the log-sum-exp of every row,
    and the gradients of the logits of the first rows.

    The factor, one over the number of tokens or one, waits for the backward so that a loss scale meets it: in float16
    the quotients alone would underflow.
    """
    device, wide, shape = loss.weight.device, loss.wide, loss.hidden[0].shape
    number, rows = rows_of_depths(loss)
    loss = _as_matrices(loss)
    losses = torch.empty(number_of_rows(loss), dtype=wide, device=device)
    log_sums, kept = torch.empty_like(losses), [loss.weight.new_empty(shape) for shape in kept_shapes(loss)]
    weights = torch.ones(len(loss.hidden), dtype=wide) if loss.depth_weights is None else loss.depth_weights
    on = [loss.fused and not zero for zero in zero_weight_mask(weights)]
    weights = weights.to(device, wide, non_blocking=True)
    scales = times_factors(weights, rows)
    gradients = Gradients(loss, rows, on) if loss.fused else None
    multiply = Logits(loss.weight, loss.bias)
    for chunk, room in with_room(chunks_of(loss, rows, on), kept):
        place, x = chunk.place, chunk.states(loss)
        logits = multiply(x, room)
        of_rows = SweepArguments(logits, chunk.targets, log_sums[place], losses[place], out=room)
        if gradients is not None and on[chunk.depths.start]:
            sweep(loss, of_rows._replace(scales=chunk.of_rows(scales), out=logits))
            gradients.add(chunk, logits, x)
        else:
            sweep(loss, of_rows)
    per_depth = times_factors(torch.cat([some.of(losses).sum(1) for some in rows]), rows)
    factor = torch.ones((), dtype=wide, device=device)
    if loss.mean:
        number = number if isinstance(number, int) else number.to(device, wide, non_blocking=True)
        per_depth = per_depth / number
        factor = factor / (number if isinstance(number, int) else number.clamp(min=1.0))
    total = torch.dot(weights, per_depth)
    found: list[Tensor] = []
    if gradients is not None:
        found = gradients.found(shape, wide)
    elif loss.needs_any:
        log_sums[rows[-1].stop :] = 0.0  # the room for rows that do not count
        found = [log_sums, *kept]
    return total, per_depth, factor, found


def _forward_fake(loss: CrossEntropyArguments) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    losses = loss.weight.new_empty(len(loss.hidden), dtype=loss.wide)
    found: list[Tensor] = []
    if loss.fused:
        found = _gradients_fake(loss, loss.wide)
    elif loss.needs_any:
        found = [losses.new_empty(number_of_rows(loss))]
        found += [loss.weight.new_empty(shape, dtype=loss.dtype) for shape in kept_shapes(loss)]
    return losses.new_empty(()), losses, losses.new_empty(()), found


def _backward(loss: CrossEntropyBackwardArguments) -> list[Tensor]:
    """The gradients that are needed, where the forward is not fused."""
    dtype, shape = loss.weight.dtype, loss.hidden[0].shape
    _, rows = rows_of_depths(loss)
    loss = _as_matrices(loss)
    scales, off = times_factors(loss.factors, rows), zero_weight_mask(loss.factors)
    gradients = Gradients(loss, rows, [not zero for zero in off])
    multiply = Logits(loss.weight, loss.bias)
    for whole, room in with_room(chunks_of(loss, rows, [False] * len(off)), loss.kept):
        for chunk in whole.apart() if any(off[depth] for depth in whole.depths) else [whole]:
            if off[chunk.depths.start]:
                continue
            place, x = chunk.place, chunk.states(loss)
            if room is not None:
                start = place.start - whole.place.start
                gradients.add(chunk, room[start : start + len(chunk)], x, chunk.of_depths(scales))
            else:
                logits = multiply(x)
                of_rows = SweepArguments(logits, chunk.targets, loss.log_sums[place], out=logits)
                sweep(loss, of_rows._replace(scales=chunk.of_rows(scales)))
                gradients.add(chunk, logits, x)
    return gradients.found(shape, dtype)


def _gradients_fake(loss: CrossEntropyArguments, dtype_of_head: torch.dtype | None = None) -> list[Tensor]:
    found = [depth.new_empty(depth.shape) for depth, need in zip(loss.hidden, loss.needs_hidden, strict=True) if need]
    of_head = [loss.weight.shape] * loss.needs_weight + [loss.weight.shape[:1]] * loss.needs_bias
    return found + [loss.weight.new_empty(shape, dtype=dtype_of_head) for shape in of_head]


def _scale(given: ScaleArguments) -> list[Tensor]:
    """Out of place, so that a second backward finds what the first one has found."""
    off, depths = zero_weight_mask(given.factors), [depth for depth, need in enumerate(given.needs_hidden) if need]
    found: list[Tensor] = []
    for number, gradient in enumerate(given.gradients):
        of_hidden = number < len(depths)
        depth, dtype = (depths[number], gradient.dtype) if of_hidden else (0, given.dtype_of_head)
        if off[depth]:  # also where the gradient is NaN
            found.append(torch.zeros_like(gradient, dtype=dtype))
        elif dtype == given.factors.dtype:
            found.append(gradient * given.factors[depth])
        else:
            # With a dimension the factor takes part in the promotion: the products are rounded once.
            factor, room = given.factors[depth : depth + 1], torch.empty_like(gradient, dtype=dtype)
            found.append(torch.mul(gradient, factor, out=room))
    return found


def _scale_fake(given: ScaleArguments) -> list[Tensor]:
    depths = sum(given.needs_hidden)
    of_head = [torch.empty_like(gradient, dtype=given.dtype_of_head) for gradient in given.gradients[depths:]]
    return [torch.empty_like(gradient) for gradient in given.gradients[:depths]] + of_head


def _setup_context(ctx: Any, loss: CrossEntropyArguments, output: tuple[Any, ...]) -> None:
    _, _, factor, found = output
    ctx.fused, ctx.depths = loss.fused, len(loss.hidden)
    if loss.fused:
        save(ctx, factor=factor, gradients=found, needs_hidden=loss.needs_hidden, dtype_of_head=loss.weight.dtype)
    else:
        save(ctx, factor=factor, log_sums=found[0], kept=found[1:], **vars(loss))


def _autograd(ctx: Any, grad_total: Tensor | None, grad_losses: Tensor | None, *_: Any) -> list[Tensor]:
    values = saved(ctx)
    factor, weights = values.pop("factor"), values.get("depth_weights")
    factors = factor.new_zeros(ctx.depths)
    if grad_total is not None:
        factors = factors + grad_total * factor * (1.0 if weights is None else weights.to(factor))
    if grad_losses is not None:
        factors = factors + grad_losses * factor
    if ctx.fused:
        return layerwise_cross_entropy_scale(ScaleArguments(factors=factors, **values))
    return layerwise_cross_entropy_backward(CrossEntropyBackwardArguments(factors=factors, **values))


def _as_matrices(loss: Loss) -> Loss:
    """Hidden states `[tokens, d]`, and the head in the dtype of the products."""
    bias = None if loss.bias is None else loss.bias.to(loss.dtype)
    return replace(loss, hidden=[rows_of(depth) for depth in loss.hidden], weight=loss.weight.to(loss.dtype), bias=bias)


layerwise_cross_entropy_forward = Operator(
    "layerwise_cross_entropy",
    CrossEntropyArguments,
    "(Tensor, Tensor, Tensor, Tensor[])",
    _forward,
    _forward_fake,
    _setup_context,
    _autograd,
)
layerwise_cross_entropy_backward = Operator(
    "layerwise_cross_entropy_backward", CrossEntropyBackwardArguments, "Tensor[]", _backward, _gradients_fake
)
layerwise_cross_entropy_scale = Operator(
    "layerwise_cross_entropy_scale", ScaleArguments, "Tensor[]", _scale, _scale_fake
)
