"""What tests of kernels share: a bound on the error, no looser than plain torch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.ops.common import dot_precision


def assert_as_precise(name: str, given: Tensor, plain: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """The error of `given` against float64 is at most 1.5 times that of `plain`, plus a floor of eps times the size.

    `given` and `plain` have one dtype; both the root mean square and the maximum of the errors have to hold. Where the
    result is a difference of larger `terms`, eps times their size is allowed beside it.
    """
    assert given.dtype == plain.dtype
    assert given.shape == plain.shape == exact.shape, f"{name}: {tuple(given.shape)} for {tuple(exact.shape)}"
    if not given.numel():
        return
    assert torch.isfinite(given).all(), f"{name} is not finite"
    # TF32 has ten bits behind the first.
    epsilon = 2.0**-10 if dot_precision(given.dtype) == "tf32" else torch.finfo(given.dtype).eps
    mine, torchs = (tensor.cpu().double() - exact for tensor in (given, plain))
    for measure in (lambda error: error.square().mean().sqrt().item(), lambda error: error.abs().max().item()):
        bound = 1.5 * measure(torchs) + epsilon * (measure(exact) + (0.0 if terms is None else measure(terms)))
        assert measure(mine) <= bound, f"{name}: error {measure(mine):.3g}, torch's {measure(torchs):.3g}"
