"""The reconstruction loss at every depth (docs/ops.md §4): `ℓ_l = mean over tokens of ‖s − x̂_l‖²`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from cdt_fast.checks import InputError, check_choice
from cdt_fast.ops import common, operators

# Numbers that plain torch takes at a time. With fewer the calls of torch cost most, with more the memory does; on a GPU
# without the kernel the launches cost most.
NUMBERS_A_BLOCK = {"cpu": 2**19, "cuda": 2**25}
# torch's codes for a reduction.
_NO_REDUCTION, _SUM = 0, 2


def layerwise_reconstruction_loss(
    reconstructions: Sequence[Tensor],
    target: Tensor,
    *,
    depth_weights: Tensor | Sequence[float] | None = None,
    lengths: Tensor | None = None,
    reduction: common.Reduction = "mean",
) -> common.LayerwiseLosses:
    """Squared error of every depth, summed over the width and averaged over the tokens, and their weighted sum.

    The errors are formed and summed in at least float32, whatever the dtype of the reconstructions.

    Args:
        reconstructions: L+1 tensors x̂_l, each `[..., n]`, depth 0 first. They are never stacked.
        target: s, `[..., n]`.
        depth_weights: `w`, L+1 numbers (negative and zero are welcome; a depth with weight 0 gets no gradient where
            the weights are numbers or a tensor on the CPU, else a gradient of zeros, as under torch.compile). A tensor
            that requires a gradient gets one.
        lengths: for `[..., T, n]`: `[...]` integers, the number of tokens that count in each sequence.
        reduction: "sum" leaves out the division by the number of tokens.

    Returns:
        `(total, per_depth)`, a named tuple. `per_depth` is `[L+1]`, in units of the squared signal summed over the
        width. With weights: `total = Σ_l w_l ℓ_l` is differentiable and `per_depth` is detached. Without: `per_depth`
        is differentiable and `total` is its plain sum.

    InputError: no reconstruction, a mean over no token, a wrong shape, dtype, device or number of weights, or a second
    derivative. On a GPU `lengths` are not waited for: where they leave no token the loss is NaN.
    """
    rank = 1 if lengths is None else 2
    common.check_tensor("target", target, rank, "[..., n]" if rank == 1 else "[..., T, n]")
    common.check_depths("reconstructions", reconstructions, target.shape, "as target")
    for depth, reconstruction in enumerate(reconstructions):
        if reconstruction.device != target.device:
            raise InputError(f"reconstructions[{depth}] is on {reconstruction.device} but target is on {target.device}")
    common.check_lengths(lengths, target)
    check_choice("reduction", reduction, get_args(common.Reduction))
    common.refuse_transforms("layerwise_reconstruction_loss", target, *reconstructions)
    weights = common.weights_of_depths(depth_weights, len(reconstructions))
    depths = common.detach_zero_weighted(reconstructions, weights)
    # The tensors may differ in dtype: the kernel has to be able to load each.
    backend = common.choose_backend("layerwise_reconstruction_loss", *reconstructions, target)
    per_depth = _losses(depths, target, common.padding_mask(lengths, target), reduction, backend)
    if weights is None:
        return common.LayerwiseLosses(per_depth.sum(), per_depth)
    weights = common.on_device(weights, per_depth.device, per_depth.dtype)
    return common.LayerwiseLosses((weights * per_depth).sum(), per_depth.detach().clone())


def layerwise_reconstruction_loss_reference(reconstructions: Sequence[Tensor], target: Tensor) -> Tensor:
    """Return the losses `[L+1]`, in any dtype, differentiated by torch."""
    return torch.stack([(target - reconstruction).square().sum(-1).mean() for reconstruction in reconstructions])


@common.outside_autocast
def _forward(
    reconstructions: list[Tensor], target: Tensor, padding: Tensor | None, reduction: common.Reduction, backend: str
) -> Tensor:
    """Return the losses `[depths]`, in the widest of the dtypes and at least float32."""
    errors = None
    if backend == "triton":
        with common.or_plain_torch("layerwise_reconstruction_loss", target) as kernels:
            blocks = common.blocks_for(kernels.BLOCKS, target, multiplies=False)
            errors = kernels.forward(reconstructions, target, padding, blocks)
    if errors is None:
        errors = squared_errors(reconstructions, target, padding)
    errors = errors.to(_widest(reconstructions))
    return errors if reduction == "sum" else errors.div_(_tokens(target, padding))


def _forward_fake(reconstructions: list[Tensor], target: Tensor, *others: Any) -> Tensor:
    return target.new_empty(len(reconstructions), dtype=_widest(reconstructions))


@operators.gradients_of("layerwise_reconstruction_loss", lambda grad, target, _, depths, *others: (*depths, target))
@common.outside_autocast
def _gradients(
    grad: Tensor,  # [depths], of the losses
    target: Tensor,
    padding: Tensor | None,
    reconstructions: list[Tensor],
    reduction: common.Reduction,
    backend: str,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return the gradients `f_l (x̂_l − s)` of the depths, and last that of the target, minus their sum."""
    factors = 2.0 * grad
    if reduction == "mean":
        factors /= _tokens(target, padding)
    if backend == "triton":
        with common.or_plain_torch("layerwise_reconstruction_loss", target) as kernels:
            blocks = common.blocks_for(kernels.BLOCKS, target, multiplies=False)
            return kernels.backward(reconstructions, target, padding, factors.float(), needs, blocks)
    *needs, needs_target = needs
    # The sum over the depths in one place, rounded once to the dtype of the target.
    wide = _widest([*reconstructions, target])
    total = torch.zeros_like(target, dtype=wide, memory_format=torch.contiguous_format) if needs_target else None
    rows_of_total = None if total is None else common.rows_of(total)
    gradients: list[Tensor | None] = []
    work: list[tuple[Tensor, Tensor, Tensor | None]] = []
    zeros = common.zero_weight_mask(factors)
    for depth, factor, zero, needed in zip(reconstructions, factors.unbind(), zeros, needs, strict=True):
        make = torch.zeros_like if zero else torch.empty_like
        gradient = make(depth, memory_format=torch.contiguous_format) if needed else None
        gradients.append(gradient)
        if not zero and (needed or needs_target):
            # torch's gradient of a square has the 2 that is in the factors already.
            work.append((common.rows_of(depth), factor * 0.5, None if gradient is None else common.rows_of(gradient)))
    for rows, hidden, goal, block in _blocks(target, padding, _widest(reconstructions)):
        for depth, half, output in work:
            into = block if output is None or output.dtype != block.dtype else output[rows]
            torch.ops.aten.mse_loss_backward.grad_input(half, _cast(depth[rows], into), goal, _SUM, grad_input=into)
            if hidden is not None:
                into.masked_fill_(hidden, 0.0)
            if rows_of_total is not None:
                rows_of_total[rows] -= into
            if output is not None and into is block:
                output[rows] = block
    return [*gradients, None if total is None else total.to(target.dtype)]


