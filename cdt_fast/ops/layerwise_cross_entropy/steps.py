"""What the operators of the layerwise cross-entropy compute, forward and backward: between the pass and autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cdt_fast.ops.layerwise_cross_entropy.chunk_pass import Pass, one_pass
from cdt_fast.ops.layerwise_cross_entropy.chunks import Head, Rows, chunk_rows, count_rows, rows_of_depths
from cdt_fast.ops.layerwise_cross_entropy.gradients import HeadGradients
from cdt_fast.ops.layerwise_cross_entropy.kept import add_kept, grouped, keep_logits
from cdt_fast.ops.layerwise_cross_entropy.sweep import TorchSweep, sweep_on_triton
from cdt_fast.ops.shared.backend import runs_on_triton
from cdt_fast.ops.shared.depths import zero_weight_mask
from cdt_fast.ops.shared.products import rows_of

# The arguments that all of them share, in this order: the hidden states `[..., d]`, the head in its own dtype, the
# targets, the numbers of the tokens that stand for all at the inner depths; which gradients are wanted; and as options
# the dtype of the products (they are cast chunk by chunk, so that the gradients are rounded once, and to the dtype of
# the arguments), ignore_index, whether a mean is asked for, label smoothing, softcap and the rows of a chunk.


def forward(
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
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Rows]]:
    """What is differentiable: the weighted sum of the losses `[]`, or without weights the losses `[depths]`; the losses
    `[depths]`; a factor `[]`; what the backward starts from; and the rows that take part.

    With `at_once` these are the gradients that are wanted of the sums over the tokens, those of the head one a depth
    where there are no weights. Otherwise they are the gradients of the logits of the first `kept_depths` depths, a
    tensor a group of depths, and the log-sum-exp of each row of the others, `[depths · tokens]` with room to spare.

    The factor, one over the number of tokens or one, waits for the backward so that a loss scale meets it: in float16
    the quotients alone would underflow.
    """
    count, rows = _rows(hidden, weight, targets, sample, ignore_index, mean)
    device, wide = weight.device, torch.promote_types(dtype, torch.float32)
    head = _head(weight, bias, dtype, ignore_index, smoothing, softcap)
    sums: list[Tensor] = []
    kept: list[Tensor] = []
    if kept_depths:
        groups = groups_of(targets, sample, len(hidden), kept_depths, len(weight) * dtype.itemsize)
        with _without_autocast(device):
            sums, kept = keep_logits([_flat(depth) for depth in hidden[:kept_depths]], head, rows, groups, TorchSweep())
    if kept_depths < len(hidden):
        states, of_states = hidden[kept_depths:], rows[kept_depths:]
        wanted = (wants_hidden, wants_weight, wants_bias) if at_once else ([False] * len(states), False, False)
        factors = None
        if at_once:
            factors = torch.ones(len(hidden)) if depth_weights is None else depth_weights
        result = _run(states, head, of_states, factors, *wanted, chunk_tokens, apart=depth_weights is None)
        assert result.sums is not None
        sums.append(result.sums)
        kept += _gradients(hidden, result) if at_once else [result.log_sums]
    per_layer = sums[0] if len(sums) == 1 else torch.cat(sums)
    if not isinstance(count, int):
        count = count.to(device, non_blocking=True)
    if sample is not None:
        for of_depth, depth in zip(per_layer.unbind(), rows, strict=True):
            of_depth *= depth.factor
    if mean:
        per_layer /= count
    if depth_weights is None:
        values = per_layer.clone()
    else:
        values = torch.dot(depth_weights.to(device, wide, non_blocking=True), per_layer)
    if not mean:
        factor = torch.ones((), dtype=wide, device=device)
    elif isinstance(count, int):
        factor = torch.full((), 1.0 / count, dtype=wide, device=device)
    else:
        factor = count.clamp(min=1).to(wide).reciprocal()
    return values, per_layer, factor, kept, rows


def groups_of(targets: Tensor, sample: Tensor | None, depths: int, kept_depths: int, bytes_of_row: int) -> list[range]:
    """The groups of the depths whose logits are kept, by the tokens that could take part at each."""
    inner = targets.numel() if sample is None else sample.numel()
    return grouped(([inner] * (depths - 1) + [targets.numel()])[:kept_depths], bytes_of_row)


def scaled(gradients: list[Tensor], states: list[bool], factors: Tensor, dtype: torch.dtype) -> list[Tensor]:
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
    off = factors == 0 if factors.device.type != "cpu" or any(zero_weight_mask(factors)) else None
    depths = [depth for depth, want in enumerate(states) if want]
    found = [
        _times(gradient if off is None else gradient.masked_fill(off[depth], 0.0), factors[depth], gradient.dtype)
        for gradient, depth in zip(of_states, depths, strict=True)
    ]
    with _without_autocast(factors.device):
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


def from_rows(
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
    rows: list[Rows] | None = None,
) -> list[Tensor]:
    """The gradients that are wanted: of the hidden states, the weight, the bias. From the gradients of the logits that
    were kept, and at the other depths from the logits computed again.

    Args:
        kept: what `forward` has returned.
        factors: `[depths]`.
        rows: what `forward` has returned; None: to be found again.
    """
    if rows is None:
        _, rows = _rows(hidden, weight, targets, sample, ignore_index, mean)
    head = _head(weight, bias, dtype, ignore_index, smoothing, softcap)
    of_head = HeadGradients(head.weight, wants_weight, wants_bias, None)
    states: list[Tensor | None] = []
    if kept_depths:
        groups = groups_of(targets, sample, len(hidden), kept_depths, len(weight) * dtype.itemsize)
        scales = _scales(factors, rows)[:kept_depths]
        flat = [_flat(depth) for depth in hidden[:kept_depths]]
        with _without_autocast(weight.device):
            states = add_kept(
                flat, head, rows[:kept_depths], groups, kept[: len(groups)], scales, wants_hidden[:kept_depths], of_head
            )
    if kept_depths < len(hidden):
        rest = slice(kept_depths, None)
        log_sums = kept[-1][: sum(len(depth.targets) for depth in rows[rest])]
        options = (wants_hidden[rest], wants_weight, wants_bias, chunk_tokens)
        states += _run(
            hidden[rest], head, rows[rest], factors[rest], *options, log_sums=log_sums, of_head=of_head
        ).hidden
    found = _shaped(hidden, states)
    of_head_found = [gradient for gradient in of_head.result() if gradient is not None]
    return found + [g if g.dtype == weight.dtype else g.to(weight.dtype) for g in of_head_found]


def _rows(
    hidden: list[Tensor], weight: Tensor, targets: Tensor, sample: Tensor | None, ignore_index: int, mean: bool
) -> tuple[Tensor | int, list[Rows]]:
    """How many tokens count, and which take part at each depth."""
    count = count_rows(targets, weight.shape[0], ignore_index, mean)
    targets = targets.reshape(-1).contiguous()  # one-dimensional ones may be a column of a table
    return count, rows_of_depths(targets, count, ignore_index, sample, len(hidden), weight.device)


def _head(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, ignore_index: int, smoothing: float, softcap: float | None
) -> Head:
    if weight.dtype != dtype:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return Head(weight, bias, ignore_index, softcap, smoothing)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Also for a backward: one that is called inside autocast would have some products cast."""
    # To switch off what is off takes as long as a small product.
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def _flat(states: Tensor) -> Tensor:
    """`[..., d]` → `[tokens, d]`, also where d is 0."""
    return states if states.dim() == 2 else rows_of(states)


