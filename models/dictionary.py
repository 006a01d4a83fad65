"""Dictionaries: the overcomplete DCT that training starts from, and the spectral norm that sets the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
