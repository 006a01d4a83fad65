"""Products of matrices by the fastest way that torch has: in wider sums, by convolutions, in parts."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

from cdt_fast.ops.common import budget

# Bytes of a float32 product of narrower factors that is computed before it is added to a sum.
PRODUCT_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


def cpu_has_bf16_products() -> bool:
    """Return whether the processor has instructions that multiply bfloat16 matrices."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return `left right`, `[B, n, m]` from `[B, n, k]` and `[B, k, m]`, in `dtype`, which is at least theirs, without
    rounding to theirs in between. On a GPU tensor cores multiply narrow factors as they are."""
    if left.device.type != "cpu" and left.dtype != dtype:
        return torch.bmm(left, right, out_dtype=dtype, **({} if out is None else {"out": out}))
    return torch.bmm(left.to(dtype), right.to(dtype), out=out)


# Multiplications and width from which a convolution takes half of the time where MKL is slow, and bytes of what oneDNN
# reorders up to which it does.
LEAST_CONVOLVED, NARROWEST_CONVOLVED, LARGEST_CONVOLVED = 2**23, 32, 16 * 2**20


@functools.cache
def _mkl_is_slow() -> bool:
    """Return whether torch's float32 products run at half of the processor's peak: MKL's on AMD's AVX-512."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    processor = Path("/proc/cpuinfo")
    amd = processor.exists() and "AuthenticAMD" in processor.read_text()
    return amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_convolved(factor: Tensor) -> bool:
    """Return whether products of many rows are faster by oneDNN, as a convolution of single pixels, than by MKL."""
    return factor.dtype == torch.float32 and factor.device.type == "cpu" and _mkl_is_slow()


def convolves(left: Tensor, right: Tensor, reordered: int | None = None) -> bool:
    """Return whether a convolution is the faster way to `left right`, or `leftᵀ right`; oneDNN puts so many numbers
    (those of `right`) into an order of its own."""
    numbers = right.numel() if reordered is None else reordered
    enough = left.numel() * right.shape[1] > LEAST_CONVOLVED and 4 * numbers <= LARGEST_CONVOLVED
    return enough and is_convolved(left) and min(*left.shape, *right.shape) >= NARROWEST_CONVOLVED


def _as_pixels(rows: Tensor) -> Tensor:
    """View `[rows, width]` as an image of one line, `[1, width, 1, rows]`, channels last."""
    return rows.view(1, 1, *rows.shape).permute(0, 3, 1, 2)


def product_of_rows(
    rows: Tensor, matrix: Tensor, added: Tensor | None = None, alpha: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Return `rows matrix`, or `added + α rows matrix`, `[rows, m]` from `[rows, n]` and `[n, m]`; where it helps, in
    `out`, which may be `added`."""
    if not convolves(rows, matrix) or not rows.is_contiguous():
        if added is None:
            return torch.mm(rows, matrix, out=out)
        return torch.addmm(added, rows, matrix, alpha=alpha, out=out)
    if matrix.is_contiguous() and len(rows) < max(matrix.shape):
        product = torch.conv2d(matrix[None, :, None], rows[..., None, None])[0, :, 0]
    else:
        pixels = torch.conv2d(_as_pixels(rows), matrix.mT.contiguous()[..., None, None])
        product = pixels.permute(0, 2, 3, 1).reshape(rows.shape[0], matrix.shape[1])
    return product if added is None else torch.add(added, product, alpha=alpha, out=product)


def product_over_rows(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `leftᵀ right`, `[n, m]` from `[rows, n]` and `[rows, m]`, in `dtype`: the gradient of a weight, summed in
    at least float32 and, where cuBLAS can, written in float32 without rounding to 16 bits in between."""
    if left.device.type != "cpu" and left.element_size() == 2 and dtype == torch.float32:
        return torch.mm(left.mT, right, out_dtype=dtype)
    if len(left) < right.shape[1] and convolves(left, right):
        return product_of_rows(left.mT.contiguous(), right).to(dtype)
    shape = left.shape[1], right.shape[1], 1, 1
    if convolves(left, right, shape[0] * shape[1]) and left.is_contiguous() and right.is_contiguous():
        return conv2d_weight(_as_pixels(right), shape, _as_pixels(left))[..., 0, 0].to(dtype)
    return torch.mm(left.mT, right).to(dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor, overwrite: bool = False) -> None:
    """Do `total += leftᵀ right`, `[n, m]` from `[rows, n]` and `[rows, m]`; a total of at least their dtype. With
    `overwrite` whatever stands in the total, NaN too, does not count."""
    if not total.is_contiguous():  # columns first
        total, left, right = total.mT, right, left
    wider: dict[str, Any] = {} if total.dtype == right.dtype else {"out_dtype": total.dtype}
    convolved = convolves(left, right, min(total.numel(), right.numel()))
    if not convolved and (not wider or _adds_in_float32(right.device, right.dtype)):
        torch.addmm(total, left.mT, right, beta=0 if overwrite else 1, out=total, **wider)
        return
    parts = -(-total.nbytes // budget(PRODUCT_BYTES, right))
    size = max(1, -(-len(total) // max(1, parts)))
    # A CPU has no product of narrow factors with a float32 result: there it is rounded once.
    dtype = right.dtype if right.device.type == "cpu" else total.dtype
    for part, columns in zip(total.split(size), left.split(size, 1), strict=True):
        product = product_over_rows(columns, right, dtype)
        part.copy_(product) if overwrite else part.add_(product)


@functools.cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch adds a product of narrow factors to a float32 sum in one call: tried once."""
    if device.type != "cuda":
        return device.type == "meta"
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones.mT, ones, alpha=0.5, out=total, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 9.0).all())
