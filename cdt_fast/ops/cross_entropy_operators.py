"""The custom operators of the layerwise cross-entropy: what torch.compile and autograd see."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cdt_fast.ops.backend import runs_on_triton
from cdt_fast.ops.cross_entropy_chunks import Head, Rows, chunk_rows, count_rows, rows_of_depths
from cdt_fast.ops.cross_entropy_pass import Pass, one_pass
from cdt_fast.ops.cross_entropy_sweep import TorchSweep, sweep_on_triton
from cdt_fast.ops.depths import known_zeros
from cdt_fast.ops.registration import differentiable_once

# The arguments that all of them share, in this order: the hidden states `[..., d]`, the head in its own dtype, the
# targets, the numbers of the tokens that stand for all at the inner depths; which gradients are wanted; and as options
# the dtype of the products (they are cast chunk by chunk, so that the gradients are rounded once, and to the dtype of
# the arguments), ignore_index, whether a mean is asked for, label smoothing, softcap and the rows of a chunk.


def _forward(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    layer_weights: Tensor | None,
    at_once: bool,
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
    """What is differentiable: the weighted sum of the losses `[]`, or without weights the losses `[depths]`; the losses
    `[depths]`; a factor `[]`; and what the backward starts from.

    With `at_once` these are the gradients that are wanted of the sums over the tokens, those of the head one a depth
    where there are no weights. Otherwise it is the log-sum-exp of each row, `[depths · tokens]` with room to spare.

    The factor, one over the number of tokens or one, waits for the backward so that a loss scale meets it: in float16
    the quotients alone would underflow.
    """
    count = count_rows(targets, weight.shape[0], ignore_index, mean)
    rows = rows_of_depths(targets.reshape(-1), count, ignore_index, sample, len(hidden), weight.device)
    device, wide = weight.device, torch.promote_types(dtype, torch.float32)
    options = (dtype, ignore_index, smoothing, softcap, chunk_tokens)
    wanted = (wants_hidden, wants_weight, wants_bias) if at_once else ([False] * len(hidden), False, False)
    factors = None
    if at_once:
        factors = torch.ones(len(hidden)) if layer_weights is None else layer_weights
    result = _run(hidden, weight, bias, rows, factors, *wanted, *options, apart=layer_weights is None)
    assert result.sums is not None
    if not isinstance(count, int):
        count = count.to(device, non_blocking=True)
    per_layer = result.sums
    if sample is not None:
        for sums, depth in zip(per_layer.unbind(), rows, strict=True):
            sums *= depth.factor
    if mean:
        per_layer /= count
    if layer_weights is None:
        values = per_layer.clone()
    else:
        values = torch.dot(layer_weights.to(device, wide, non_blocking=True), per_layer)
    if not mean:
        factor = torch.ones((), dtype=wide, device=device)
    elif isinstance(count, int):
        factor = torch.full((), 1.0 / count, dtype=wide, device=device)
    else:
        factor = count.clamp(min=1).to(wide).reciprocal()
    if at_once:
        return values, per_layer, factor, _gradients(hidden, result)
    room = len(hidden) * targets.numel() - result.log_sums.shape[0]
    return values, per_layer, factor, [torch.nn.functional.pad(result.log_sums, (0, room)) if room else result.log_sums]


@torch.library.custom_op("cdt_fast::layerwise_cross_entropy", mutates_args=())
@functools.wraps(_forward)
def _cross_entropy(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    values, per_layer, factor, kept = _forward(*arguments)
    return values, per_layer, factor, _unshared(kept)


@_cross_entropy.register_fake
def _(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    layer_weights: Tensor | None,
    at_once: bool,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    dtype: torch.dtype,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    wide, depths = torch.promote_types(dtype, torch.float32), len(hidden)
    groups = (depths,) if layer_weights is None else ()
    if at_once:
        kept = [depth.new_empty(depth.shape) for depth, want in zip(hidden, wants_hidden, strict=True) if want]
        of_head = [weight.shape] * wants_weight + [weight.shape[:1]] * wants_bias
        kept += [weight.new_empty((*groups, *shape), dtype=wide) for shape in of_head]
    else:
        kept = [weight.new_empty(depths * targets.numel(), dtype=wide)]
    return (
        weight.new_empty(groups, dtype=wide),
        weight.new_empty(depths, dtype=wide),
        weight.new_empty((), dtype=wide),
        kept,
    )


def _scaled(gradients: list[Tensor], states: list[bool], factors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The gradients that a forward at once has kept, times their factors `[]` or `[depths]`: those of the hidden states
    where `states` says that there is one, and the head's, in `dtype`.

    Out of place, so that a second backward finds what the first one has found. A factor of one depth that is zero
    gives zeros even where the depth's gradients are NaN, as it does where the logits are computed again.
    """
    count = sum(states)
    of_states, of_head = gradients[:count], gradients[count:]
    if not factors.dim():
        return [_times(g, factors, g.dtype) for g in of_states] + [_times(g, factors, dtype) for g in of_head]
    # On a GPU to look whether there is one would mean to wait.
    off = factors == 0 if factors.device.type != "cpu" or any(known_zeros(factors)) else None
    depths = [depth for depth, want in enumerate(states) if want]
    found = [
        _times(gradient if off is None else gradient.masked_fill(off[depth], 0.0), factors[depth], gradient.dtype)
        for gradient, depth in zip(of_states, depths, strict=True)
    ]
    # A backward that is called inside autocast would have some products cast.
    with torch.autocast(factors.device.type, enabled=False):
        for gradient in of_head:
            flat = gradient.flatten(1)
            flat = flat if off is None else flat.masked_fill(off.unsqueeze(1), 0.0)
            found.append(torch.mv(flat.mT, factors).view(gradient.shape[1:]).to(dtype))
    return found


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient.dtype == factor.dtype == dtype:
        return gradient * factor
    # With one dimension the factor takes part in the promotion: the products are rounded once, from float32.
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))


