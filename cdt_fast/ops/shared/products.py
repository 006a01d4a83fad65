"""Matrix products over rows of tokens, with sums in at least float32."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Bytes of a float32 product of narrower factors that is computed before it is added to a sum.
PRODUCT_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


def cpu_has_bf16_products() -> bool:
    """Whether the processor multiplies bfloat16 matrices with instructions of its own."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def rows_of(tokens: Tensor) -> Tensor:
    """`[..., width]` → `[rows, width]`, also where the width is 0 (and `reshape(-1, 0)` is ambiguous)."""
    return tokens.reshape(tokens.shape[:-1].numel(), tokens.shape[-1])


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """`left right`, `[B, n, m]` from `[B, n, k]` and `[B, k, m]`, in `dtype`, which is at least theirs, and not rounded
    to theirs in between. On a GPU tensor cores multiply narrow factors as they are."""
    if left.dtype == dtype or left.device.type == "cpu":
        return torch.bmm(left.to(dtype), right.to(dtype), out=out)
    return torch.bmm(left, right, out_dtype=dtype) if out is None else torch.bmm(left, right, out_dtype=dtype, out=out)


def product_over_rows(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`leftᵀ right`, `[n, m]` from `[rows, n]` and `[rows, m]`, in `dtype`: the gradient of a weight.

    Summed in at least float32; where cuBLAS can, it is also written in float32, and not rounded to 16 bits in between.
    """
    if left.device.type != "cpu" and left.element_size() == 2 and dtype == torch.float32:
        return torch.mm(left.mT, right, out_dtype=dtype)
    return torch.mm(left.mT, right).to(dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """`total += factor · leftᵀ right`, `[n, m]` from `[rows, n]` and `[rows, m]`; a total of at least float32."""
    if total.dtype == right.dtype or _adds_in_float32(right.device, right.dtype):
        wider: dict[str, Any] = {} if total.dtype == right.dtype else {"out_dtype": total.dtype}
        torch.addmm(total, left.mT, right, alpha=factor, out=total, **wider)
        return
    size = max(1, budget(PRODUCT_BYTES, right) // max(1, right.shape[1] * total.dtype.itemsize))
    for part, columns in zip(total.split(size), left.split(size, 1), strict=True):
        # A CPU has no product of narrow factors with a float32 result: there it is rounded once.
        on_cpu = right.device.type == "cpu"
        found = torch.mm(columns.mT, right) if on_cpu else torch.mm(columns.mT, right, out_dtype=total.dtype)
        part.add_(found, alpha=factor)


@functools.cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds a product of narrow factors to a float32 sum in one call, in its place: tried once."""
    if device.type != "cuda":
        return device.type == "meta"
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones.mT, ones, alpha=0.5, out=total, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 9.0).all())


def budget(of_bytes: Mapping[str, int], tensor: Tensor) -> int:
    """The bytes for the device of the tensor, of those for "cpu" and "cuda"."""
    return of_bytes["cpu" if tensor.device.type == "cpu" else "cuda"]
