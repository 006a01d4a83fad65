"""The kernels of the unrolled layer against the formula in float64: sizes, variants, padding, NaN, memory."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.kernels import blocks as tables
from cdt_fast.kernels.blocks import LONGEST, WIDEST
from cdt_fast.kernels.cards import CARDS, card_of
from cdt_fast.kernels.launch import recording
from tests.kernels.kernel_cases import same
from tests.kernels.unrolled_cases import (
    GRADIENTS,
    Inputs,
    Results,
    Shape,
    assert_backward_is_the_formula,
    assert_forward_is_the_formula,
    backward,
    backward_inputs,
    forward,
)

# Blocks of 32 rows, 16 atoms and 16 columns. Below half of the rows several sequences share a tile, and the last tile
# holds fewer of them; the widths n and k are padded to 16, 32 and 64.
SIZES = (1, 15, 16, 17, 35)
SHAPES = [
    *(Shape(5, tokens) for tokens in (1, 7, 15, 16, 17, 31, 32)),
    Shape(67, 1),
    Shape(1, 3),
    *(Shape(code_width=size) for size in SIZES),
    *(Shape(width=size) for size in SIZES),
    *(Shape(next_width=size) for size in SIZES),
    Shape(3, 20, 35, 35, 33),
    Shape(1, 1, 1, 1, 1),
]
LENGTHS = (3, 0, 7, 1, 99)
NONLINEARITIES = ("soft_threshold", "hard_threshold", "relu", "identity")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_sizes(shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    inputs = Inputs.of(shape, device, dtype)
    assert_forward_is_the_formula(inputs)
    assert_backward_is_the_formula(inputs)


@pytest.mark.parametrize("next_width", [None, 21])
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize("codes", [True, False])
def test_variants(
    codes: bool, nonlinearity: str, lengths: Any, target: bool, next_width: int | None, device: torch.device
) -> None:
    given = {"codes": codes, "target": target, "lengths": lengths, "nonlinearity": nonlinearity}
    inputs = Inputs.of(Shape(next_width=next_width), device, torch.float32, **given)
    next_codes = assert_forward_is_the_formula(inputs)["next codes"]
    assert next_codes is not None
    # What is zero without padding is so by the nonlinearity.
    assert (next_codes[2] == 0).any() == (nonlinearity != "identity")
    assert (next_codes[2] < 0).any() == (nonlinearity != "relu")
    assert_backward_is_the_formula(inputs)


ARRIVING = [
    {"grad_next_codes": codes, "grad_next_projection": projection, "grad_error": error}
    for codes, projection, error in itertools.product([True, False], repeat=3)
]


@pytest.mark.parametrize("arriving", ARRIVING, ids=lambda given: "-".join(n for n, there in given.items() if there))
@pytest.mark.parametrize("next_width", [None, 21])
def test_upstream_gradients_that_are_missing(
    next_width: int | None, arriving: dict[str, bool], device: torch.device
) -> None:
    inputs = Inputs.of(Shape(next_width=next_width), device, torch.float16, lengths=LENGTHS)
    inputs = dataclasses.replace(inputs, **{name: None for name, there in arriving.items() if not there})
    found = assert_backward_is_the_formula(inputs)
    if not arriving["grad_error"]:
        assert found["whole dZ+"] is inputs.grad_next_projection
        # Without a loss the next projection is not read.
        next_codes, _ = backward_inputs(inputs)
        assert_same(backward(inputs, next_codes, None), found)
    if not any(arriving.values()):
        assert all((found[name] == 0).all() for name in ("update", "signal", "projection", "codes"))


@pytest.mark.parametrize("wanted", [*itertools.product([True, False], repeat=3)])
@pytest.mark.parametrize("signal", [True, False])
def test_only_what_is_needed_is_written(signal: bool, wanted: tuple[bool, bool, bool], device: torch.device) -> None:
    names = {"residual": "needs_dictionary", "projection": "needs_projection", "codes": "needs_codes"}
    missing = tuple(name for name, needed in zip(names, wanted, strict=True) if not needed)
    needs: dict[str, Any] = dict(zip(names.values(), wanted, strict=True)) | {"needs_signal": signal}
    assert_backward_is_the_formula(Inputs.of(Shape(), device, torch.float32), missing=missing, **needs)


@pytest.mark.parametrize("family", tables.FAMILIES)
def test_the_blocks_of_the_tables(family: str, device: torch.device) -> None:
    if device.type == "cuda" and card_of(torch.empty(0, device=device)).family != family:
        pytest.skip("the blocks are too large for this card, or not those that it takes")
    inputs = Inputs.of(Shape(5, 20, 70, 40, 33), device, torch.float16, lengths=(20, 3, 0, 19, 20))
    for table in (tables.UNROLLED_LAYER, tables.UNROLLED_LAYER_LEAN):
        for _, blocks in table.choices(family, "16 bits"):
            assert_forward_is_the_formula(inputs, blocks)
    for table in (tables.UNROLLED_LAYER_BACKWARD, tables.UNROLLED_LAYER_BACKWARD_LEAN):
        ((_, blocks),) = table.choices(family, "16 bits")
        assert_backward_is_the_formula(inputs, blocks)


@pytest.mark.emulated
def test_the_longest_and_the_widest_with_the_blocks_of_this_card(device: torch.device) -> None:
    for codes in (True, False):
        inputs = Inputs.of(Shape(2, LONGEST, 40, WIDEST, WIDEST), device, torch.float16, codes=codes)
        assert_forward_is_the_formula(inputs, None)
        assert_backward_is_the_formula(inputs, None)


# Values


def everything(inputs: Inputs, following: tuple[Tensor, Tensor] | None = None) -> Results:
    """Forward and backward; the latter of next codes that do not change with what the test poisons."""
    found = forward(inputs)
    return found | backward(inputs, *(following or backward_inputs(inputs)))


def assert_same(given: Results, expected: Results, rows: Any = slice(None), names: Any = None) -> None:
    for name, mine in given.items():
        other = expected[name]
        if mine is not None and other is not None and (names is None or name in names):
            assert same(mine[rows], other[rows]), name


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(("target", "nonlinearity"), [(True, "soft_threshold"), (False, "identity"), (True, "relu")])
def test_whatever_stands_in_the_padding_reaches_nothing(
    target: bool, nonlinearity: str, poison: float, device: torch.device
) -> None:
    given = {"target": target, "lengths": LENGTHS, "nonlinearity": nonlinearity}
    inputs = Inputs.of(Shape(next_width=21), device, torch.float16, **given)
    following = backward_inputs(inputs)
    expected = everything(inputs, following)
    assert inputs.lengths is not None
    padding = torch.arange(7, device=device) >= inputs.lengths.unsqueeze(-1)
    for tensor in (*inputs.tokens().values(), *following):
        tensor[padding] = poison
    given = everything(inputs, following)
    handed_on = () if target else ("whole dZ+",)
    assert_same(given, expected, names=[name for name in given if name not in handed_on])
    for name, result in given.items():
        if name != "errors" and name not in handed_on and result is not None:
            assert (result[padding] == 0).all(), name
            assert torch.isfinite(result).all(), name


# What cannot stay finite in the sequence itself: in the poisoned token alone, or in all that attend to it.
TOKEN, SEQUENCE = slice(3, 4), slice(None)
REACHED: dict[str, dict[str, slice]] = {
    "codes": {"next projection": SEQUENCE, "projection": SEQUENCE},
    "signal": {"next codes": TOKEN, "next projection": TOKEN, "residual": TOKEN},
    "projection": dict.fromkeys(("next codes", "next projection", "residual", "projection", "codes"), SEQUENCE),
    "target": {"whole dZ+": TOKEN, "update": TOKEN, "signal": TOKEN, "projection": SEQUENCE, "codes": SEQUENCE},
    "grad_next_codes": {"update": TOKEN, "signal": TOKEN, "projection": SEQUENCE, "codes": SEQUENCE},
    "grad_next_projection": {
        "whole dZ+": TOKEN, "update": TOKEN, "signal": TOKEN, "projection": SEQUENCE, "codes": SEQUENCE
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("poison", "lengths"), [(float("nan"), None), (float("nan"), (7, 5, 7, 3, 7)), (float("inf"), None)]
)
@pytest.mark.parametrize("poisoned", REACHED)
def test_a_token_that_is_not_finite_stays_in_its_sequence_and_shows_there(
    poisoned: str, lengths: Any, poison: float, device: torch.device
) -> None:
    inputs = Inputs.of(Shape(), device, torch.float16, lengths=lengths, nonlinearity="identity")
    following = backward_inputs(inputs)
    expected = everything(inputs, following)
    # In the middle of the first tile, in one of the last atoms or columns.
    getattr(inputs, poisoned)[1, 3, -2] = poison
    given = everything(inputs, following)
    errors, clean = given.pop("errors"), expected.pop("errors")
    assert errors is not None
    assert clean is not None
    assert same(errors[1:], clean[1:])
    assert same(errors[:1], clean[:1]) == poisoned.startswith("grad_")
    assert_same(given, expected, [0, 2, 3, 4])
    others = [0, 1, 2, 4, 5, 6]
    for name, mine in given.items():
        right = expected[name]
        assert mine is not None
        assert right is not None
        reached = REACHED[poisoned].get(name)
        if (poisoned, name) == ("codes", "next codes"):
            continue  # they are finite and wrong: their projection says so
        if reached is None:
            assert same(mine[1], right[1]), name
            continue
        if reached is TOKEN:
            assert same(mine[1, others], right[1, others]), name
        bad = ~torch.isfinite(mine[1, reached][: None if lengths is None else lengths[1]]).all(-1)
        # An infinite score may weigh nothing elsewhere; a NaN is what comes of a NaN, in every row.
        assert bad.any() if poisoned == "projection" and poison == poison else bad.all(), name


@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "relu"])
def test_a_nan_is_not_made_zero_by_the_nonlinearity_nor_by_its_mask(nonlinearity: str, device: torch.device) -> None:
    inputs = Inputs.of(Shape(), device, torch.float32, nonlinearity=nonlinearity)
    next_codes, next_projection = backward_inputs(inputs)
    inputs.signal[1, 3] = float("nan")
    found = forward(inputs)["next codes"]
    assert found is not None
    assert torch.isnan(found[1, 3]).all()
    assert torch.isfinite(found[1, [0, 1, 2, 4, 5, 6]]).all()
    # Where a code is zero an upstream NaN is stopped, where it is NaN everything passes.
    next_codes[2, 3] = 0.0
    next_codes[4, 3] = float("nan")
    assert inputs.grad_next_codes is not None
    inputs.grad_next_codes[2, 3] = float("nan")
    update = backward(inputs, next_codes, next_projection)["update"]
    assert update is not None
    assert (update[2, 3] == 0).all()
    assert torch.isfinite(update).all()
    assert (update[4, 3] != 0).all()


def test_without_a_nonlinearity_a_code_of_zero_passes_its_gradient(device: torch.device) -> None:
    inputs = Inputs.of(Shape(), device, torch.float32, nonlinearity="identity")
    next_codes, next_projection = backward_inputs(inputs)
    expected = backward(inputs, next_codes, next_projection)
    next_codes[2, 3] = 0.0
    assert_same(backward(inputs, next_codes, next_projection), expected)


def test_a_loss_that_does_not_count_gives_no_gradient_where_it_is_infinite(
    device: torch.device, dtype: torch.dtype
) -> None:
    inputs = Inputs.of(Shape(), device, dtype)
    following = backward_inputs(inputs)
    expected = backward(dataclasses.replace(inputs, target=None, grad_error=None), *following)
    assert inputs.target is not None
    inputs.target[1, 2, 3] = float("inf")
    assert inputs.grad_error is not None
    inputs.grad_error.zero_()
    assert_same(backward(inputs, *following), expected)


def test_a_target_of_another_dtype(device: torch.device) -> None:
    inputs = Inputs.of(Shape(), device, torch.float16)
    following = backward_inputs(inputs)
    expected = everything(inputs, following)
    assert inputs.target is not None
    for wider in (torch.float32, torch.float64):
        assert_same(everything(dataclasses.replace(inputs, target=inputs.target.to(wider)), following), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("poisoned", ["signal", "projection", "grad_next_codes"])
def test_without_codes_what_is_not_finite_reaches_its_sequence_and_no_other(
    poisoned: str, poison: float, device: torch.device
) -> None:
    inputs = Inputs.of(Shape(), device, torch.float16, codes=False, nonlinearity="identity")
    following = backward_inputs(inputs)
    expected = everything(inputs, following)
    getattr(inputs, poisoned)[1, 3, -2] = poison
    given = everything(inputs, following)
    assert_same(given, expected, [0, 2, 3, 4], [name for name in given if name != "errors"])
    # The attention of an infinite score is NaN or on one token; a value that is not finite has a weight everywhere.
    reached = {"grad_next_codes": ("signal", "projection")}.get(poisoned, ("next codes", "next projection", "residual"))
    if poisoned == "signal" or poison != poison:
        assert all(not torch.isfinite(given[name][1]).all(-1).any() for name in reached)  # type: ignore[index]


def test_extreme_logits(device: torch.device) -> None:
    # All attention on the token with the largest score: A is a permutation of zeros and ones, or even.
    for factor in (0.0, 40.0):
        inputs = Inputs.of(Shape(), device, torch.float16)
        inputs.projection.mul_(factor)
        for result in everything(inputs).values():
            assert result is not None
            assert torch.isfinite(result).all()
        if factor == 0.0:
            assert_forward_is_the_formula(inputs)
            assert_backward_is_the_formula(inputs)


def test_products_sum_in_float32(device: torch.device) -> None:
    # 4096 and then a thousand times 1/16: float16 would stay at 4096, whose next neighbor is 4100.
    codes = torch.full((1, 1, 1024), 1 / 16, dtype=torch.float16, device=device)
    codes[..., 0] = 4096
    ones = torch.ones(1, 1024, dtype=torch.float16, device=device)
    zero = codes.new_zeros(1, 1, 1)
    inputs = Inputs(codes, zero, zero, ones, None, None, codes, None, None, step=1.0, nonlinearity="identity")
    assert forward(inputs)["next projection"] == 4160
    assert backward(inputs, codes, None)["signal"] == 4160
    # A loss as large as it is: float16 ends at 65504.
    inputs.target = zero
    assert forward(inputs)["errors"] == 4160**2


def test_repeats_are_bitwise_equal(device: torch.device, dtype: torch.dtype) -> None:
    inputs = Inputs.of(Shape(9, 7, 35, 33), device, dtype, lengths=(7, 0, 3) * 3)
    following = backward_inputs(inputs)
    first = everything(inputs, following)
    for _ in range(2):
        assert_same(everything(inputs, following), first)


@pytest.mark.parametrize("shape", [Shape(0, 7), Shape(3, 0)])
def test_empty(shape: Shape, device: torch.device) -> None:
    inputs = Inputs.of(shape, device, torch.float32)
    assert inputs.codes is not None
    found = forward(inputs) | backward(inputs, torch.empty_like(inputs.codes), torch.empty_like(inputs.signal))
    assert found["errors"] is not None
    assert found["errors"].sum() == 0
    assert all(found[name].shape[:2] == shape[:2] for name in ("next codes", "next projection", *GRADIENTS))  # type: ignore[union-attr]


def test_a_block_writes_its_own_rows_and_no_others(device: torch.device) -> None:
    # Two blocks that write the same row race on a GPU; one after the other the last is right, and hides it.
    inputs = Inputs.of(Shape(4, 15), device, torch.float32)
    following = backward_inputs(inputs)
    with recording(CARDS["RTX 3090"]) as launches:
        found = forward(inputs) | backward(inputs, *following)
    for launch in launches:
        dataclasses.replace(launch, grid=(1,)).run()
    for name, result in found.items():
        assert result is not None
        rows = result.reshape(-1, 1) if name == "errors" else result.reshape(60, -1)
        own = 1 if name == "errors" else 30  # a tile of two whole sequences; two of its 32 rows are idle
        assert torch.isnan(rows[own:]).all(), name
        assert torch.isfinite(rows[:own]).all(), name


@pytest.mark.parametrize(
    ("width", "next_width", "lengths"),
    [(17, 33, None), (17, 129, None), (256, 20, None), (256, None, None), (256, None, (64, 3))],
)
def test_the_blocks_take_the_row_of_the_card(
    width: int, next_width: int | None, lengths: tuple[int, int] | None, device: torch.device
) -> None:
    inputs = Inputs.of(Shape(2, 64, 40, width, next_width), device, torch.float16, lengths=lengths)
    # Of rows that start anywhere the forward takes the blocks that fit: tests/kernels_aot/test_aot.py.
    given = {name: tensor.clone() for name, tensor in vars(inputs).items() if isinstance(tensor, torch.Tensor)}
    inputs = dataclasses.replace(inputs, **given)
    assert inputs.codes is not None
    lean = next_width is None and lengths is None
    for card in CARDS.values():
        with recording(card) as launches:
            forward(inputs, None)
            backward(inputs, inputs.codes, inputs.signal, None)
        used = (
            tables.UNROLLED_LAYER_LEAN if lean else tables.UNROLLED_LAYER,
            tables.UNROLLED_LAYER_BACKWARD_LEAN if lean else tables.UNROLLED_LAYER_BACKWARD,
        )
        for launch, table in zip(launches, used, strict=True):
            choices = table.choices(card.family, "16 bits")
            expected = next(blocks for size, blocks in choices if max(width, next_width or 0) <= size)
            assert launch.blocks == expected
            assert (launch.constants["ROWS"], launch.constants["ATOMS"]) == (expected.rows, expected.atoms)
            assert expected.rows >= LONGEST
