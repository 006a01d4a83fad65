"""The launchers of the denoising layer against its formula, differentiated by torch in float64: tokens that are much
alike, shares of blocks, and what is not needed. `test_battery.py` has the op."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.kernels import denoising_layer as kernels
from cdt_fast.kernels._common import programs_of
from cdt_fast.ops import common, operators
from cdt_fast.ops.denoising_layer import _formula
from tests.ops.battery import between_nan, generator, normal

NAMES = ("Y", "v", "dW", "dE", "dD", "dt", "d(δ, κ)", "dβ", "df")
F32 = 32 * 2.0**-23  # of energies, which are sums of n large terms
# Sequences, tokens, width, atoms: alone, several in a tile, more atoms than a chunk and one that is not full, one tile.
SIZES = ((9, 1, 256, 256), (29, 4, 64, 100), (31, 5, 256, 512), (5, 8, 72, 256), (3, 64, 64, 72))
QUICK = ((1, 1, 64, 100), (5, 8, 72, 104))


def drawn(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Signal, features, dictionary, thresholds and parameters, and gradients of Y and v; between NaN.

    The tokens of a sequence are much alike, so that it shows if what is rounded does not cancel.
    """
    sequences, tokens, width, atoms = sizes
    alike = 24 if dtype == torch.float32 else 192  # of which energies are thousands, rounded more than the rest is
    tensors = [
        normal(1, sequences, tokens, width) + normal(2, sequences, 1, width),
        (3 * normal(3, sequences, tokens, width) + alike * normal(4, sequences, 1, width)) / width**0.5,
        normal(5, width, atoms) / width**0.5,
        0.5 + 1.5 * normal(6, atoms).abs(),
        torch.tensor([0.05, 0.5]) + torch.tensor([0.04, 1.0]) * normal(10, sequences, 2).abs(),
        torch.tensor([0.7, 3.0]),
        normal(7, sequences, tokens, width),
        normal(8, sequences, tokens),
    ]
    dtypes = *[dtype] * 3, *[torch.float32] * 3, dtype, torch.float32
    return [between_nan(tensor.to(device, each), 8) for tensor, each in zip(tensors, dtypes, strict=True)]


def blocks_of(table: Any, tensor: Tensor) -> dict[str, Any]:
    """The blocks of the card; in float32, of which no card holds these tiles, those of the interpreter's."""
    if tensor.element_size() == 2:
        return common.blocks_for(table, tensor)
    if not common.interpreting():
        pytest.skip("tiles of float32 leave no shared memory for the dictionary")
    return {**table["consumer"], "PRECISION": "ieee"}


def results(tensors: Sequence[Tensor], upstream: Sequence[Tensor], kept: Sequence[bool]) -> list[Tensor]:
    """Y, v and the gradients of all tensors, in float64, through those of Y and v that are kept."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    outputs = _formula(*leaves)
    gradients = torch.autograd.grad(operators.compress(outputs, kept), leaves, operators.compress(upstream, kept))
    *most, of_numbers, of_parameters = gradients
    return [*(one.detach() for one in outputs), *most, of_parameters, *of_numbers.unbind(1)]


def assert_is_its_formula(
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    given: str = "output and variance",
    needs_dictionary: bool = True,
    processors: int = 2,
) -> None:
    """An error is at most a rounding, and what the formulas change by when every number is off by one.

    Scores and attention are float32 where they are not factors, so features are off by a rounding of float32.
    """
    tensors = drawn(sizes, dtype, device)
    layer = tensors[:6]
    kept = [name in given for name in ("output", "variance")]
    upstream = [grad if keep else None for grad, keep in zip(tensors[6:], kept, strict=True)]
    options: Any = {"processors": processors, "blocks": blocks_of(kernels.BLOCKS, layer[0])}
    output, variance = kernels.forward(*layer, **options)
    options.update(blocks=blocks_of(kernels.BACKWARD_BLOCKS, layer[0]), needs_dictionary=needs_dictionary)
    dw, de, dt, dn, dp, dd = kernels.backward(*layer, *upstream, **options)
    assert {one.dtype for one in (output, dw, de)} == {dtype}
    assert {one.dtype for one in (variance, dt, dn, dp)} == {torch.float32}
    assert (dd is not None) == needs_dictionary

    exact = [tensor.cpu().double() for tensor in tensors]
    epsilon, seeds = max(torch.finfo(dtype).eps, F32), generator(9)
    of_inputs = [F32 if name == "features" else epsilon for name in inspect.signature(kernels.backward).parameters]
    signs = [[torch.randint(0, 2, one.shape, generator=seeds) * 2 - 1 for one in exact] for _ in range(2)]
    off = [[one * (1 + size * up) for one, size, up in zip(exact, of_inputs, ups, strict=False)] for ups in signs]
    true, *moved = (results(each[:6], each[6:], kept) for each in (exact, *off))
    for index, found in enumerate((output, variance, dw, de, dd, dt, dp, *dn.unbind(1))):
        if found is not None:
            assert found.shape == true[index].shape
            error, size = (found.cpu().double() - true[index]).norm(), true[index].norm()
            bound = epsilon * size + max((each[index] - true[index]).norm() for each in moved) + 1e-6
            assert error <= bound, f"{NAMES[index]}: off by {error:.2g}, at most {bound:.2g}, of {size:.2g}"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_is_its_formula_with_every_gradient(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
    assert_is_its_formula(sizes, dtype, device)


@pytest.mark.emulated
@pytest.mark.parametrize("sizes", QUICK, ids=str)
def test_with_the_blocks_of_the_card(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
    assert_is_its_formula(sizes, dtype, device, processors=1)


@pytest.mark.parametrize("needs_dictionary", [True, False])
@pytest.mark.parametrize("given", ["output", "variance", "output and variance"])
def test_what_is_not_needed(given: str, needs_dictionary: bool, device: torch.device, dtype: torch.dtype) -> None:
    assert_is_its_formula((29, 5, 64, 100), dtype, device, given, needs_dictionary)


def test_shares_are_uneven() -> None:
    """What the tests above rely on."""
    for sequences, tokens, *_ in SIZES[1:3]:
        assert sequences % programs_of(sequences, tokens, 2, kernels.BLOCKS["consumer"])


def test_thresholds_of_any_layout(device: torch.device, dtype: torch.dtype) -> None:
    """They come as they are where autocast narrows the rest."""
    if dtype == torch.float32:
        pytest.skip("has no kernel")
    signal, features, dictionary, thresholds, numbers, parameters, *_ = drawn((7, 4, 64, 96), torch.float32, device)
    scale, factor, own, sharpness = *numbers.unbind(1), *parameters.unbind()
    found = []
    for given in (thresholds, torch.stack((thresholds, -thresholds), 1)[:, 0]):
        leaf = given.detach().requires_grad_()
        with ops.use_backend("triton"), torch.autocast(device.type, dtype):
            options = {"scale": scale, "factor": factor, "self_bias": own, "sharpness": sharpness}
            tokens, variance = ops.denoising_layer(signal, features, dictionary, leaf, **options)
        found.append([tokens, variance, *torch.autograd.grad(tokens.sum() + variance.sum(), leaf)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
