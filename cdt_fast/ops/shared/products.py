"""Matrix products over rows of tokens, each by the library that is fastest at it."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this many FLOP a call of oneDNN's costs more than its faster loops save.
LARGE_PRODUCT = 2**25
# Terms that oneDNN may add up one after the other: of more the rounding would exceed MKL's by half and an epsilon.
LONGEST_SUM = 1024


def cpu_has_bf16_products() -> bool:
    """Whether the processor multiplies bfloat16 matrices with instructions of its own."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def rows_of(tokens: Tensor) -> Tensor:
    """`[..., width]` → `[rows, width]`, also where the width is 0 (and `reshape(-1, 0)` is ambiguous)."""
    return tokens.reshape(tokens.shape[:-1].numel(), tokens.shape[-1])


def product(rows: Tensor, matrix: Tensor, added: Tensor | None = None) -> Tensor:
    """`rows matrix`, or `rows matrix + added`, `[rows, m]` from `[rows, n]` and `[n, m]`; all of one dtype.

    Not differentiable: for the inside of custom ops. On a CPU torch gives float32 products to MKL, which on some
    processors is 10 to 40 % slower than oneDNN where there are many more rows than columns.
    """
    if not _suits_onednn(rows, matrix):
        return torch.mm(rows, matrix) if added is None else torch.addmm(added, rows, matrix)
    onednn = torch.ops.mkldnn._linear_pointwise
    for part, factor in zip(rows.split(LONGEST_SUM, 1), matrix.mT.split(LONGEST_SUM, 1), strict=True):
        # For any other strides, those of some of the columns too, its loops take a thousand times as long.
        factor = factor if factor.mT.is_contiguous() else factor.contiguous()
        if added is None:
            added = onednn(part, factor, None, "none", [], "")
        else:
            added = onednn.binary(part, added, factor, None, "add")
    assert added is not None  # a large product has terms
    return added


def _suits_onednn(rows: Tensor, matrix: Tensor) -> bool:
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and 2 * rows.numel() * matrix.shape[-1] >= LARGE_PRODUCT
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # what torch's compiler calls, and no public name
    )


def product_over_rows(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`leftᵀ right`, `[n, m]` from `[rows, n]` and `[rows, m]`, in `dtype`: the gradient of a weight.

    Summed in at least float32; where cuBLAS can, it is also written in float32, and not rounded to 16 bits in between.
    """
    if left.device.type != "cpu" and left.element_size() == 2 and dtype == torch.float32:
        return torch.mm(left.mT, right, out_dtype=dtype)
    return torch.mm(left.mT, right).to(dtype)
