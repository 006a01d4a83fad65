"""`layerwise_reconstruction_loss` as an operator with a gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import ReconstructionLossArguments, ReconstructionLossBackwardArguments
from cdt_fast.ops.layerwise_reconstruction_loss.plain import errors_in_torch, gradients_in_torch, widest
from cdt_fast.ops.shared.checks import is_transformed, without_padding
from cdt_fast.ops.shared.depths import zero_weight_mask
from cdt_fast.ops.shared.registration import Operator, save, saved

Loss = TypeVar("Loss", bound=ReconstructionLossArguments)


def _forward(loss: ReconstructionLossArguments) -> Tensor:
    """The losses `[depths]`, in the widest of the dtypes and at least float32."""
    tokens = _tokens(loss)
    if loss.backend == "triton":
        from cdt_fast.kernels.layerwise_reconstruction_loss import reconstruction_forward

        errors = reconstruction_forward(_contiguous(loss))
    else:
        errors = errors_in_torch(loss.reconstructions, loss.target, loss.padding)
    errors = errors.to(widest(loss.reconstructions))
    return errors if loss.reduction == "sum" else errors.div_(tokens)


def _forward_fake(loss: ReconstructionLossArguments) -> Tensor:
    return loss.target.new_empty(len(loss.reconstructions), dtype=widest(loss.reconstructions))


def _backward(loss: ReconstructionLossBackwardArguments) -> list[Tensor]:
    """The gradients of the depths that are needed, and after them that of the target where it is needed."""
    factors = 2.0 * loss.grad
    if loss.reduction == "mean":
        factors /= _tokens(loss)
    if loss.backend == "triton":
        from cdt_fast.kernels.layerwise_reconstruction_loss import reconstruction_backward

        return reconstruction_backward(_contiguous(loss), factors.float())
    zeros = zero_weight_mask(factors)
    return gradients_in_torch(
        loss, [None if zero else factor for factor, zero in zip(factors.unbind(), zeros, strict=True)]
    )


def _backward_fake(loss: ReconstructionLossBackwardArguments) -> list[Tensor]:
    needed = itertools.compress([*loss.reconstructions, loss.target], [*loss.needs_reconstructions, loss.needs_target])
    return [tensor.new_empty(tensor.shape) for tensor in needed]


def _setup_context(ctx: Any, loss: ReconstructionLossArguments, output: Tensor) -> None:
    needs = ctx.needs
    save(ctx, **vars(loss), needs_reconstructions=needs["reconstructions"], needs_target=needs["target"])


def _autograd(ctx: Any, grad: Tensor) -> list[Tensor]:
    return layerwise_reconstruction_loss_backward(ReconstructionLossBackwardArguments(grad=grad, **saved(ctx)))


def _formula(loss: ReconstructionLossArguments) -> Tensor:
    tokens, dtype = _tokens(loss), widest(loss.reconstructions)
    sums = []
    for depth in loss.reconstructions:
        wide = torch.promote_types(depth.dtype, torch.float32)
        error = without_padding(loss.target.to(wide) - depth.to(wide), loss.padding)
        sums.append(error.square().sum().to(dtype))
    return torch.stack(sums) if loss.reduction == "sum" else torch.stack(sums) / tokens


layerwise_reconstruction_loss_forward = Operator(
    "layerwise_reconstruction_loss",
    ReconstructionLossArguments,
    "Tensor",
    _forward,
    _forward_fake,
    _setup_context,
    _autograd,
    _formula,
)
layerwise_reconstruction_loss_backward = Operator(
    "layerwise_reconstruction_loss_backward", ReconstructionLossBackwardArguments, "Tensor[]", _backward, _backward_fake
)


def _tokens(loss: ReconstructionLossArguments) -> Tensor | int:
    """How many tokens count; on a GPU, where they depend on the lengths, a tensor: the host does not wait for it."""
    if loss.padding is None:
        return loss.target.shape[:-1].numel()
    tokens = (~loss.padding).sum()
    if tokens.device.type == "cpu" and not is_transformed(tokens) and not tokens:
        raise InputError(f"target must hold at least one token that counts, got shape {tuple(loss.target.shape)}")
    return tokens


def _contiguous(loss: Loss) -> Loss:
    return replace(
        loss,
        reconstructions=[depth.contiguous() for depth in loss.reconstructions],
        target=loss.target.contiguous(),
        padding=None if loss.padding is None else loss.padding.contiguous(),
    )
