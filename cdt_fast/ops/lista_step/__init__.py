"""The LISTA half-step: one gradient step on the dictionary's fit, then shrinkage (docs/maths.md §7)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import check_choice
from cdt_fast.ops.shared.backend import runs_on_triton
from cdt_fast.ops.shared.checks import check_factor, check_shape, check_tensor, check_together, compute_dtype
from cdt_fast.ops.shared.products import product, product_over_rows, rows_of
from cdt_fast.ops.shared.registration import once_differentiable
from cdt_fast.ops.soft_threshold import (
    NONLINEARITIES,
    effective_nonlinearity,
    shrink_,
    shrink_backward,
    shrink_reference,
)
from cdt_fast.ops.soft_threshold import shrink_backward_ as shrink_backward_


def lista_step(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    nonlinearity: str = "soft_threshold",
) -> Tensor:
    """One LISTA (or ISTA) step `S_θ(H + (1/c)(X − H Dᵀ) D)`.

    With `1/c ≤ 1/‖D‖₂²` and θ = λ₁/c it never raises `½‖X − H Dᵀ‖² + λ₁‖H‖₁`.

    Args:
        codes: H, `[..., m]`.
        signal: X, `[..., n]`, with the leading dimensions of `codes`. Up to n = 256 a kernel does the whole step.
        dictionary: D, `[n, m]`.
        step: 1/c ≥ 0.
        threshold: θ ≥ 0; "relu" does not use it.
        nonlinearity: "soft_threshold", or "relu" for `max(v, 0)` in its place.

    Returns:
        The next codes, `[..., m]`, in the dtype of the arguments (under autocast: autocast's dtype, to which the codes
        and the signal are rounded too; the gradient of the dictionary is still summed in its own).

    Raises:
        InputError: an argument has the wrong rank, shape, dtype, device or value, or a second derivative is asked for.
    """
    check_lista_arguments(codes, signal, dictionary, nonlinearity)
    step = check_factor("step", step, non_negative=True)
    threshold = check_factor("threshold", threshold, non_negative=True)
    dtype = compute_dtype(codes)
    next_codes, _ = _lista_step(
        rows_of(codes).to(dtype),
        rows_of(signal).to(dtype),
        dictionary,
        step,
        threshold,
        effective_nonlinearity(nonlinearity, threshold),
        dictionary.requires_grad and torch.is_grad_enabled(),
    )
    return next_codes.view(codes.shape)


def lista_step_reference(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    nonlinearity: str = "soft_threshold",
) -> Tensor:
    """The formula of `lista_step`, in any dtype, differentiated by torch."""
    return shrink_reference(codes + step * (signal - codes @ dictionary.mT) @ dictionary, threshold, nonlinearity)


def check_lista_arguments(codes: Tensor, signal: Tensor, dictionary: Tensor, nonlinearity: str, rank: int = 1) -> None:
    """The checks that `lista_step` and `unrolled_layer` share; `rank` is the least rank of codes and signal."""
    tokens = "[..., T, " if rank == 2 else "[..., "
    check_tensor("codes", codes, rank, f"{tokens}m]")
    check_tensor("signal", signal, rank, f"{tokens}n]")
    check_tensor("dictionary", dictionary, 2, "[n, m]")
    check_shape("dictionary", dictionary, (signal.shape[-1], codes.shape[-1]), "width of signal by width of codes")
    check_shape("signal", signal, (*codes.shape[:-1], signal.shape[-1]), "the tokens of codes by the signal's width")
    check_together(codes=codes, signal=signal, dictionary=dictionary)
    check_choice("nonlinearity", nonlinearity, NONLINEARITIES)


@torch.library.custom_op("cdt_fast::lista_step", mutates_args=())
def _lista_step(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    step: float,
    threshold: float,
    nonlinearity: str,
    keep_residual: bool,
) -> tuple[Tensor, Tensor]:
    """The next codes `[rows, m]` and the residual `[rows, n]`, which the dictionary's gradient needs; else `[0, n]`."""
    atoms = dictionary.to(codes.dtype)
    with torch.autocast(codes.device.type, enabled=False):
        if runs_on_triton("lista_step", codes, multiplies=True):
            next_codes, residual = _step_on_triton(codes, signal, atoms, step, threshold, nonlinearity, keep_residual)
        else:
            residual = torch.addmm(signal, codes, atoms.mT, alpha=-1)
            next_codes = shrink_(torch.addmm(codes, residual, atoms, alpha=step), threshold, nonlinearity)
    return next_codes, residual if keep_residual else residual.new_empty((0, residual.shape[1]))


def _step_on_triton(
    codes: Tensor,
    signal: Tensor,
    atoms: Tensor,
    step: float,
    threshold: float,
    nonlinearity: str,
    keep_residual: bool,
) -> tuple[Tensor, Tensor]:
    """One kernel where a residual fits a block, else cuBLAS for the residual and a kernel for what follows."""
    from cdt_fast.kernels import lista_step as lista
    from cdt_fast.kernels import residual_linear

    options: dict[str, Any] = {"nonlinearity": nonlinearity, "threshold": threshold}
    if atoms.shape[0] <= lista.WIDEST:
        return lista.lista_step(codes, signal, atoms, step=step, keep_residual=keep_residual, **options)
    residual = torch.addmm(signal, codes, atoms.mT, alpha=-1)
    return residual_linear.residual_linear(residual, atoms, codes, alpha=step, **options), residual