def _tokens(target: Tensor, padding: Tensor | None) -> Tensor | int:
    """Count the tokens that count; on a GPU with lengths as a tensor: the host does not wait for it."""
    tokens = math.prod(target.shape[:-1]) if padding is None else (~padding).sum()
    if (isinstance(tokens, int) or tokens.device.type == "cpu") and not tokens:
        raise InputError(f"target must hold at least one token that counts, got shape {tuple(target.shape)}")
    return tokens


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the widest of the dtypes, at least float32."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


# Plain torch. A pass over a tensor that no longer fits the caches costs more than its arithmetic: so some rows are
# squared and summed, or differentiated and rounded, before the next are, and a target is cast once for all depths.


def squared_errors(reconstructions: Sequence[Tensor], target: Tensor, padding: Tensor | None) -> Tensor:
    """Sum `‖x̂_l − s‖²` over the tokens that count, `[depths]`, in the widest dtype of the depths, at least float32."""
    zero = target.new_zeros((), dtype=_widest(reconstructions))
    sums = [[zero] for _ in reconstructions]
    for rows, hidden, goal, block in _blocks(target, padding, zero.dtype):
        for own, depth in zip(sums, reconstructions, strict=True):
            torch.ops.aten.mse_loss.out(_cast(common.rows_of(depth)[rows], block), goal, _NO_REDUCTION, out=block)
            if hidden is not None:
                block.masked_fill_(hidden, 0.0)
            own.append(block.sum())
    return torch.stack([torch.stack(some).sum() for some in sums])


def _blocks(
    target: Tensor, padding: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor | None, Tensor, Tensor]]:
    """Yield rows, their padding, and in the dtype the target and memory for a result."""
    target = common.rows_of(target)
    count, width = target.shape
    hidden = None if padding is None else padding.reshape(count, 1)
    height = max(1, min(count, common.budget(NUMBERS_A_BLOCK, target) // max(1, width)))
    memory = target.new_empty(height, width, dtype=dtype)
    for start in range(0, count, height):
        rows = slice(start, min(count, start + height))
        own = None if hidden is None else hidden[rows]
        yield rows, own, target[rows].to(dtype), memory[: rows.stop - start]


def _cast(depth: Tensor, block: Tensor) -> Tensor:
    """Return the rows in the dtype of the block, which may hold them: it is written only after they are read."""
    return depth if depth.dtype == block.dtype else block.copy_(depth)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    reconstructions, target, padding, ctx.reduction, ctx.backend = inputs
    ctx.save_for_backward(target, padding, *reconstructions)


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor | None], Tensor | None]:
    target, padding, *depths = ctx.saved_tensors
    needs, needs_target, *_ = ctx.needs_input_grad
    options = ctx.reduction, ctx.backend, [*needs, needs_target]
    *of_depths, of_target = _gradients(grad, target, padding, depths, *options)
    return of_depths, of_target


_losses = operators.differentiable("layerwise_reconstruction_loss", _forward, _forward_fake, _setup_context, _backward)
