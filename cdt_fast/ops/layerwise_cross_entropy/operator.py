"""`layerwise_cross_entropy` as an operator with a gradient, in one pass or two over the chunks of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import SweepArguments
from cdt_fast.ops.layerwise_cross_entropy.chunked import (
    Chunk,
    CrossEntropyArguments,
    Rows,
    by_token,
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


def _forward(loss: CrossEntropyArguments) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """The total `[]`, the losses `[depths]`, a factor `[]`, what the backward starts from, and what is known by token.

    Fused, these are the gradients that are needed, of sums over the tokens. Else they are the log-sum-exp of every row,
    and the gradients of the logits of the first rows.

    The factor, one over the number of tokens or one, waits for the backward so that a loss scale meets it: in float16
    the quotients alone would underflow.

    By token `[depths, tokens]`, as far as `details` asks for it: the losses, what a weight of 1 makes of them in the
    total `[depths]`, the log-sum-exps, the classes of the largest logits.
    """
    device, wide, shape = loss.weight.device, loss.wide, loss.hidden[0].shape
    number, rows = rows_of_depths(loss)
    loss = _as_matrices(loss)
    losses = torch.empty(number_of_rows(loss), dtype=wide, device=device)
    log_sums, kept = torch.empty_like(losses), [loss.weight.new_empty(shape) for shape in kept_shapes(loss)]
    classes = torch.empty(losses.shape, dtype=torch.int64, device=device) if loss.details == "all" else None
    weights = torch.ones(len(loss.hidden), dtype=wide) if loss.depth_weights is None else loss.depth_weights
    on = [loss.fused and not zero for zero in zero_weight_mask(weights)]
    weights = weights.to(device, wide, non_blocking=True)
    scales = times_factors(weights, rows)
    gradients = Gradients(loss, rows, on) if loss.fused else None
    multiply, rest = Logits(loss.weight, loss.bias), rows
    if loss.inner_kl:
        _beside_last(loss, rows, losses, log_sums, classes, scales, gradients, on)
        rest = rows[1:]
    for chunk, room in with_room(chunks_of(loss, rest, on), kept):
        place, x = chunk.place, chunk.states(loss)
        logits = multiply(x, room)
        one = None if classes is None else classes[place]
        of_rows = SweepArguments(logits, chunk.targets, log_sums[place], losses[place], one, out=room)
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
    if weights.dim() == 1:
        total = torch.dot(weights, per_depth)
    else:
        total = torch.stack([(some.of_tokens(scales) * some.of(losses)).sum() for some in rows]).sum()
        total = total / number if loss.mean else total
    details: list[Tensor] = []
    if loss.details != "none":
        details = [by_token(loss, rows, losses, 0), times_factors(factor.repeat(len(loss.hidden)), rows)]
    if classes is not None:
        details += [by_token(loss, rows, log_sums, 0), by_token(loss, rows, classes, -1)]
    found: list[Tensor] = []
    if gradients is not None:
        found = gradients.found(shape, wide)
    elif loss.needs_any:
        log_sums[rows[-1].stop :] = 0.0  # the room for rows that do not count
        found = [log_sums, *kept]
    return total, per_depth, factor, found, details


def _forward_fake(loss: CrossEntropyArguments) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    losses = loss.weight.new_empty(len(loss.hidden), dtype=loss.wide)
    found: list[Tensor] = []
    if loss.fused:
        found = _gradients_fake(loss, loss.wide)
    elif loss.needs_any:
        found = [losses.new_empty(number_of_rows(loss))]
        found += [loss.weight.new_empty(shape, dtype=loss.dtype) for shape in kept_shapes(loss)]
    tokens = (len(loss.hidden), loss.targets[0].numel())
    details = [losses.new_empty(tokens), torch.empty_like(losses)] if loss.details != "none" else []
    if loss.details == "all":
        details += [losses.new_empty(tokens), losses.new_empty(tokens, dtype=torch.int64)]
    return losses.new_empty(()), losses, losses.new_empty(()), found, details


def _backward(loss: CrossEntropyBackwardArguments) -> list[Tensor]:
    """The gradients that are needed, where the forward is not fused."""
    dtype, shape = loss.weight.dtype, loss.hidden[0].shape
    _, rows = rows_of_depths(loss)
    loss = _as_matrices(loss)
    scales, off = times_factors(loss.factors, rows), zero_weight_mask(loss.factors)
    gradients = Gradients(loss, rows, [not zero for zero in off])
    multiply, rest = Logits(loss.weight, loss.bias), rows
    if loss.inner_kl:
        _beside_last(loss, rows, None, loss.log_sums, None, scales, gradients, [not zero for zero in off])
        rest = rows[1:]
    for whole, room in with_room(chunks_of(loss, rest, [False] * len(off)), loss.kept):
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


def _beside_last(
    loss: CrossEntropyArguments,
    rows: Sequence[Rows],
    losses: Tensor | None,
    log_sums: Tensor,
    classes: Tensor | None,
    scales: Tensor,
    gradients: Gradients | None,
    on: Sequence[bool],
) -> None:
    """The chunks of the inner depths with the KL to the last, whose logits of the same tokens are at hand.

    Those of the last depth itself are among them where all depths have the same rows, and not where the inner ones are
    estimated from a sample: then its logits there cost a product more. Without losses the log-sum-exps are read.
    """
    last, inner = len(loss.hidden) - 1, rows[0]
    log_sums_of_last = None
    if losses is None:
        log_sums_of_last = by_token(loss, rows, log_sums, 0)[last]
        log_sums_of_last = log_sums_of_last if inner.index is None else log_sums_of_last[inner.index]
    of_last, of_inner = Logits(loss.weight, loss.bias), Logits(loss.weight, loss.bias)
    for block in chunks_of(loss, [replace(inner, depths=range(1))], on):
        chunks = [Chunk(inner, range(depth, depth + 1), block.start, block.stop) for depth in range(last + 1)]
        x_last = chunks[last].states(loss)
        logits_of_last = of_last(x_last)
        to_last = None
        if gradients is not None and not loss.detach_last:
            to_last = of_last.room(len(block), loss.wide).zero_()
        for depth, chunk in enumerate(chunks):
            add = gradients if on[depth] else None
            if depth not in inner.depths or (losses is None and add is None and depth < last):
                continue
            place, x = chunk.place, x_last if depth == last else chunk.states(loss)
            logits = logits_of_last if depth == last else of_inner(x)
            written = [None if numbers is None else numbers[place] for numbers in (losses, classes)]
            of_rows = SweepArguments(logits, chunk.targets, log_sums[place], *written)
            if add is not None:
                of_rows = of_rows._replace(scales=chunk.of_rows(scales), out=logits)
            if depth < last:
                read = None if log_sums_of_last is None else log_sums_of_last[block.start : block.stop]
                of_rows = of_rows._replace(of_last=logits_of_last, log_sums_of_last=read)
                of_rows = of_rows if add is None else of_rows._replace(to_last=to_last)
            sweep(loss, of_rows)
            if depth == last and to_last is not None:
                logits = logits.copy_(to_last) if add is None else torch.add(to_last, logits, out=logits)
                add = gradients
            if add is not None:
                add.add(chunk, logits, x)


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
    _, _, factor, found, _ = output
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
    "(Tensor, Tensor, Tensor, Tensor[], Tensor[])",
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