@_lista_step.register_fake
def _(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    step: float,
    threshold: float,
    nonlinearity: str,
    keep_residual: bool,
) -> tuple[Tensor, Tensor]:
    rows, width = signal.shape
    return codes.new_empty(codes.shape), codes.new_empty((rows if keep_residual else 0, width))


@torch.library.custom_op("cdt_fast::lista_step_backward", mutates_args=())
def _lista_step_backward(
    grad_output: Tensor,
    output: Tensor,
    dictionary: Tensor,
    codes: Tensor | None,
    residual: Tensor | None,
    step: float,
    nonlinearity: str,
    wants_codes: bool,
    wants_signal: bool,
) -> list[Tensor]:
    """The gradients of the codes, of the signal, and of the dictionary (where `codes` and `residual` are given)."""
    atoms = dictionary.to(output.dtype)
    gradients = []
    # A backward that is called inside autocast would have some of its products cast, and sums of two dtypes fail.
    with torch.autocast(output.device.type, enabled=False):
        grad_codes, grad_residual, grad_update = _grad_tokens(
            grad_output, output, atoms, step, nonlinearity, wants_codes, wants_dictionary=residual is not None
        )
        if codes is not None and residual is not None:
            # dD = step · Rᵀ dU − dRᵀ H, each product in float32 where the card can write it.
            wide = torch.promote_types(dictionary.dtype, torch.float32)
            grad_dictionary = product_over_rows(residual, grad_update, wide).mul_(step)
            gradients.append(grad_dictionary.sub_(product_over_rows(grad_residual, codes, wide)).to(dictionary.dtype))
        if wants_signal:
            gradients.insert(0, grad_residual)
        if wants_codes:
            if grad_codes is None:
                # In place of dU: on a CPU a fresh tensor of that size can cost as much as the product.
                grad_codes = grad_update.addmm_(grad_residual, atoms, alpha=-1)
            gradients.insert(0, grad_codes)
    return gradients


def _grad_tokens(
    grad_output: Tensor,
    output: Tensor,
    atoms: Tensor,
    step: float,
    nonlinearity: str,
    wants_codes: bool,
    wants_dictionary: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """dH, dR and dU. The kernel's dH and dU are empty where not wanted; torch's dH is None, still to do."""
    if runs_on_triton("lista_step", output, multiplies=True):
        from cdt_fast.kernels import lista_step as lista

        if atoms.shape[0] <= lista.WIDEST:
            return lista.lista_step_backward(
                grad_output,
                output,
                atoms,
                step=step,
                nonlinearity=nonlinearity,
                wants_codes=wants_codes,
                wants_update=wants_dictionary,
            )
    grad_update = shrink_backward(grad_output, output, nonlinearity)
    return None, product(grad_update, atoms.mT).mul_(step), grad_update


@_lista_step_backward.register_fake
def _(
    grad_output: Tensor,
    output: Tensor,
    dictionary: Tensor,
    codes: Tensor | None,
    residual: Tensor | None,
    step: float,
    nonlinearity: str,
    wants_codes: bool,
    wants_signal: bool,
) -> list[Tensor]:
    gradients = [output.new_empty(output.shape)] if wants_codes else []
    if wants_signal:
        gradients.append(output.new_empty((output.shape[0], dictionary.shape[0])))
    if residual is not None:
        gradients.append(dictionary.new_empty(dictionary.shape))
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    codes, _, dictionary, step, _, nonlinearity, keep_residual = inputs
    next_codes, residual = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(residual)
    # The codes before and the residual are kept for the dictionary's gradient alone; the mask is `next codes ≠ 0`.
    kept = (codes, residual) if keep_residual else (None, None)
    ctx.save_for_backward(next_codes, dictionary, *kept)
    ctx.step, ctx.nonlinearity = step, nonlinearity


def _backward(ctx: Any, grad_next_codes: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_next_codes is None:
        return (None,) * 7
    wants_codes, wants_signal = ctx.needs_input_grad[:2]
    next_codes, dictionary, codes, residual = ctx.saved_tensors
    gradients = iter(
        _lista_step_backward(
            grad_next_codes,
            next_codes,
            dictionary,
            codes,
            residual,
            ctx.step,
            ctx.nonlinearity,
            wants_codes,
            wants_signal,
        )
    )
    grad_codes = next(gradients) if wants_codes else None
    grad_signal = next(gradients) if wants_signal else None
    grad_dictionary = None if residual is None else next(gradients)
    return grad_codes, grad_signal, grad_dictionary, None, None, None, None


_lista_step.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_lista_step_backward, "lista_step")
