"""Dictionaries: the cosines that training starts from, and the spectral norm that sets the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cdt_fast.errors import InputError


def overcomplete_dct(patch_size: int, code_size: int) -> Tensor:
    """The overcomplete discrete cosine dictionary `[patch_size, code_size]` in float64, atoms of unit norm.

    For square patches (`patch_size = p²`) it is separable: products of the cosines `cos(π i k / K)`, `k < K`, along
    both axes, with the mean taken off all but the constant one, as in K-SVD. Where `code_size` is no square, the
    `code_size` atoms of lowest frequency of the next larger square are kept. Other patch sizes get the same cosines
    along their single axis.

    Args:
        patch_size: n, the number of pixels of a patch.
        code_size: m, the number of atoms.
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


def cosine_volumes(patch_size: int, code_size: int, frames: int) -> Tensor:
    """The cosine dictionary `[patch_size, code_size]` in float64 of patches of several frames, atoms of unit norm.

    Patches are `frames` squares of side p, `patch_size = frames p²`. The atoms are the products of
    `cos(π (i + ½) k / K)` over time, rows and columns; K is the axis' own length where `code_size = patch_size`, which
    is the orthonormal DCT-II, and longer in proportion where there are more atoms. Of more products than `code_size`
    those of lowest frequency are kept.

    Args:
        patch_size: n, the number of pixels of a patch.
        code_size: m, the number of atoms.
        frames: of a patch.

    Raises:
        InputError: a patch is not so many squares.
    """
    side = math.isqrt(patch_size // frames)
    if frames * side * side != patch_size:
        raise InputError(f"patch_size must be patch_frames squares, {frames} p², got {patch_size}")
    growth = (code_size / patch_size) ** (1 / 3)
    counts = [max(1, math.ceil(length * growth - 1e-9)) for length in (frames, side, side)]
    while math.prod(counts) < code_size:
        counts = [count + 1 for count in counts]
    volume = torch.ones(1, 1, dtype=torch.float64)
    for length, count in zip((frames, side, side), counts, strict=True):
        phase = torch.arange(length, dtype=torch.float64).unsqueeze(1) + 0.5
        axis = torch.cos(math.pi * phase * torch.arange(count, dtype=torch.float64) / count)
        volume = torch.kron(volume, axis / torch.linalg.vector_norm(axis, dim=0))
    grid = torch.cartesian_prod(*(torch.arange(count) / count for count in counts))
    kept = torch.argsort(grid.square().sum(1), stable=True)[:code_size].sort().values
    return volume[:, kept].contiguous()


def _cosines(size: int, frequencies: int) -> Tensor:
    position = torch.arange(size, dtype=torch.float64).unsqueeze(1)
    atoms = torch.cos(math.pi * position * torch.arange(frequencies, dtype=torch.float64) / frequencies)
    atoms[:, 1:] -= atoms[:, 1:].mean(0)
    return atoms / torch.linalg.vector_norm(atoms, dim=0).clamp(min=torch.finfo(atoms.dtype).tiny)


def squared_spectral_norm(dictionary: Tensor) -> Tensor:
    """`‖D‖₂²` of each dictionary `[..., n, m]`, in float64.

    It is the largest eigenvalue of the smaller Gram matrix. Power iteration would come from below, and a step from
    too small a norm is no descent step.
    """
    dictionary = dictionary.detach().to(torch.float64)
    gram = dictionary @ dictionary.mT if dictionary.shape[-2] <= dictionary.shape[-1] else dictionary.mT @ dictionary
    return torch.linalg.eigvalsh(gram)[..., -1]
