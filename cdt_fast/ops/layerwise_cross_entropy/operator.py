"""The custom operators of the layerwise cross-entropy: what torch.compile and autograd see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.ops.layerwise_cross_entropy import steps
from cdt_fast.ops.shared.registration import once_differentiable


@torch.library.custom_op("cdt_fast::layerwise_cross_entropy", mutates_args=())
def _cross_entropy(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    depth_weights: Tensor | None,
    at_once: bool,
    kept_depths: int,
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
    inputs = (hidden, weight, targets, bias, sample, depth_weights, at_once, kept_depths)
    options = (dtype, ignore_index, mean, smoothing, softcap, chunk_tokens)
    values, per_layer, factor, kept, _ = steps.forward(*inputs, wants_hidden, wants_weight, wants_bias, *options)
    if not at_once:
        shapes = _kept_shapes(hidden, weight, targets, sample, kept_depths, dtype)
        kept = [_with_room(tensor, shape[0]) for tensor, shape in zip(kept, shapes, strict=True)]
    return values, per_layer, factor, _unshared(kept)


def _kept_shapes(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    sample: Tensor | None,
    kept_depths: int,
    dtype: torch.dtype,
) -> list[tuple[int, ...]]:
    """Of what the forward keeps of the rows, if all took part: the number of those that do is known to the values."""
    inner = targets.numel() if sample is None else sample.numel()
    counts = [inner] * (len(hidden) - 1) + [targets.numel()]
    groups = steps.groups_of(targets, sample, len(hidden), kept_depths, len(weight) * dtype.itemsize)
    shapes: list[tuple[int, ...]] = [(sum(counts[group.start : group.stop]), len(weight)) for group in groups]
    return shapes if kept_depths == len(hidden) else [*shapes, (sum(counts[kept_depths:]),)]


def _with_room(tensor: Tensor, rows: int) -> Tensor:
    more = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])]) if more else tensor.contiguous()


@_cross_entropy.register_fake
def _(
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    depth_weights: Tensor | None,
    at_once: bool,
    kept_depths: int,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    dtype: torch.dtype,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    wide, depths = torch.promote_types(dtype, torch.float32), len(hidden)
    groups = (depths,) if depth_weights is None else ()
    if at_once:
        kept = [depth.new_empty(depth.shape) for depth, want in zip(hidden, wants_hidden, strict=True) if want]
        of_head = [weight.shape] * wants_weight + [weight.shape[:1]] * wants_bias
        kept += [weight.new_empty((*groups, *shape), dtype=wide) for shape in of_head]
    else:
        shapes = _kept_shapes(hidden, weight, targets, sample, kept_depths, dtype)
        kept = [weight.new_empty(shape, dtype=dtype if len(shape) == 2 else wide) for shape in shapes]
    return (
        weight.new_empty(groups, dtype=wide),
        weight.new_empty(depths, dtype=wide),
        weight.new_empty((), dtype=wide),
        kept,
    )


_scale = torch.library.custom_op("cdt_fast::layerwise_cross_entropy_scale", steps.scaled, mutates_args=())


@_scale.register_fake
def _(gradients: list[Tensor], states: list[bool], factors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    of_states, of_head = gradients[: sum(states)], gradients[sum(states) :]
    return [torch.empty_like(gradient) for gradient in of_states] + [
        gradient.new_empty(gradient.shape[factors.dim() :], dtype=dtype) for gradient in of_head
    ]


@torch.library.custom_op("cdt_fast::layerwise_cross_entropy_from_rows", mutates_args=())
def _from_rows(
    kept: list[Tensor],
    factors: Tensor,
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    kept_depths: int,
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
    inputs = (kept, factors, hidden, weight, targets, bias, sample, kept_depths, wants_hidden, wants_weight, wants_bias)
    return _unshared(steps.from_rows(*inputs, dtype, ignore_index, mean, smoothing, softcap, chunk_tokens))


@_from_rows.register_fake
def _(
    kept: list[Tensor],
    factors: Tensor,
    hidden: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    sample: Tensor | None,
    kept_depths: int,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    *options: Any,
) -> list[Tensor]:
    states = [depth.new_empty(depth.shape) for depth, want in zip(hidden, wants_hidden, strict=True) if want]
    of_head = [weight.shape] * wants_weight + [weight.shape[:1]] * wants_bias
    return states + [weight.new_empty(shape) for shape in of_head]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, list[Tensor]]) -> None:
    hidden, weight, targets, bias, sample, depth_weights, ctx.at_once, ctx.kept_depths, *wanted = inputs
    *ctx.wants, ctx.options = *wanted[:3], wanted[3:]
    ctx.dtype = weight.dtype
    ctx.direct = False
    ctx.set_materialize_grads(False)
    ctx.kept = len(output[3])
    others = () if ctx.at_once else (depth_weights, weight, targets, bias, sample, *hidden)
    ctx.save_for_backward(*output[2:3], *output[3], *others)


def _differentiate(ctx: Any, grad: Tensor | None, *others: None) -> tuple[Any, ...]:
    wants_hidden, wants_weight, wants_bias = ctx.wants
    states: list[Tensor | None] = [None] * len(wants_hidden)
    of_weight = of_bias = None
    if grad is not None:
        factor, *saved = ctx.saved_tensors
        kept, inputs = saved[: ctx.kept], saved[ctx.kept :]
        factors = factor * grad
        # With create_graph=True the operators, whose own gradient refuses.
        direct = ctx.direct and not torch.is_grad_enabled()
        if ctx.at_once:
            found = iter((steps.scaled if direct else _scale)(kept, wants_hidden, factors, ctx.dtype))
        else:
            depth_weights, weight, targets, bias, sample, *hidden = inputs
            if depth_weights is not None:
                factors = factors * depth_weights.to(factors)
            arguments = (
                kept,
                factors,
                hidden,
                weight,
                targets,
                bias,
                sample,
                ctx.kept_depths,
                *ctx.wants,
                *ctx.options,
            )
            found = iter(steps.from_rows(*arguments, rows=ctx.rows) if direct else _from_rows(*arguments))
        states = [next(found) if want else None for want in wants_hidden]
        of_weight = next(found) if wants_weight else None
        of_bias = next(found) if wants_bias else None
    # In the places of the operator's arguments: hidden states, weight, targets, bias, and thirteen others.
    return states, of_weight, None, of_bias, *(None,) * 13


_cross_entropy.register_autograd(_differentiate, setup_context=_setup)
once_differentiable(_scale, "layerwise_cross_entropy")
once_differentiable(_from_rows, "layerwise_cross_entropy")


class _Direct(torch.autograd.Function):
    """The operator without the dispatcher, which takes as long as all that a small head has to compute on a CPU."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], weight: Tensor, bias: Tensor | None, *hidden: Tensor) -> Any:
        """What autograd has to see it sees beside the arguments: it looks at each of them, at a microsecond apiece."""
        values, per_layer, factor, kept, ctx.rows = steps.forward(*arguments)
        _setup(ctx, arguments, (values, per_layer, factor, kept))
        ctx.direct = True
        ctx.mark_non_differentiable(per_layer)
        # Gradients that were kept are returned too, for a second derivative to find its way back here.
        return values, per_layer, factor, *(kept if ctx.at_once else ())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        states, weight, _, bias, *_ = _differentiate(ctx, *grads)
        return None, weight, bias, *states


def cross_entropy(
    hidden: list[Tensor], weight: Tensor, targets: Tensor, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """The first two results of the operator: what is differentiable, and the losses `[depths]`; see `steps.forward`."""
    arguments = (hidden, weight, targets, bias, *others)
    tensors = [tensor for tensor in (*hidden, *arguments[1:]) if isinstance(tensor, Tensor)]
    if _plain(tensors):
        # An autograd function would refuse to be a constant inside a function transform.
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if not differentiated:
            return steps.forward(*arguments)[:2]
        results: Any = _Direct.apply(arguments, weight, bias, *hidden)
        return results[:2]
    values, per_layer, _, _ = _cross_entropy(*arguments)
    return values, per_layer.detach()


def _plain(tensors: list[Tensor]) -> bool:
    """Whether nobody but autograd looks on: no compiler, no subclass, no GPU, whose kernels hide the dispatcher."""
    return not torch.compiler.is_compiling() and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" for tensor in tensors
    )


def _unshared(gradients: list[Tensor]) -> list[Tensor]:
    """The same values, each in memory of its own, as an operator has to return them."""
    return [g.clone() if g.untyped_storage().nbytes() > g.nbytes else g for g in gradients]