_scale = torch.library.custom_op("cdt_fast::layerwise_cross_entropy_scale", _scaled, mutates_args=())


@_scale.register_fake
def _(gradients: list[Tensor], states: list[bool], factors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    of_states, of_head = gradients[: sum(states)], gradients[sum(states) :]
    return [torch.empty_like(gradient) for gradient in of_states] + [
        gradient.new_empty(gradient.shape[factors.dim() :], dtype=dtype) for gradient in of_head
    ]


def _recomputed(
    log_sums: Tensor,
    factors: Tensor,
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
    """The gradients that are wanted, from the logits computed again: of the hidden states, the weight, the bias."""
    count = count_rows(targets, weight.shape[0], ignore_index, mean)
    rows = rows_of_depths(targets.reshape(-1), count, ignore_index, sample, len(hidden), weight.device)
    options = (dtype, ignore_index, smoothing, softcap, chunk_tokens)
    wanted = (wants_hidden, wants_weight, wants_bias)
    log_sums = log_sums[: sum(len(depth.targets) for depth in rows)]
    found = _gradients(hidden, _run(hidden, weight, bias, rows, factors, *wanted, *options, log_sums=log_sums))
    states = sum(wants_hidden)
    return found[:states] + [gradient.to(weight.dtype) for gradient in found[states:]]


@torch.library.custom_op("cdt_fast::layerwise_cross_entropy_recompute", mutates_args=())
@functools.wraps(_recomputed)
def _recompute(*arguments: Any) -> list[Tensor]:
    return _unshared(_recomputed(*arguments))


@_recompute.register_fake
def _(
    log_sums: Tensor,
    factors: Tensor,
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
    states = [depth.new_empty(depth.shape) for depth, want in zip(hidden, wants_hidden, strict=True) if want]
    of_head = [weight.shape] * wants_weight + [weight.shape[:1]] * wants_bias
    return states + [weight.new_empty(shape) for shape in of_head]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, list[Tensor]]) -> None:
    hidden, weight, targets, bias, sample, _, ctx.at_once, *wanted = inputs
    *ctx.wants, ctx.options = *wanted[:3], wanted[3:]
    ctx.dtype = weight.dtype
    ctx.direct = False
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:3], *output[3], *(() if ctx.at_once else (weight, targets, bias, sample, *hidden)))


def _differentiate(ctx: Any, grad: Tensor | None, *others: None) -> tuple[Any, ...]:
    wants_hidden, wants_weight, wants_bias = ctx.wants
    states: list[Tensor | None] = [None] * len(wants_hidden)
    of_weight = of_bias = None
    if grad is not None:
        factor, *kept = ctx.saved_tensors
        factors = factor * grad
        # With create_graph=True the operators, whose own gradient refuses.
        direct = ctx.direct and not torch.is_grad_enabled()
        if ctx.at_once:
            found = iter((_scaled if direct else _scale)(kept, wants_hidden, factors, ctx.dtype))
        else:
            log_sums, weight, targets, bias, sample, *hidden = kept
            arguments = (log_sums, factors, hidden, weight, targets, bias, sample, *ctx.wants, *ctx.options)
            found = iter((_recomputed if direct else _recompute)(*arguments))
        states = [next(found) if want else None for want in wants_hidden]
        of_weight = next(found) if wants_weight else None
        of_bias = next(found) if wants_bias else None
    # In the places of the operator's arguments: hidden states, weight, targets, bias, and twelve others.
    return states, of_weight, None, of_bias, *(None,) * 12


