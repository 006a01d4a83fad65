"""The reconstruction loss at every depth (docs/ops.md §4): `ℓ_l = mean over tokens of ‖s − x̂_l‖²`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from cdt_fast.checks import InputError, check_choice
from cdt_fast.ops import common

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

    Raises:
        InputError: no reconstruction, no token that counts, a wrong shape, dtype, device or number of weights, or a
            second derivative. On a GPU `lengths` are not waited for: where they leave no token the loss is NaN.
    """
    rank = 1 if lengths is None else 2
    common.check_tensor("target", target, rank, "[..., n]" if rank == 1 else "[..., T, n]")
    common.check_depths("reconstructions", reconstructions, tuple(target.shape), "as target")
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
    call = common.caller(_ReconstructionLoss, None, target, *depths)
    arguments = target, common.padding_mask(lengths, target), reduction, backend
    per_depth = _operator(depths, *arguments) if call is None else call(*arguments, *depths)
    if weights is None:
        return common.LayerwiseLosses(per_depth.sum() if len(per_depth) > 1 else per_depth.squeeze(0), per_depth)
    weights = common.on_device(weights, per_depth.device, per_depth.dtype)
    return common.LayerwiseLosses((weights * per_depth).sum(), per_depth.detach())


def layerwise_reconstruction_loss_reference(reconstructions: Sequence[Tensor], target: Tensor) -> Tensor:
    """Return the losses `[L+1]`, in any dtype, differentiated by torch."""
    return torch.stack([(target - reconstruction).square().sum(-1).mean() for reconstruction in reconstructions])


@common.outside_autocast
def _losses(
    target: Tensor, padding: Tensor | None, reduction: common.Reduction, backend: str, *reconstructions: Tensor
) -> Tensor:
    """Return the losses `[depths]`, in the widest of the dtypes and at least float32."""
    tokens = _tokens(target, padding)
    errors = None
    if backend == "triton":
        from cdt_fast.kernels import layerwise_reconstruction_loss as kernels

        with common.or_plain_torch("layerwise_reconstruction_loss", target):
            blocks = common.blocks_for(kernels.BLOCKS, target, multiplies=False)
            errors = kernels.forward(reconstructions, target, padding, blocks)
    if errors is None:
        errors = squared_errors(reconstructions, target, padding)
    errors = errors.to(_widest(reconstructions))
    return errors if reduction == "sum" else errors.div_(tokens)


@common.outside_autocast
def _gradients(
    grad: Tensor,  # [depths], of the losses
    target: Tensor,
    padding: Tensor | None,
    reconstructions: list[Tensor],
    reduction: common.Reduction,
    needs: list[bool],  # of the depths, and last of the target
    backend: str,
) -> list[Tensor]:
    """Return the gradients that are needed, of the depths and last of the target."""
    factors = 2.0 * grad
    if reduction == "mean":
        factors /= _tokens(target, padding)
    if backend == "triton":
        from cdt_fast.kernels import layerwise_reconstruction_loss as kernels

        with common.or_plain_torch("layerwise_reconstruction_loss", target):
            blocks = common.blocks_for(kernels.BLOCKS, target, multiplies=False)
            return kernels.backward(reconstructions, target, padding, factors.float(), needs, blocks)
    zeros = common.zero_weight_mask(factors)
    known = [None if zero else factor for factor, zero in zip(factors.unbind(), zeros, strict=True)]
    return _gradients_in_torch(reconstructions, target, padding, known, needs)


def _tokens(target: Tensor, padding: Tensor | None) -> Tensor | int:
    """Count the tokens that count; on a GPU with lengths as a tensor: the host does not wait for it."""
    tokens = target.shape[:-1].numel() if padding is None else (~padding).sum()
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
    for rows, hidden, parts in _blocks(reconstructions, target, padding):
        for own, depth in zip(sums, reconstructions, strict=True):
            goal, block = parts[_widest([depth])]
            torch.ops.aten.mse_loss.out(_cast(common.rows_of(depth)[rows], block), goal, _NO_REDUCTION, out=block)
            if hidden is not None:
                block.masked_fill_(hidden, 0.0)
            own.append(block.sum(dtype=zero.dtype))
    return torch.stack([torch.stack(some).sum() for some in sums])


