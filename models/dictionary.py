"""Dictionaries: the cosines that training starts from, and the spectral norm that sets the step."""

import itertools
import math
import operator

import torch
from torch import Tensor

from cdt_fast.checks import InputError


def overcomplete_dct(patch_size: int, code_size: int) -> Tensor:
    """Return the overcomplete discrete cosine dictionary `[n pixels, m atoms]` in float64, atoms of unit norm.

    For square patches (`n = p²`) it is separable: products of the cosines `cos(π i k / K)`, `k < K`, along both axes,
    with the mean taken off all but the constant one, as in K-SVD. Where m is no square, the m atoms of lowest frequency
    of the next larger square are kept. Other patch sizes get the same cosines along their single axis.
    """
    side = math.isqrt(patch_size)
    if side * side != patch_size:
        return _cosines(patch_size, code_size)
    frequencies = math.isqrt(code_size - 1) + 1
    axis = _cosines(side, frequencies)
    atoms = torch.einsum("ik,jl->ijkl", axis, axis).reshape(patch_size, -1)
    order = torch.arange(frequencies)
    radius = (order[:, None].square() + order.square()).flatten()
    kept = torch.argsort(radius, stable=True)[:code_size].sort().values
    return atoms[:, kept].contiguous()


def tight_cosines(patch_size: int, code_size: int, frames: int = 1) -> Tensor:
    """Return the cosine dictionary `[patch_size, code_size]` in float64 with `D Dᵀ = I` on what its atoms span.

    Patches are `frames` squares of side p, `patch_size = frames p²`. The atoms are products of one orthonormal DCT-II
    along time, rows and columns. Up to `code_size = patch_size` they are orthonormal: all of them, or those of lowest
    frequency. Beyond, each axis has the first rows of the DCT-II of K points, K at least the axis' length, and
    `code_size` is the product of the three K: a Parseval frame. InputError: a patch is not so many squares, or no three
    axes give so many atoms.
    """
    side = math.isqrt(patch_size // frames)
    if frames * side * side != patch_size:
        raise InputError(f"patch_size must be patch_frames squares, {frames} p², got {patch_size}")
    lengths = (frames, side, side)
    counts = _frequencies(lengths, max(code_size, patch_size))
    if counts is None:
        below = next(m for m in range(code_size, patch_size - 1, -1) if _frequencies(lengths, m))
        above = next(m for m in itertools.count(code_size) if _frequencies(lengths, m))
        raise InputError(
            f"code_size must be at most the {patch_size} pixels of a patch, or a product of three numbers of at least "
            f"{frames}, {side} and {side}: the nearest are {below} and {above}; got {code_size}"
        )
    volume = torch.ones(1, 1, dtype=torch.float64)
    for length, points in zip(lengths, counts, strict=True):
        volume = torch.kron(volume, cosine_transform(points)[:, :length].mT.contiguous())
    grid = torch.cartesian_prod(*(torch.arange(points) / points for points in counts))
    kept = torch.argsort(grid.square().sum(1), stable=True)[:code_size].sort().values
    return volume[:, kept].contiguous()


def cosine_transform(size: int) -> Tensor:
    """Return the orthonormal DCT-II `[size, size]` in float64, a frequency a row."""
    position = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi * (position + 0.5) * position.unsqueeze(1) / size) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def _frequencies(lengths: tuple[int, int, int], atoms: int) -> tuple[int, int, int] | None:
    """Return the points of the DCT along each axis, at least its length, of product `atoms`: the most even growth."""
    small = [number for number in range(1, math.isqrt(atoms) + 1) if atoms % number == 0]
    divisors = sorted({*small, *(atoms // number for number in small)})
    pairs = itertools.product(divisors, divisors)
    triples = [(times, rows, atoms // (times * rows)) for times, rows in pairs if atoms % (times * rows) == 0]
    found = [points for points in triples if all(map(operator.ge, points, lengths))]

    def growth(points: tuple[int, int, int]) -> tuple[float, int]:
        return max(number / length for number, length in zip(points, lengths, strict=True)), abs(points[1] - points[2])

    return min(found, key=growth, default=None)


def _cosines(size: int, frequencies: int) -> Tensor:
    position = torch.arange(size, dtype=torch.float64).unsqueeze(1)
    atoms = torch.cos(math.pi * position * torch.arange(frequencies, dtype=torch.float64) / frequencies)
    atoms[:, 1:] -= atoms[:, 1:].mean(0)
    return atoms / torch.linalg.vector_norm(atoms, dim=0).clamp(min=torch.finfo(atoms.dtype).tiny)


def squared_spectral_norm(dictionary: Tensor) -> Tensor:
    """Return `‖D‖₂²` of each dictionary `[..., n, m]`, in float64: the largest eigenvalue of its Gram matrix."""
    # Power iteration would come from below, and a step from too small a norm is no descent step.
    dictionary = dictionary.detach().to(torch.float64)
    gram = dictionary @ dictionary.mT if dictionary.shape[-2] <= dictionary.shape[-1] else dictionary.mT @ dictionary
    return torch.linalg.eigvalsh(gram)[..., -1]