def _scales(factors: Tensor, rows: list[Rows]) -> Tensor:
    """The factors of the depths times those by which the tokens of each stand for all."""
    if rows[0].factor == 1.0:
        return factors
    return torch.stack([factor * depth.factor for factor, depth in zip(factors.unbind(), rows, strict=True)])


def _run(
    hidden: list[Tensor],
    head: Head,
    rows: list[Rows],
    factors: Tensor | None,
    wants_hidden: list[bool],
    wants_weight: bool,
    wants_bias: bool,
    chunk_tokens: int | None,
    *,
    log_sums: Tensor | None = None,
    apart: bool = False,
    of_head: HeadGradients | None = None,
) -> Pass:
    """One pass; `factors` `[depths]` are what the gradients of each depth are multiplied by."""
    weight = head.weight
    scales, switched_off = None, None
    if factors is not None:
        scales = factors.to(weight.device, torch.promote_types(weight.dtype, torch.float32), non_blocking=True)
        scales, switched_off = _scales(scales, rows), zero_weight_mask(factors)
    with _without_autocast(weight.device):
        return one_pass(
            [_flat(depth) for depth in hidden],
            head,
            rows,
            sweep_on_triton if runs_on_triton("layerwise_cross_entropy", weight) else TorchSweep(),
            most=chunk_rows(chunk_tokens, weight),
            log_sums=log_sums,
            scales=scales,
            switched_off=switched_off,
            wants_hidden=wants_hidden,
            wants_weight=wants_weight,
            wants_bias=wants_bias,
            apart=apart,
            of_head=of_head,
        )


def _gradients(hidden: list[Tensor], result: Pass) -> list[Tensor]:
    """What a pass has found, without the gaps: of the hidden states in their shapes, and of the head."""
    return _shaped(hidden, result.hidden) + [
        gradient for gradient in (result.weight, result.bias) if gradient is not None
    ]


def _shaped(hidden: list[Tensor], gradients: list[Tensor | None]) -> list[Tensor]:
    """The gradients of the hidden states that there are, in the shapes of those."""
    return [
        gradient if depth.dim() == 2 else gradient.view(depth.shape)
        for depth, gradient in zip(hidden, gradients, strict=True)
        if gradient is not None
    ]