def _gradients_in_torch(
    reconstructions: Sequence[Tensor],
    target: Tensor,
    padding: Tensor | None,
    factors: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor]:
    """Return `f_l (x̂_l − s)` of the depths that are needed and, if it is, the gradient of the target: minus their sum.

    A factor f_l is None if it is known to be zero.
    """
    *needs, needs_target = needs
    # The sum over the depths in one place, rounded once to the dtype of the target.
    wide = _widest([*reconstructions, target])
    total = torch.zeros_like(target, dtype=wide, memory_format=torch.contiguous_format) if needs_target else None
    rows_of_total = None if total is None else common.rows_of(total)
    gradients: list[Tensor] = []
    work: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for depth, factor, needed in zip(reconstructions, factors, needs, strict=True):
        if needed:
            make = torch.zeros_like if factor is None else torch.empty_like
            gradients.append(make(depth, memory_format=torch.contiguous_format))
        if factor is not None and (needed or needs_target):
            # torch's gradient of a square has the 2 that is in the factors already.
            half = factor.to(torch.promote_types(depth.dtype, torch.float32)) * 0.5
            work.append((common.rows_of(depth), half, common.rows_of(gradients[-1]) if needed else None))

    for rows, hidden, parts in _blocks([depth for depth, _, _ in work], target, padding):
        for depth, half, output in work:
            goal, block = parts[_widest([depth])]
            if output is not None and output.dtype == block.dtype:
                block = output[rows]
            depth = _cast(depth[rows], block)
            torch.ops.aten.mse_loss_backward.grad_input(half, depth, goal, _SUM, grad_input=block)
            if hidden is not None:
                block.masked_fill_(hidden, 0.0)
            if rows_of_total is not None:
                rows_of_total[rows] -= block
            if output is not None and output.dtype != block.dtype:
                output[rows] = block
    return gradients if total is None else [*gradients, total.to(target.dtype)]


def _blocks(
    depths: Sequence[Tensor], target: Tensor, padding: Tensor | None
) -> Iterator[tuple[slice, Tensor | None, dict[torch.dtype, tuple[Tensor, Tensor]]]]:
    """Yield rows, their padding, and for each dtype that a depth is computed in the target and memory for a result."""
    target = common.rows_of(target)
    count, width = target.shape
    hidden = None if padding is None else padding.reshape(count, 1)
    height = max(1, min(count, common.budget(NUMBERS_A_BLOCK, target) // max(1, width)))
    shared = {dtype: target.new_empty(height, width, dtype=dtype) for dtype in {_widest([depth]) for depth in depths}}
    for start in range(0, count, height):
        rows = slice(start, min(count, start + height))
        parts = {dtype: (target[rows].to(dtype), memory[: rows.stop - start]) for dtype, memory in shared.items()}
        yield rows, None if hidden is None else hidden[rows], parts


def _cast(depth: Tensor, block: Tensor) -> Tensor:
    """Return the rows in the dtype of the block, which may hold them: it is written only after they are read."""
    return depth if depth.dtype == block.dtype else block.copy_(depth)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    target, padding, ctx.reduction, ctx.backend, *reconstructions = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(target, padding, *reconstructions)


def _found(ctx: Any, grad: Tensor | None, needs: list[bool]) -> Iterator[Tensor | None]:
    """Return the gradients of the depths, and last of the target."""
    if grad is None:
        return iter([None] * len(needs))
    target, padding, *depths = ctx.saved_tensors
    call: Any = _gradients if common.is_plain_eager(grad, target, *depths) else _gradients_operator
    return common.scatter(call(grad, target, padding, depths, ctx.reduction, needs, ctx.backend), needs)


class _ReconstructionLoss(torch.autograd.Function):
    forward = staticmethod(_losses)
    setup_context = staticmethod(_setup_context)

    @staticmethod
    @common.once_differentiable("layerwise_reconstruction_loss")
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        needs_target, _, _, _, *needs = ctx.needs_input_grad
        *of_depths, of_target = _found(ctx, grad, [*needs, needs_target])
        return of_target, None, None, None, *of_depths


# An operator takes the depths as a list, whose elements `torch.autograd.Function` would not see.


@common.once_differentiable("layerwise_reconstruction_loss")
def _operator_backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    needs, needs_target, *_ = ctx.needs_input_grad
    *of_depths, of_target = _found(ctx, grad, [*needs, needs_target])
    return of_depths, of_target, None, None, None


_operator = common.define(
    "layerwise_reconstruction_loss",
    lambda reconstructions, *others: _losses(*others, *reconstructions),
    lambda reconstructions, target, *others: target.new_empty(len(reconstructions), dtype=_widest(reconstructions)),
    "(Tensor[] reconstructions, Tensor target, Tensor? padding, str reduction, str backend) -> Tensor",
)
_operator.register_autograd(
    _operator_backward, setup_context=lambda ctx, inputs, output: _setup_context(ctx, (*inputs[1:], *inputs[0]), output)
)
_gradients_operator = common.define(
    "layerwise_reconstruction_loss_backward",
    _gradients,
    lambda grad, target, padding, depths, reduction, needs, backend: [
        tensor.new_empty(tensor.shape) for tensor in common.compress([*depths, target], needs)
    ],
)
