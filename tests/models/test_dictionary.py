"""The overcomplete DCT, and the spectral norm that sets the step."""

from __future__ import annotations

import math

import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.models.dictionary import overcomplete_dct, squared_spectral_norm, tight_cosines


@pytest.mark.parametrize("patch_size", [2, 4, 9, 10, 256])
@pytest.mark.parametrize("code_size", [1, 2, 5, 16, 30, 500])
def test_atoms_have_unit_norm_and_all_but_the_first_along_each_axis_no_mean(patch_size: int, code_size: int) -> None:
    atoms = overcomplete_dct(patch_size, code_size)
    assert atoms.shape == (patch_size, code_size)
    assert atoms.dtype == torch.float64
    assert atoms.is_contiguous()
    assert (torch.linalg.vector_norm(atoms, dim=0) - 1).abs().max() < 1e-12
    assert (atoms[:, 0] - 1 / math.sqrt(patch_size)).abs().max() < 1e-12
    if code_size > 1:
        assert atoms[:, 1:].sum(0).abs().max() < 1e-10


def test_square_patches_get_products_of_cosines_along_both_axes() -> None:
    side, frequencies = 8, 16
    atoms = overcomplete_dct(side * side, frequencies**2)
    positions = torch.arange(side, dtype=torch.float64)
    for vertical, horizontal in ((0, 0), (3, 0), (0, 7), (5, 11), (15, 15)):
        picture = torch.ones(side, side, dtype=torch.float64)
        for frequency, shape in ((vertical, (side, 1)), (horizontal, (1, side))):
            cosine = torch.cos(math.pi * positions * frequency / frequencies)
            cosine = cosine - (cosine.mean() if frequency else 0.0)
            picture = picture * (cosine / cosine.norm()).reshape(shape)
        given = atoms[:, vertical * frequencies + horizontal].reshape(side, side)
        assert (given - picture).abs().max() < 1e-12
    lowest = [number for number in range(16) if number not in (11, 14, 15)]  # without (2, 3), (3, 2) and (3, 3)
    assert torch.equal(overcomplete_dct(16, 13), overcomplete_dct(16, 16)[:, lowest])


@pytest.mark.parametrize("frames", [1, 2, 4, 8])
@pytest.mark.parametrize("patch", [1, 3, 4, 8])
@pytest.mark.parametrize("atoms", [0.1, 0.5, 1, 2, 4])
def test_tight_cosines_are_a_frame_of_what_they_span(patch: int, frames: int, atoms: float) -> None:
    pixels = frames * patch**2
    size = max(1, int(atoms * pixels))
    dictionary = tight_cosines(pixels, size, frames)
    assert dictionary.shape == (pixels, size)
    assert dictionary.dtype == torch.float64
    projection = dictionary @ dictionary.mT
    torch.testing.assert_close(projection @ dictionary, dictionary, rtol=0, atol=1e-12)
    assert torch.linalg.matrix_rank(dictionary) == min(pixels, size)
    assert (dictionary[:, 0] - dictionary[0, 0]).abs().max() < 1e-12  # the mean is an atom


def test_tight_cosines_of_odd_numbers_are_refused_with_two_that_work() -> None:
    with pytest.raises(InputError, match="the nearest are 735134398 and 735134400; got 735134399"):
        tight_cosines(4, 735_134_399)  # beside a number of 1,344 divisors
    with pytest.raises(InputError, match="the nearest are 48 and 54; got 50"):
        tight_cosines(36, 50, 4)
    for size in (48, 54):
        dictionary = tight_cosines(36, size, 4)
        torch.testing.assert_close(dictionary @ dictionary.mT, torch.eye(36).double(), rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="squares"):
        tight_cosines(35, 35, 4)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 4), (2, 5, 3, 4)])
def test_squared_spectral_norm_against_the_singular_values(shape: tuple[int, ...]) -> None:
    dictionary = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    given = squared_spectral_norm(dictionary)
    assert given.dtype == torch.float64
    assert not given.requires_grad
    expected = torch.linalg.matrix_norm(dictionary.detach().double(), 2).square()
    assert given.shape == expected.shape
    assert ((given - expected).abs() < 1e-12 * expected).all()
