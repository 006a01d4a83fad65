"""What the custom ops share beyond torch.library."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.library import CustomOpDef

from cdt_fast.errors import InputError


def once_differentiable(backward: CustomOpDef, op: str) -> None:
    """Have a second derivative through `backward`, the gradient of the public `op`, end in an error that says so.

    torch's own error would ask the user to register a formula.
    """

    def refuse(ctx: Any, *grad_outputs: Any) -> NoReturn:
        raise InputError(f"{op} can be differentiated once; for a second derivative use its reference formula")

    backward.register_autograd(refuse)
