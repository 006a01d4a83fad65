"""The LISTA half-step in plain torch, and the gradients of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import ListaStepArguments, ListaStepBackwardArguments
from cdt_fast.ops.soft_threshold.plain import shrink_, shrink_backward


def forward_in_torch(lista: ListaStepArguments) -> tuple[Tensor, Tensor]:
    """The next codes `[rows, m]` and the residual `[rows, n]`; all of one dtype."""
    residual = torch.addmm(lista.signal, lista.codes, lista.dictionary.mT, alpha=-1)
    next_codes = torch.addmm(lista.codes, residual, lista.dictionary, alpha=lista.step)
    return shrink_(next_codes, lista.threshold, lista.nonlinearity), residual


def backward_in_torch(lista: ListaStepBackwardArguments) -> tuple[Tensor, Tensor]:
    """The gradient of the residual, which is that of the signal, and of the update before φ."""
    grad_update = shrink_backward(lista.grad_output, lista.output, lista.nonlinearity)
    return torch.mm(grad_update, lista.dictionary.mT).mul_(lista.step), grad_update
