"""Products that are added to a sum of at least float32, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cdt_fast.ops.shared import products

EPSILON = torch.finfo(torch.float32).eps


def operands(rows: int, terms: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + terms + columns)
    left = torch.randn(rows, terms, generator=generator)
    right = torch.randn(terms, columns, generator=generator)
    return left.to(dtype), right.to(dtype), torch.randn(rows, columns, generator=generator).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_product_is_added_to_a_sum_of_at_least_float32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setitem(products.PRODUCT_BYTES, "cpu", 100 * 384 * 4)  # several parts
    left, _, right = operands(512, 256, 384, dtype)
    total = torch.randn(
        256, 384, generator=torch.Generator().manual_seed(1), dtype=torch.promote_types(dtype, torch.float32)
    )
    expected = total.double() - 0.5 * (left.double().mT @ right.double())
    rounded = (total.double() - 0.5 * (left.mT @ right).double()).to(total.dtype)
    products.add_product(total, left, right, -0.5)
    assert error(total, expected) <= 1.5 * error(rounded, expected) + EPSILON


@pytest.mark.parametrize(("behaves", "expected"), [("adds", True), ("rounds", False), ("refuses", False)])
def test_whether_torch_adds_in_float32_is_tried(monkeypatch: pytest.MonkeyPatch, behaves: str, expected: bool) -> None:
    def addmm(total: Tensor, left: Tensor, right: Tensor, *, alpha: float, out: Tensor, out_dtype: torch.dtype) -> None:
        if behaves == "refuses":
            raise RuntimeError("no such kernel")
        out.copy_((left.float() @ right.float()).mul(alpha).add(total if behaves == "adds" else 0.0))

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype=None, device=None: ones(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "addmm", addmm)
    assert products._adds_in_float32.__wrapped__(torch.device("cuda"), torch.bfloat16) == expected
