"""For `layerwise_cross_entropy` alone, until it is two files as the other ops are."""

from cdt_fast.ops.common import (
    _inside_transform,
    _is_transformed,
    check_flag,
    check_shape,
    check_tensor,
    check_together,
    compute_dtype,
    describe,
    in_autocast,
    without_autocast,
)

inside_transform, is_transformed = _inside_transform, _is_transformed
__all__ = [
    "check_flag",
    "check_shape",
    "check_tensor",
    "check_together",
    "compute_dtype",
    "describe",
    "in_autocast",
    "inside_transform",
    "is_transformed",
    "without_autocast",
]
