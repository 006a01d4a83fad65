"""Whether derivatives other than autograd's are computed: forward mode, and the transforms of torch.func.

An operator of ours has a gradient alone. What asks for more is computed by the op's formula, or refused by its name.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad


@torch.compiler.assume_constant_result  # torch.compile guards both by itself
def inside_transform() -> bool:
    """Whether a transform of torch.func or a level of forward mode is open."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_transformed(tensor: Tensor) -> bool:
    """Whether the tensor takes part in one: it is an argument of a transform or follows from one, or has a tangent."""
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
