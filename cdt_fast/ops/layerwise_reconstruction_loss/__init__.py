"""The reconstruction loss at every depth (docs/maths.md §7): `ℓ_l = mean over tokens of ‖s − x̂_l‖²`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import Tensor

from cdt_fast.checks import check_choice
from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import ReconstructionLossArguments, Reduction
from cdt_fast.ops.layerwise_reconstruction_loss.operator import layerwise_reconstruction_loss_forward
from cdt_fast.ops.layerwise_reconstruction_loss.reference import layerwise_reconstruction_loss_reference
from cdt_fast.ops.shared.backend import choose_backend
from cdt_fast.ops.shared.checks import check_lengths, check_tensor, padding_mask
from cdt_fast.ops.shared.depths import check_depths, detach_zero_weighted, weights_of_depths

__all__ = ["layerwise_reconstruction_loss", "layerwise_reconstruction_loss_reference"]


def layerwise_reconstruction_loss(
    reconstructions: Sequence[Tensor],
    target: Tensor,
    *,
    depth_weights: Tensor | Sequence[float] | None = None,
    lengths: Tensor | None = None,
    reduction: Reduction = "mean",
) -> tuple[Tensor, Tensor]:
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
    loss = ReconstructionLossArguments(
        reconstructions=detach_zero_weighted(reconstructions, weights),
        target=target,
        padding=padding_mask(lengths, target),
        # The tensors may differ in dtype: all of them have to be one that the kernel can load.
        backend=choose_backend("layerwise_reconstruction_loss", *reconstructions, target),
        reduction=check_choice("reduction", reduction, get_args(Reduction)),
    )
    per_layer = layerwise_reconstruction_loss_forward(loss)
    if weights is None:
        return per_layer.sum() if len(per_layer) > 1 else per_layer.squeeze(0), per_layer
    weights = weights.to(per_layer.device, per_layer.dtype, non_blocking=True)
    return (weights * per_layer).sum(), per_layer.detach()
