"""The reconstruction loss at every depth (docs/maths.md §7): `ℓ_l = mean over tokens of ‖s − x̂_l‖²`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.ops.layerwise_reconstruction_loss.plain import errors_in_torch, gradients_in_torch, widest
from cdt_fast.ops.shared.backend import runs_on_triton
from cdt_fast.ops.shared.checks import check_lengths, check_tensor, padding_mask
from cdt_fast.ops.shared.depths import check_depths, detach_zero_weighted, weights_of_depths, zero_weight_mask
from cdt_fast.ops.shared.registration import once_differentiable


def layerwise_reconstruction_loss(
    reconstructions: Sequence[Tensor],
    target: Tensor,
    *,
    depth_weights: Tensor | Sequence[float] | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Squared error of every depth, summed over the width and averaged over the tokens, and their weighted sum.

    The errors are formed and summed in at least float32, whatever the dtype of the reconstructions.

    Args:
        reconstructions: L+1 tensors x̂_l, each `[..., n]`, depth 0 first. They are never stacked.
        target: s, `[..., n]`.
        depth_weights: `w`, L+1 numbers (negative and zero are welcome; a depth with weight 0 gets no gradient where
            the weights are numbers or a tensor on the CPU, else a gradient of zeros, as under torch.compile).
        lengths: for `[..., T, n]`: `[...]` integers, the number of tokens that count in each sequence.

    Returns:
        `(total, per_layer)`. `per_layer` is `[L+1]`, in units of the squared signal summed over the width. With
        weights: `total = Σ_l w_l ℓ_l` is differentiable and `per_layer` is detached. Without: `per_layer` is
        differentiable and `total` is its plain sum.

    Raises:
        InputError: no reconstruction, no token that counts, a wrong shape, dtype, device or number of weights, or a
            second derivative. On a GPU `lengths` are not waited for: where they leave no token the loss is NaN.
    """
    rank = 1 if lengths is None else 2
    check_tensor("target", target, rank, "[..., n]" if rank == 1 else "[..., T, n]")
    check_depths("reconstructions", reconstructions, tuple(target.shape), "as target")
    for depth, reconstruction in enumerate(reconstructions):
        if reconstruction.device != target.device:
            raise InputError(f"reconstructions[{depth}] is on {reconstruction.device} but target is on {target.device}")
    check_lengths(lengths, target)
    weights = weights_of_depths(depth_weights, len(reconstructions))
    if not target.shape[:-1].numel():
        raise InputError(f"target must hold at least one token that counts, got shape {tuple(target.shape)}")
    depths = detach_zero_weighted(reconstructions, weights)
    per_layer = _losses(depths, target, padding_mask(lengths, target))
    if weights is None:
        return per_layer.sum(), per_layer
    weights = weights.to(per_layer.device, per_layer.dtype, non_blocking=True)
    return (weights * per_layer).sum(), per_layer.detach()


def layerwise_reconstruction_loss_reference(reconstructions: Sequence[Tensor], target: Tensor) -> Tensor:
    """The formula of the per-depth losses `[L+1]`, in any dtype, differentiated by torch."""
    return torch.stack([(target - reconstruction).square().sum(-1).mean() for reconstruction in reconstructions])


@torch.library.custom_op("cdt_fast::layerwise_reconstruction_loss", mutates_args=())
def _losses(reconstructions: list[Tensor], target: Tensor, padding: Tensor | None) -> Tensor:
    """The losses `[depths]`, in the widest of the dtypes and at least float32."""
    tokens = _tokens(target, padding)
    if _on_triton(reconstructions, target):
        from cdt_fast.kernels.layerwise_reconstruction_loss import reconstruction_errors

        errors = reconstruction_errors(*_contiguous(reconstructions, target, padding))
    else:
        errors = errors_in_torch(reconstructions, target, padding)
    return errors.to(widest(reconstructions)).div_(tokens)


@_losses.register_fake
def _(reconstructions: list[Tensor], target: Tensor, padding: Tensor | None) -> Tensor:
    return target.new_empty(len(reconstructions), dtype=widest(reconstructions))


@torch.library.custom_op("cdt_fast::layerwise_reconstruction_loss_backward", mutates_args=())
def _backward(
    grad: Tensor,
    reconstructions: list[Tensor],
    target: Tensor,
    padding: Tensor | None,
    wanted: list[bool],
    wants_target: bool,
) -> list[Tensor]:
    """The gradients of the depths that are wanted, and after them that of the target where it is wanted."""
    factors = 2.0 * grad / _tokens(target, padding)
    if _on_triton(reconstructions, target):
        from cdt_fast.kernels.layerwise_reconstruction_loss import reconstruction_gradients

        depths, target, padding = _contiguous(reconstructions, target, padding)
        return reconstruction_gradients(depths, target, padding, factors.float(), wanted, wants_target)
    zeros = zero_weight_mask(factors)
    known = [None if zero else factor for factor, zero in zip(factors.unbind(), zeros, strict=True)]
    return gradients_in_torch(reconstructions, target, padding, known, wanted, wants_target)


@_backward.register_fake
def _(
    grad: Tensor,
    reconstructions: list[Tensor],
    target: Tensor,
    padding: Tensor | None,
    wanted: list[bool],
    wants_target: bool,
) -> list[Tensor]:
    found = [depth.new_empty(depth.shape) for depth, want in zip(reconstructions, wanted, strict=True) if want]
    return [*found, target.new_empty(target.shape)] if wants_target else found


def _setup(ctx: Any, inputs: tuple[list[Tensor], Tensor, Tensor | None], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    reconstructions, target, padding = inputs
    ctx.save_for_backward(target, padding, *reconstructions)


def _differentiate(ctx: Any, grad: Tensor | None) -> tuple[Any, Tensor | None, None]:
    target, padding, *reconstructions = ctx.saved_tensors
    wanted, wants_target = list(ctx.needs_input_grad[0]), ctx.needs_input_grad[1]
    if grad is None:
        return [None] * len(reconstructions), None, None
    found = iter(_backward(grad, reconstructions, target, padding, wanted, wants_target))
    return [next(found) if want else None for want in wanted], next(found) if wants_target else None, None


_losses.register_autograd(_differentiate, setup_context=_setup)
once_differentiable(_backward, "layerwise_reconstruction_loss")


def _tokens(target: Tensor, padding: Tensor | None) -> Tensor | int:
    """How many tokens count; on a GPU, where they depend on the lengths, a tensor that is not waited for."""
    if padding is None:
        return target.shape[:-1].numel()
    tokens = (~padding).sum()
    if tokens.device.type == "cpu" and not tokens:
        raise InputError(f"target must hold at least one token that counts, got shape {tuple(target.shape)}")
    return tokens


def _on_triton(reconstructions: Sequence[Tensor], target: Tensor) -> bool:
    # The tensors may differ in dtype: all of them have to be one that the kernel can load.
    return all(runs_on_triton("layerwise_reconstruction_loss", tensor) for tensor in (*reconstructions, target))


def _contiguous(
    reconstructions: Sequence[Tensor], target: Tensor, padding: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    return (
        [depth.contiguous() for depth in reconstructions],
        target.contiguous(),
        None if padding is None else padding.contiguous(),
    )
