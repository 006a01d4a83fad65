"""The LISTA half-step: one gradient step on the dictionary's fit, then shrinkage (docs/maths.md §7)."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import ListaStepArguments
from cdt_fast.ops.lista_step.operator import lista_step_forward
from cdt_fast.ops.lista_step.reference import lista_step_reference
from cdt_fast.ops.shared.backend import choose_backend
from cdt_fast.ops.shared.checks import LayerNonlinearity, check_factor, check_lista_arguments, compute_dtype
from cdt_fast.ops.shared.products import rows_of
from cdt_fast.ops.soft_threshold.plain import effective_nonlinearity

__all__ = ["lista_step", "lista_step_reference"]


def lista_step(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    nonlinearity: LayerNonlinearity = "soft_threshold",
) -> Tensor:
    """One LISTA (or ISTA) step `S_θ(H + (1/c)(X − H Dᵀ) D)`.

    With `1/c ≤ 1/‖D‖₂²` and θ = λ₁/c it never raises `½‖X − H Dᵀ‖² + λ₁‖H‖₁`.

    Args:
        codes: H, `[..., m]`.
        signal: X, `[..., n]`, with the leading dimensions of `codes`. Up to n = 256 a kernel does the whole step.
        dictionary: D, `[n, m]`.
        step: 1/c ≥ 0.
        threshold: θ ≥ 0; "relu" does not use it.
        nonlinearity: "soft_threshold", or in its place "hard_threshold" for `v [|v| > θ]` or "relu" for `max(v, 0)`.

    Returns:
        The next codes, `[..., m]`, in the dtype of the arguments (under autocast: autocast's dtype, to which the codes
        and the signal are rounded too; the gradient of the dictionary is still summed in its own).

    Raises:
        InputError: an argument has the wrong rank, shape, dtype, device or value, or a second derivative is asked for.
    """
    check_lista_arguments(codes, signal, dictionary, nonlinearity)
    dtype = compute_dtype(codes)
    threshold = check_factor("threshold", threshold, non_negative=True, dtype=dtype)
    rows = rows_of(codes).to(dtype)
    lista = ListaStepArguments(
        codes=rows,
        signal=rows_of(signal).to(dtype),
        dictionary=dictionary,
        step=check_factor("step", step, non_negative=True, dtype=dtype),
        threshold=threshold,
        nonlinearity=effective_nonlinearity(nonlinearity, threshold),
        keep_residual=dictionary.requires_grad and torch.is_grad_enabled(),
        backend=choose_backend("lista_step", rows, multiplies=True),
    )
    next_codes, _ = lista_step_forward(lista)
    return next_codes.view(codes.shape)
