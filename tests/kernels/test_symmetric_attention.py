"""The launchers of symmetric attention against the formula in float64: sizes, flags, blocks, extremes, repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cdt_fast.kernels import blocks as tables
from cdt_fast.kernels import cards
from cdt_fast.kernels.blocks import LONGEST, Blocks
from cdt_fast.kernels.cards import card_of
from cdt_fast.kernels.symmetric_attention_streaming import row_dots
from tests.kernels.kernel_cases import (
    LENGTHS,
    MARGINS,
    NAMES,
    RUNS,
    SOME,
    Inputs,
    Shape,
    assert_is_the_formula,
    formula,
    normal,
    poisoned,
    run_packed,
    run_streaming,
    same,
)
from tests.kernels.precision import assert_as_precise

# Sizes and flags

WIDTHS = ((1, 35), (15, 17), (16, 16), (17, 15), (35, 1))
PACKED_SHAPES = [
    # One token a sequence, in a part of a tile and in several; then 5, 3, 2 and 1 sequences a tile, the last in part.
    *(Shape(sequences, 1, 17) for sequences in (1, 15, 16, 17, 35)),
    *(Shape(*size, 17, 20) for size in ((13, 3), (7, 5), (5, 7), (3, 8), (2, 15), (1, 16), (3, 16))),
    *(Shape(3, 7, width, values) for width, values in WIDTHS),
    *(Shape(4, 7, width) for width, _ in WIDTHS),
]
STREAMING_SHAPES = [
    *(Shape(3, tokens, 17) for tokens in (1, 15, 16, 17, 35)),
    *(Shape(2, tokens, 16, 18) for tokens in (15, 16, 17, 35)),
    *(Shape(2, 19, width, values) for width, values in WIDTHS),
    *(Shape(2, 19, width) for width, _ in WIDTHS),
]
EVERY = [
    *(("packed", shape) for shape in PACKED_SHAPES),
    *(("streaming", shape) for shape in STREAMING_SHAPES),
]


@pytest.mark.parametrize(("kernel", "shape"), EVERY)
def test_sizes(kernel: str, shape: Shape, device: torch.device) -> None:
    inputs = Inputs.of(shape, device, torch.float32)
    assert_is_the_formula(RUNS[kernel](inputs), inputs)


@pytest.mark.parametrize(
    ("scale", "energy", "lengths"),
    [(1.0, False, None), (0.3, False, LENGTHS), (-0.5, True, None), (0.0, False, None), (0.6, True, LENGTHS)],
)
@pytest.mark.parametrize(("kernel", "shape"), SOME)
def test_flags(
    kernel: str, shape: Shape, lengths: Any, energy: bool, scale: float, device: torch.device, dtype: torch.dtype
) -> None:
    inputs = Inputs.of(shape, device, dtype, MARGINS[1], lengths=lengths, energy=energy, scale=scale)
    assert_is_the_formula(RUNS[kernel](inputs), inputs)


@pytest.mark.emulated
@pytest.mark.parametrize(("rows", "keys"), [(16, 32), (32, 16)])
@pytest.mark.parametrize("tokens", [15, 33, 67])
def test_blocks_that_are_no_squares(rows: int, keys: int, tokens: int, device: torch.device) -> None:
    inputs = Inputs.of(Shape(1, tokens, 20, 18), device, torch.float32, energy=True)
    blocks = Blocks(rows=rows, keys=keys, warps=4, stages=2)
    assert_is_the_formula(run_streaming(inputs, blocks, blocks), inputs)


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize(("needs_z", "needs_values"), [(True, False), (False, True)])
@pytest.mark.parametrize("kernel", RUNS)
def test_only_the_gradients_that_are_needed(
    kernel: str, needs_z: bool, needs_values: bool, energy: bool, device: torch.device
) -> None:
    inputs = Inputs.of(Shape(3, 7 if kernel == "packed" else 19, 17, 20), device, torch.float32, energy=energy)
    given = RUNS[kernel](inputs, needs_z=needs_z, needs_values=needs_values)
    assert_is_the_formula(given, inputs, missing=(2,) if needs_values else (3,))


@pytest.mark.parametrize("kind", [torch.int64, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("kernel", RUNS)
def test_lengths_of_every_integer_dtype(kernel: str, kind: torch.dtype, device: torch.device) -> None:
    # Too long and too short by so much that 32 bits do not hold it, or that a sign would.
    lengths = torch.tensor([3, 0, 17, 1, 2**32 + 1 if kind == torch.int64 else torch.iinfo(kind).max], dtype=kind)
    if kind != torch.uint8:
        lengths[1] = 2 - 2**32 if kind == torch.int64 else -3
    shape = Shape(5, 7 if kernel == "packed" else 19, 17)
    results = [RUNS[kernel](Inputs.of(shape, device, torch.float32, lengths=given)) for given in (lengths, LENGTHS)]
    for given, expected in zip(*results, strict=True):
        assert (given is None) == (expected is None)
        assert given is None or expected is None or same(given, expected)


@pytest.mark.parametrize(("kernel", "shape"), SOME)
def test_repeats_are_bitwise_equal(kernel: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    inputs = Inputs.of(shape, device, dtype, lengths=LENGTHS, energy=True)
    first, second = RUNS[kernel](inputs), RUNS[kernel](inputs)
    for one, other in zip(first, second, strict=True):
        assert one is None or other is None or same(one, other)


# The block tables


DTYPES = {"16 bits": torch.float16, "ieee": torch.float32, "tf32": torch.float32}


def distinct(rows: list[Any]) -> list[Any]:
    return list(dict.fromkeys(rows))


def families(device: torch.device) -> list[str]:
    """Every one in the interpreter, on a GPU its own alone."""
    return [*tables.FAMILIES] if cards.interpreting() else [card_of(torch.empty(0, device=device)).family]


@pytest.mark.parametrize("mode", ["16 bits", "ieee"])
def test_every_block_that_packs(mode: str, device: torch.device) -> None:
    both = (tables.SYMMETRIC_ATTENTION_PACKED, tables.SYMMETRIC_ATTENTION_PACKED_BACKWARD)
    rows = [row for table in both for family in families(device) for row in table.choices(family, mode)]
    for tokens, blocks in distinct(rows):
        for count in distinct([tokens, 20]):
            shape = Shape(blocks.rows // count + 1, count, 40, 2 * blocks.columns + 3)
            inputs = Inputs.of(shape, device, DTYPES[mode], energy=True)
            assert_is_the_formula(run_packed(inputs, blocks), inputs)


@pytest.mark.parametrize("mode", ["16 bits", "ieee"])
def test_every_block_that_streams(mode: str, device: torch.device) -> None:
    both = (tables.SYMMETRIC_ATTENTION_STREAMING, tables.SYMMETRIC_ATTENTION_STREAMING_BACKWARD)
    rows = []
    for choices in [[table.choices(family, mode) for table in both] for family in families(device)]:
        for width in sorted({width for choice in choices for width, _ in choice}):
            rows.append((width, *(next(blocks for most, blocks in one if width <= most) for one in choices)))
    for width, *blocks in distinct(rows):
        tokens = max(size for one in blocks for size in (one.rows, one.keys)) + 3
        inputs = Inputs.of(Shape(1, tokens, width), device, DTYPES[mode])
        assert_is_the_formula(run_streaming(inputs, *blocks), inputs)


def test_every_table_holds_the_longest_and_the_widest() -> None:
    for family in tables.FAMILIES:
        for mode in tables.MODES:
            for table in (tables.SYMMETRIC_ATTENTION_PACKED, tables.SYMMETRIC_ATTENTION_PACKED_BACKWARD):
                assert table.choices(family, mode)[-1][0] == LONGEST
            for table in (tables.SYMMETRIC_ATTENTION_STREAMING, tables.SYMMETRIC_ATTENTION_STREAMING_BACKWARD):
                assert table.choices(family, mode)[-1][0] == tables.WIDEST


@pytest.mark.emulated
def test_the_default_blocks(device: torch.device, dtype: torch.dtype) -> None:
    for tokens in (20, LONGEST):
        inputs = Inputs.of(Shape(4, tokens, 30), device, dtype)
        assert_is_the_formula(run_packed(inputs, None), inputs)
    inputs = Inputs.of(Shape(1, LONGEST + 1, 30, 70), device, dtype)
    assert_is_the_formula(run_streaming(inputs, None, None), inputs)
    with pytest.raises(ValueError, match=f"up to {LONGEST}, got {LONGEST + 1}"):
        run_packed(inputs, None)
    with pytest.raises(ValueError, match="up to 256, got 257"):
        run_streaming(Inputs.of(Shape(1, 17, 257), device, dtype), None, None)


# Extremes


def extreme(shape: Shape, logit: float, device: torch.device, dtype: torch.dtype, **given: Any) -> Inputs:
    """Tokens of one norm, whose product with themselves is `logit`."""
    inputs = Inputs.of(shape, device, dtype, **given)
    inputs.z.copy_(logit**0.5 * torch.nn.functional.normalize(inputs.z.double(), dim=-1))
    return inputs


@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize(("kernel", "shape"), SOME)
def test_logits_of_ten_thousand(
    kernel: str, shape: Shape, energy: bool, scale: float, device: torch.device, dtype: torch.dtype
) -> None:
    inputs = extreme(shape, 1e4, device, dtype, energy=energy, scale=scale)
    assert_is_the_formula(RUNS[kernel](inputs), inputs)


@pytest.mark.parametrize(("logit", "scale"), [(4.0, 1.0), (1e4, -1.0)])
@pytest.mark.parametrize(("kernel", "shape"), SOME)
def test_tokens_that_are_all_equal(
    kernel: str, shape: Shape, logit: float, scale: float, device: torch.device, dtype: torch.dtype
) -> None:
    # With every logit at −1e4 that of the zeros behind the end is far above the log-sum-exp.
    inputs = extreme(shape, logit, device, dtype, lengths=LENGTHS, scale=scale)
    inputs.z.copy_(inputs.z[0, 0].expand_as(inputs.z))
    assert_is_the_formula(RUNS[kernel](inputs), inputs)


@pytest.mark.parametrize(("kernel", "shape"), SOME)
def test_gradients_of_tokens_that_are_much_alike(
    kernel: str, shape: Shape, device: torch.device, dtype: torch.dtype
) -> None:
    # A still scene: what tells its tokens apart is a hundredth of their size, and so is what the gradient is made of.
    inputs = Inputs.of(shape._replace(width=64), device, dtype)
    if dtype == torch.float32:
        pytest.skip("keeps no remainder")
    still = torch.rand(shape.sequences, 1, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs.z.copy_(2 * still + 0.03 * normal(4, shape.sequences, shape.tokens, 64))
    if inputs.values is not None:
        inputs.values.copy_(2 + 0.03 * inputs.values.double())
    exact = formula(inputs, torch.float64)
    for name, given, true in zip(NAMES[2:], RUNS[kernel](inputs)[2:], exact[2:], strict=True):
        if true is not None:
            assert given is not None
            # Weights, gradient of the scores and result are rounded, each by half an epsilon.
            error = (given.cpu().double() - true).norm() / true.norm()
            assert error <= 2 * torch.finfo(dtype).eps, name


# The sums of products of rows


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 1000])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 256, 5000])
def test_row_dots(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    if rows * width > 300_000:
        pytest.skip("says nothing that smaller ones do not")
    sizes = (1.0, 1.0, 2**-9)  # a remainder is small
    left, right, more = (
        poisoned((size * normal(seed, rows, width)).to(device, dtype)) for seed, size in enumerate(sizes)
    )
    for remainder in (None, more):
        whole = right.cpu().double() if remainder is None else right.cpu().double() + remainder.cpu().double()
        products = left.cpu().double() * whole
        plain = (left.cpu().float() * whole.float()).sum(-1)
        dots = row_dots(left, right, remainder).cpu()
        assert_as_precise("dots", dots, plain, products.sum(-1), terms=products.abs().sum(-1))


def test_row_dots_of_many_dimensions_and_of_none(device: torch.device) -> None:
    left, right = normal(1, 2, 3, 4).float().to(device), normal(2, 2, 3, 4).float().to(device)
    assert torch.allclose(row_dots(left, right), (left * right).sum(-1), atol=1e-6)
    assert row_dots(left[:0], right[:0]).shape == (0, 3)
    assert torch.equal(row_dots(left[..., :0], right[..., :0]), left.new_zeros(2, 3))