_cross_entropy.register_autograd(_differentiate, setup_context=_setup)
differentiable_once(_scale, "layerwise_cross_entropy")
differentiable_once(_recompute, "layerwise_cross_entropy")


class _Direct(torch.autograd.Function):
    """The operator without the dispatcher, which takes as long as all that a small head has to compute on a CPU."""

    @staticmethod
    def forward(ctx: Any, depths: int, *inputs: Any) -> tuple[Tensor, ...]:
        arguments = (list(inputs[:depths]), *inputs[depths:])
        values, per_layer, factor, kept = _forward(*arguments)
        _setup(ctx, arguments, (values, per_layer, factor, kept))
        ctx.direct = True
        ctx.mark_non_differentiable(per_layer)
        # What was kept is returned too, for a second derivative to find its way back here.
        return values, per_layer, factor, *kept

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        states, *others = _differentiate(ctx, *grads)
        return None, *states, *others


def cross_entropy(hidden: list[Tensor], weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The first two results of the operator: what is differentiable, and the losses `[depths]`; see `_forward`."""
    tensors = [tensor for tensor in (weight, *hidden, *arguments) if isinstance(tensor, Tensor)]
    if _plain(tensors):
        # An autograd function would refuse to be a constant inside a function transform.
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if not differentiated:
            return _forward(hidden, weight, *arguments)[:2]
        results: Any = _Direct.apply(len(hidden), *hidden, weight, *arguments)
        return results[:2]
    values, per_layer, _, _ = _cross_entropy(hidden, weight, *arguments)
    return values, per_layer.detach()


def _plain(tensors: list[Tensor]) -> bool:
    """Whether nobody but autograd looks on: no compiler, no subclass, no GPU, whose kernels hide the dispatcher."""
    return not torch.compiler.is_compiling() and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" for tensor in tensors
    )


def _unshared(gradients: list[Tensor]) -> list[Tensor]:
    """The same values, each in memory of its own, as an operator has to return them."""
    return [g.clone() if g.untyped_storage().nbytes() > g.nbytes else g for g in gradients]


def _run(
    hidden: list[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    rows: list[Rows],
    factors: Tensor | None,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    dtype: torch.dtype,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
    chunk_tokens: int | None,
    *,
    log_sums: Tensor | None = None,
    apart: bool = False,
) -> Pass:
    """One pass; `factors` `[depths]` are what the gradients of each depth are multiplied by."""
    head = Head(weight.to(dtype), None if bias is None else bias.to(dtype), ignore_index, softcap, smoothing)
    scales, switched_off = None, None
    if factors is not None:
        scales = factors.to(weight.device, torch.promote_types(dtype, torch.float32), non_blocking=True)
        switched_off = known_zeros(factors)
        if rows[0].factor != 1.0:
            scales = torch.stack([scale * depth.factor for scale, depth in zip(scales.unbind(), rows, strict=True)])
    # Also outside of a forward: a backward that is called inside autocast would have some products cast.
    with torch.autocast(weight.device.type, enabled=False):
        return one_pass(
            [depth if depth.dim() == 2 else depth.reshape(-1, weight.shape[1]) for depth in hidden],
            head,
            rows,
            sweep_on_triton if runs_on_triton("layerwise_cross_entropy", head.weight) else TorchSweep(),
            most=chunk_rows(chunk_tokens, head.weight),
            log_sums=log_sums,
            scales=scales,
            switched_off=switched_off,
            wants_hidden=wants_hidden,
            wants_weight=wants_weight,
            wants_bias=wants_bias,
            apart=apart,
        )


def _gradients(hidden: list[Tensor], result: Pass) -> list[Tensor]:
    """What a pass has found, without the gaps: of the hidden states in their shapes, and of the head."""
    states = [
        gradient.view(depth.shape)
        for depth, gradient in zip(hidden, result.hidden, strict=True)
        if gradient is not None
    ]
    return states + [gradient for gradient in (result.weight, result.bias) if gradient is not None]
