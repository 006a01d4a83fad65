"""A case of the ahead-of-time compilation: one call of one launcher, in one precision."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import torch

from cdt_fast.kernels.cards import GpuSpec
from cdt_fast.kernels.launch import Launch, recording


class Precision(NamedTuple):
    """A dtype of the tensors, and whether products of float32 tiles may use TF32."""

    dtype: torch.dtype
    tf32: bool


PRECISIONS = {
    "bfloat16": Precision(torch.bfloat16, False),
    "float16": Precision(torch.float16, False),
    "float32, TF32": Precision(torch.float32, True),
    "float32, IEEE": Precision(torch.float32, False),
}


@dataclass(frozen=True)
class Case:
    """One call of one launcher.

    Attributes:
        name: what sets it apart in its family.
        call: calls the launcher, and returns what it returns.
        is_size: whether it stands for a size of the tensors; else it is about a flag.
        aligned: whether sixteen divides the sizes. Where it does not, loads are narrow and registers may spill.
    """

    name: str
    call: Callable[[], Any]
    is_size: bool = False
    aligned: bool = True

    @classmethod
    def of(
        cls,
        name: str,
        launcher: Callable[..., Any],
        given: Mapping[str, Any],
        is_size: bool = False,
        width: int = 16,
        **more: Any,
    ) -> Case:
        """`called` with these; `width` is a size that sixteen may not divide."""
        return cls(name, functools.partial(called, launcher, given, **more), is_size, width % 16 == 0)

    def launches(self, precision: Precision, card: GpuSpec, divisible: bool = True) -> list[Launch]:
        """The launches that the call makes on the card; not `divisible`, of views that start anywhere."""
        with float32_products(precision.tf32), recording(card, aligned=divisible) as launches:
            self.call()
        return launches


def called(launcher: Callable[..., Any], given: Mapping[str, Any], **more: Any) -> Any:
    """What a launcher returns for what is given, as a record of the class that it takes first, and for what is more."""
    return launcher(next(iter(get_type_hints(launcher).values()))(**given), **more)


@contextlib.contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Let products of float32 tiles use TF32, or not, through the setting that `dot_precision` reads."""
    settings = torch.backends.cuda.matmul
    # torch 2.9 has a setting of its own for it, and refuses the older one once that one has been set.
    name = "fp32_precision" if hasattr(settings, "fp32_precision") else "allow_tf32"
    before = getattr(settings, name)
    setattr(settings, name, tf32 if name == "allow_tf32" else "tf32" if tf32 else "ieee")
    try:
        yield
    finally:
        setattr(settings, name, before)
