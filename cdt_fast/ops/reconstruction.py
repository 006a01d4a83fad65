"""The reconstruction loss at every depth (MATH: section 5): `ℓ_l = mean over tokens of ‖s − x̂_l‖²`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.ops.checks import check_shape, check_tensor, describe, padding_mask, without_padding


def layerwise_reconstruction_loss(
    reconstructions: Sequence[Tensor],
    target: Tensor,
    *,
    layer_weights: Tensor | Sequence[float] | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Squared error of every depth, summed over the width and averaged over the tokens, and their weighted sum.

    The errors are formed and summed in at least float32, whatever the dtype of the reconstructions.

    Args:
        reconstructions: L+1 tensors x̂_l, each `[..., n]`, depth 0 first. They are never stacked.
        target: s, `[..., n]`.
        layer_weights: `w`, L+1 numbers (negative and zero are welcome; a depth with weight 0 gets no gradient).
        lengths: for `[..., T, n]`: `[...]` integers, the number of tokens that count in each sequence.

    Returns:
        `(total, per_layer)`. `per_layer` is `[L+1]`, in units of the squared signal summed over the width. With
        weights: `total = Σ_l w_l ℓ_l` is differentiable and `per_layer` is detached. Without: `per_layer` is
        differentiable and `total` is its plain sum.

    Raises:
        InputError: no reconstruction, no token that counts, or a wrong shape, dtype, device or number of weights.
    """
    _check(reconstructions, target, rank=1 if lengths is None else 2)
    weights = _weights(layer_weights, len(reconstructions))
    padding = padding_mask(lengths, target)
    tokens: Tensor | int = target.shape[:-1].numel() if padding is None else (~padding).sum()
    if (isinstance(tokens, int) or tokens.device.type == "cpu") and not tokens:
        raise InputError(f"target must hold at least one token that counts, got shape {tuple(target.shape)}")
    target = without_padding(target, padding)

    def loss(reconstruction: Tensor) -> Tensor:
        wide = torch.promote_types(reconstruction.dtype, torch.float32)
        reconstruction = without_padding(reconstruction, padding).to(wide)
        return torch.nn.functional.mse_loss(reconstruction, target.to(wide), reduction="sum") / tokens

    if weights is None:
        per_layer = torch.stack([loss(reconstruction) for reconstruction in reconstructions])
        return per_layer.sum(), per_layer
    # On the CPU a depth with weight 0 is read without being differentiated, so that its backward costs nothing. On a
    # GPU to look at the weights would mean to wait for it.
    skipped = (weights == 0).tolist() if weights.device.type == "cpu" else [False] * len(weights)
    per_layer = torch.stack(
        [loss(depth.detach() if skip else depth) for depth, skip in zip(reconstructions, skipped, strict=True)]
    )
    return (weights.to(per_layer) * per_layer).sum(), per_layer.detach()


def layerwise_reconstruction_loss_reference(reconstructions: Sequence[Tensor], target: Tensor) -> Tensor:
    """The formula of the per-depth losses `[L+1]`, in any dtype, differentiated by torch."""
    return torch.stack([(target - reconstruction).square().sum(-1).mean() for reconstruction in reconstructions])


def _check(reconstructions: Sequence[Tensor], target: Tensor, rank: int) -> None:
    check_tensor("target", target, rank, "[..., n]" if rank == 1 else "[..., T, n]")
    if not isinstance(reconstructions, Sequence) or not reconstructions:
        raise InputError(f"reconstructions must be a list of one tensor a depth, got {describe(reconstructions)}")
    for depth, reconstruction in enumerate(reconstructions):
        name = f"reconstructions[{depth}]"
        check_tensor(name, reconstruction, 1, "[..., n]")
        check_shape(name, reconstruction, tuple(target.shape), "as target")
        if reconstruction.device != target.device:
            raise InputError(f"{name} is on {reconstruction.device} but target is on {target.device}")


def _weights(layer_weights: Tensor | Sequence[float] | None, depths: int) -> Tensor | None:
    if layer_weights is None:
        return None
    try:
        # Numbers in float64: `as_tensor` would round a list of them to float32.
        dtype = layer_weights.dtype if isinstance(layer_weights, Tensor) else torch.float64
        weights = torch.as_tensor(layer_weights, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"layer_weights must be {depths} numbers, got {describe(layer_weights)}") from error
    check_shape("layer_weights", weights, (depths,), "one weight a depth")
    return weights
