"""Products over rows, whichever library computes them: against float64, at the sizes where the library changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdt_fast.ops.shared import products
from cdt_fast.ops.shared.products import LARGE_PRODUCT, LONGEST_SUM, product

EPSILON = torch.finfo(torch.float32).eps


def operands(rows: int, terms: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + terms + columns)
    left = torch.randn(rows, terms, generator=generator)
    right = torch.randn(terms, columns, generator=generator)
    return left.to(dtype), right.to(dtype), torch.randn(rows, columns, generator=generator).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


@pytest.mark.parametrize("terms", [256, LONGEST_SUM - 1, LONGEST_SUM, LONGEST_SUM + 1, 4 * LONGEST_SUM + 3])
@pytest.mark.parametrize("plus", [False, True])
def test_large_products_are_as_exact_as_torchs(terms: int, plus: bool) -> None:
    left, right, added = operands(rows=512, terms=terms, columns=384)
    assert 2 * left.numel() * right.shape[1] >= LARGE_PRODUCT
    expected = left.double() @ right.double() + (added.double() if plus else 0.0)
    torchs = torch.addmm(added, left, right) if plus else left @ right
    found = product(left, right, added if plus else None)
    assert error(found, expected) <= 1.5 * error(torchs, expected) + EPSILON


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_the_library_is_chosen_by_size_dtype_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = operands(512, 256, 384), operands(16, 256, 384)
    chosen = products._suits_onednn
    assert chosen(large[0], large[1])
    assert not chosen(small[0], small[1])
    assert not chosen(large[0].bfloat16(), large[1].bfloat16())
    assert not chosen(large[0].to("meta"), large[1].to("meta"))
    with torch.backends.mkldnn.flags(enabled=False):
        assert not chosen(large[0], large[1])
        assert torch.equal(product(*large), torch.addmm(large[2], large[0], large[1]))


@pytest.mark.parametrize("layout", ["columns first", "every second row", "repeated row"])
def test_any_strides(layout: str) -> None:
    left, right, added = operands(512, 256, 384)
    if layout == "columns first":
        left, right, added = left.mT.contiguous().mT, right.mT.contiguous().mT, added.mT.contiguous().mT
    elif layout == "every second row":
        left, right, added = (torch.stack([given, given + 1], 1).flatten(0, 1)[::2] for given in (left, right, added))
    else:
        left = left[:1].expand(512, -1)
    expected = left.double() @ right.double() + added.double()
    torchs = torch.addmm(added, left, right)
    assert error(product(left, right, added), expected) <= 1.5 * error(torchs, expected) + EPSILON


class Noted(TorchDispatchMode):
    """Notes the matrices that oneDNN is given."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "mkldnn":
            self.matrices.append(args[2] if "binary" in str(function) else args[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("terms", [256, 2 * LONGEST_SUM + 3])
@pytest.mark.parametrize("layout", ["rows first", "columns first", "some of the columns"])
def test_onednn_gets_layouts_that_it_has_loops_for(layout: str, terms: int) -> None:
    left, right, added = operands(512, terms, 384)
    if layout == "columns first":
        right = right.mT.contiguous().mT
    elif layout == "some of the columns":
        right = torch.cat([right, right], 1)[:, :384]
    with Noted() as noted:
        product(left, right, added)
    assert len(noted.matrices) == -(-terms // LONGEST_SUM)
    assert all(matrix.is_contiguous() or matrix.mT.is_contiguous() for matrix in noted.matrices)


def test_repeats_are_bitwise_equal_and_nothing_is_written_to() -> None:
    given = operands(512, LONGEST_SUM + 256, 384)
    before = [tensor.clone() for tensor in given]
    first = product(*given)
    assert torch.equal(first, product(*given))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))


@pytest.mark.parametrize("shape", [(0, 256, 384), (512, 0, 384), (512, 256, 0), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_empty_and_single(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    left, right, added = operands(*shape, dtype)
    torch.testing.assert_close(product(left, right, added), added + left @ right)


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
