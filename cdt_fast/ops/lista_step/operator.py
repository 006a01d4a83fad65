"""`lista_step` as an operator with a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import ListaStepArguments, ListaStepBackwardArguments, ResidualLinearArguments
from cdt_fast.kernels.blocks import WIDEST
from cdt_fast.ops.lista_step.plain import backward_in_torch, forward_in_torch
from cdt_fast.ops.lista_step.reference import lista_step_reference
from cdt_fast.ops.shared.products import product_over_rows
from cdt_fast.ops.shared.registration import Operator, by_formula, save, saved


def _forward(lista: ListaStepArguments) -> tuple[Tensor, Tensor]:
    """The next codes `[rows, m]` and the residual `[rows, n]`, or `[0, n]` where it is not kept."""
    lista = replace(lista, dictionary=lista.dictionary.to(lista.codes.dtype))
    next_codes, residual = (_forward_on_triton if lista.backend == "triton" else forward_in_torch)(lista)
    return next_codes, residual if lista.keep_residual else residual.new_empty((0, residual.shape[1]))


def _forward_on_triton(lista: ListaStepArguments) -> tuple[Tensor, Tensor]:
    """One kernel where a residual fits a block, else cuBLAS for the residual and a kernel for what follows."""
    if lista.signal.shape[1] <= WIDEST:
        from cdt_fast.kernels.lista_step import lista_step_forward

        return lista_step_forward(lista)
    from cdt_fast.kernels.residual_linear import residual_linear_forward

    residual = torch.addmm(lista.signal, lista.codes, lista.dictionary.mT, alpha=-1)
    update = ResidualLinearArguments(
        x=residual,
        weight=lista.dictionary,
        residual=lista.codes,
        alpha=lista.step,
        threshold=lista.threshold,
        nonlinearity=lista.nonlinearity,
    )
    return residual_linear_forward(update), residual


def _forward_fake(lista: ListaStepArguments) -> tuple[Tensor, Tensor]:
    codes, (rows, width) = lista.codes, lista.signal.shape
    return codes.new_empty(codes.shape), codes.new_empty((rows if lista.keep_residual else 0, width))


def _backward(lista: ListaStepBackwardArguments) -> list[Tensor]:
    """The gradients that are needed, of the codes, of the signal and of the dictionary."""
    dictionary, atoms = lista.dictionary, lista.dictionary.to(lista.output.dtype)
    lista = replace(lista, dictionary=atoms)
    grad_codes = grad_dictionary = None
    fused = lista.backend == "triton" and atoms.shape[0] <= WIDEST
    if fused:
        from cdt_fast.kernels.lista_step import lista_step_backward

        grad_codes, grad_residual, grad_update = lista_step_backward(lista)
    else:
        grad_residual, grad_update = backward_in_torch(lista)
    if lista.needs_dictionary:
        assert lista.codes is not None
        assert lista.residual is not None
        # dD = step · Rᵀ dU − dRᵀ H, each product in float32 where the card can write it.
        wide = torch.promote_types(dictionary.dtype, torch.float32)
        grad_dictionary = product_over_rows(lista.residual, grad_update, wide).mul_(lista.step)
        grad_dictionary.sub_(product_over_rows(grad_residual, lista.codes, wide))
    if lista.needs_codes and not fused:
        # In place of dU: on a CPU a fresh tensor of that size can cost as much as the product.
        grad_codes = grad_update.addmm_(grad_residual, atoms, alpha=-1)
    gradients = (grad_codes, grad_residual, None if grad_dictionary is None else grad_dictionary.to(dictionary.dtype))
    needs = (lista.needs_codes, lista.needs_signal, lista.needs_dictionary)
    return [gradient for gradient, need in zip(gradients, needs, strict=True) if need and gradient is not None]


def _backward_fake(lista: ListaStepBackwardArguments) -> list[Tensor]:
    output, dictionary = lista.output, lista.dictionary
    return [
        *([output.new_empty(output.shape)] if lista.needs_codes else []),
        *([output.new_empty((output.shape[0], dictionary.shape[0]))] if lista.needs_signal else []),
        *([dictionary.new_empty(dictionary.shape)] if lista.needs_dictionary else []),
    ]


def _setup_context(ctx: Any, lista: ListaStepArguments, outputs: tuple[Tensor, Tensor]) -> None:
    next_codes, residual = outputs
    ctx.mark_non_differentiable(residual)
    # The codes before and the residual are kept for the dictionary's gradient alone; the mask is `next codes ≠ 0`.
    keeps = lista.keep_residual
    save(
        ctx,
        output=next_codes,
        dictionary=lista.dictionary,
        codes=lista.codes if keeps else None,
        residual=residual if keeps else None,
        step=lista.step,
        nonlinearity=lista.nonlinearity,
        needs_codes=ctx.needs["codes"],
        needs_signal=ctx.needs["signal"],
        needs_dictionary=keeps,
        backend=lista.backend,
    )


def _autograd(ctx: Any, grad_next_codes: Tensor, _: None) -> list[Tensor]:
    return lista_step_backward(ListaStepBackwardArguments(grad_output=grad_next_codes, **saved(ctx)))


def _formula(lista: ListaStepArguments) -> tuple[Tensor, Tensor]:
    codes, signal = lista.codes, lista.signal
    options = {"step": lista.step, "threshold": lista.threshold, "nonlinearity": lista.nonlinearity}
    next_codes = by_formula(lista_step_reference, codes, signal, lista.dictionary, **options)
    return next_codes, signal.new_empty((0, signal.shape[1]))


lista_step_forward = Operator(
    "lista_step", ListaStepArguments, "(Tensor, Tensor)", _forward, _forward_fake, _setup_context, _autograd, _formula
)
lista_step_backward = Operator("lista_step_backward", ListaStepBackwardArguments, "Tensor[]", _backward, _backward_fake)
