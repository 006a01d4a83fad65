"""Shrinkage (docs/ops.md §4)."""

import torch
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.ops import common


def soft_threshold(x: Tensor, threshold: float | Tensor) -> Tensor:
    """Shrinkage `S_θ(x) = sign(x) · max(|x| − θ, 0)`, the proximal operator of `θ‖x‖₁`.

    Args:
        x: a floating-point tensor of any shape and strides.
        threshold: θ ≥ 0, a number, or a tensor that broadcasts against `x` (its gradient is computed too; its sign is
            not checked, which would wait for the device).

    Returns:
        A tensor of the shape and dtype of `x`. NaN stays NaN. The gradient is 1 where |x| > θ and 0 elsewhere, but 1
        everywhere for θ = 0, where S_θ is the identity.

    InputError: `x` is not floating point, or `threshold` is negative, not finite, does not broadcast or is elsewhere.
    """
    common.check_tensor("x", x, 0, "of any shape")
    if not isinstance(threshold, Tensor):
        threshold = common.check_factor("threshold", threshold, non_negative=True, dtype=x.dtype)
        # By torch's own kernel: one of ours could fuse nothing. For a threshold of 0 it has gradient 0 at x = 0, not 1.
        return torch.nn.functional.softshrink(x, common.held(threshold, x.dtype)) if threshold else x.clone()
    common.check_tensor("threshold", threshold, 0, "or a number")
    if x.dim() < threshold.dim() or any(
        size not in (1, expected)
        for size, expected in zip(threshold.shape, x.shape[x.dim() - threshold.dim() :], strict=True)
    ):
        raise InputError(f"threshold must broadcast against x {tuple(x.shape)}, got {tuple(threshold.shape)}")
    threshold = threshold.to(x.dtype)
    if threshold.dim():  # a number may be on the CPU
        common.check_together(x=x, threshold=threshold)
    return soft_threshold_reference(x, threshold)


def soft_threshold_reference(x: Tensor, threshold: float | Tensor) -> Tensor:
    """The formula of `soft_threshold`, in any dtype, differentiated by torch."""
    return common.shrink_reference(x, threshold, "soft_threshold")
