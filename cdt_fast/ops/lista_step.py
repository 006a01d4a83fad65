"""The LISTA half-step: one gradient step on the dictionary's fit, then shrinkage (docs/ops.md §4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.ops import common, operators, products


def lista_step(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    nonlinearity: common.LayerNonlinearity = "soft_threshold",
) -> Tensor:
    """One LISTA (or ISTA) step `S_θ(H + (1/c)(X − H Dᵀ) D)`.

    With `1/c ≤ 1/‖D‖₂²` and θ = λ₁/c it never raises `½‖X − H Dᵀ‖² + λ₁‖H‖₁`.

    Args:
        codes: H, `[..., m]`.
        signal: X, `[..., n]`, with the leading dimensions of `codes`. Up to n = 256 a kernel does the whole step.
        dictionary: D, `[n, m]`.
        step: 1/c ≥ 0.
        threshold: θ ≥ 0; "relu" does not use it.
        nonlinearity: "soft_threshold", or in its place "relu" for `max(v, 0)`.

    Returns:
        The next codes, `[..., m]`, in the dtype of the arguments (under autocast: autocast's dtype, to which the codes
        and the signal are rounded too; the gradient of the dictionary is still summed in its own).

    InputError: an argument has the wrong rank, shape, dtype, device or value, or a second derivative is asked for.
    """
    common.check_lista(codes, signal, dictionary, nonlinearity)
    common.refuse_transforms("lista_step", codes, signal, dictionary)
    dtype = common.compute_dtype(codes)
    step = common.check_factor("step", step, non_negative=True, dtype=dtype)
    threshold = common.check_factor("threshold", threshold, non_negative=True, dtype=dtype)
    rows = common.rows_of(codes).to(dtype)
    name = common.effective_nonlinearity(nonlinearity, threshold)
    keeps = dictionary.requires_grad and torch.is_grad_enabled()
    fits = signal.shape[-1] <= common.WIDEST  # wider residuals do not fit a block of the kernel
    backend = common.choose_backend("lista_step", rows, multiplies=True) if fits else "torch"
    tensors = rows, common.rows_of(signal).to(dtype), dictionary
    next_codes, _ = _step(*tensors, step, threshold, name, keeps, backend)
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
    """Return `S_θ(H + (1/c)(X − H Dᵀ) D)`, in any dtype, differentiated by torch."""
    residual = signal - codes @ dictionary.mT
    return common.shrink_reference(codes + step * residual @ dictionary, threshold, nonlinearity)


@common.outside_autocast
def _forward(
    codes: Tensor,  # [rows, m]
    signal: Tensor,  # [rows, n]
    dictionary: Tensor,  # [n, m], maybe of a wider dtype
    step: float,
    threshold: float,
    nonlinearity: common.Nonlinearity,
    keep_residual: bool,  # for the gradient of the dictionary
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the next codes `[rows, m]` and the residual `[rows, n]`, or `[0, n]` if it is not kept."""
    dictionary = dictionary.to(codes.dtype)
    if backend == "triton":
        with common.or_plain_torch("lista_step", codes) as kernels:
            blocks = common.blocks_for(kernels.BLOCKS, codes)
            tensors = codes.contiguous(), signal.contiguous(), dictionary.contiguous()
            next_codes, kept = kernels.forward(*tensors, step, threshold, nonlinearity, keep_residual, blocks)
            return next_codes, signal.new_empty((0, signal.shape[1])) if kept is None else kept
    residual = products.product_of_rows(codes, dictionary.mT, signal, alpha=-1.0)
    update = products.product_of_rows(residual, dictionary, codes, alpha=step)
    next_codes = common.shrink_(update, threshold, nonlinearity)
    return next_codes, residual if keep_residual else residual.new_empty((0, residual.shape[1]))


def _forward_fake(codes: Tensor, signal: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return codes.new_empty(codes.shape), codes.new_empty((signal.shape[0] if others[-2] else 0, signal.shape[1]))


@operators.gradients_of(
    "lista_step",
    lambda _, output, matrix, *others: (output, output.new_empty(output.shape[0], matrix.shape[0]), matrix),
)
@common.outside_autocast
def _gradients(
    grad_output: Tensor,  # dH⁺, [rows, m]
    output: Tensor,  # H⁺, [rows, m]
    dictionary: Tensor,
    codes: Tensor | None,  # H, for the gradient of the dictionary
    residual: Tensor | None,  # X − H Dᵀ, likewise
    step: float,
    nonlinearity: common.Nonlinearity,
    backend: str,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of the codes, the signal and the dictionary."""
    needs_codes, _, needs_dictionary = needs
    atoms = dictionary.to(output.dtype)
    parts = grad_dictionary = None
    if backend == "triton":
        with common.or_plain_torch("lista_step", output) as kernels:
            blocks = common.blocks_for(kernels.BLOCKS, output)
            tensors = grad_output.contiguous(), output, atoms.contiguous()
            parts = kernels.backward(*tensors, step, nonlinearity, needs_codes, needs_dictionary, blocks)
    if parts is None:
        grad_update = common.shrink_backward(grad_output, output, nonlinearity)
        parts = None, products.product_of_rows(grad_update, atoms.mT).mul_(step), grad_update
    grad_codes, grad_residual, grad_update = parts
    if codes is not None and residual is not None and grad_update is not None:
        # dD = step · Rᵀ dU − dRᵀ H, each product in float32 where the card can write it.
        wide = torch.promote_types(dictionary.dtype, torch.float32)
        grad_dictionary = products.product_over_rows(residual, grad_update, wide).mul_(step)
        grad_dictionary.sub_(products.product_over_rows(grad_residual, codes, wide))
        grad_dictionary = grad_dictionary.to(dictionary.dtype)
    if needs_codes and grad_codes is None and grad_update is not None:
        # In place of dU: on a CPU a fresh tensor of that size can cost as much as the product.
        grad_codes = products.product_of_rows(grad_residual, atoms, grad_update, alpha=-1.0, out=grad_update)
    return [grad_codes, grad_residual, grad_dictionary]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    codes, _, dictionary, ctx.step, _, ctx.nonlinearity, keeps, ctx.backend = inputs
    next_codes, residual = output
    ctx.mark_non_differentiable(residual)
    # The codes before and the residual are kept for the dictionary's gradient alone.
    ctx.save_for_backward(next_codes, dictionary, codes if keeps else None, residual if keeps else None)


def _backward(ctx: Any, grad_output: Tensor, _: None) -> list[Tensor | None]:
    options = ctx.step, ctx.nonlinearity, ctx.backend, list(ctx.needs_input_grad[:3])
    return _gradients(grad_output, *ctx.saved_tensors, *options)


_step = operators.differentiable("lista_step", _forward, _forward_fake, _setup_context, _backward)
