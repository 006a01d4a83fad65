"""Shrinkage and the LISTA half-step: one gradient step on the dictionary's fit, then shrinkage (MATH: section 5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdt_fast.checks import check_choice
from cdt_fast.errors import InputError
from cdt_fast.ops.checks import (
    check_factor,
    check_shape,
    check_tensor,
    check_together,
    compute_dtype,
)

NONLINEARITIES = ("soft_threshold", "relu")


def soft_threshold(x: Tensor, threshold: float | Tensor) -> Tensor:
    """Shrinkage `S_θ(x) = sign(x) · max(|x| − θ, 0)`, the proximal operator of `θ‖x‖₁`.

    Args:
        x: a floating-point tensor of any shape and strides.
        threshold: θ ≥ 0, a number, or a tensor that broadcasts against `x` (its gradient is computed too; its sign is
            not checked, which would wait for the device).

    Returns:
        A tensor of the shape and dtype of `x`. NaN stays NaN.

    Raises:
        InputError: `x` is not floating point, or `threshold` is negative, not finite or does not broadcast.
    """
    check_tensor("x", x, 0, "of any shape")
    if not isinstance(threshold, Tensor):
        threshold = check_factor("threshold", threshold, non_negative=True)
        # S_0 is the identity, whose gradient is 1 at zero too; softshrink's is 0 there.
        return torch.nn.functional.softshrink(x, threshold) if threshold else x.clone()
    check_tensor("threshold", threshold, 0, "or a number")
    if x.dim() < threshold.dim() or any(
        given not in (1, expected) for given, expected in zip(threshold.shape[::-1], x.shape[::-1], strict=False)
    ):
        raise InputError(f"threshold must broadcast against x {tuple(x.shape)}, got {tuple(threshold.shape)}")
    return soft_threshold_reference(x, threshold.to(x.dtype))


def soft_threshold_reference(x: Tensor, threshold: float | Tensor) -> Tensor:
    """The formula of `soft_threshold`, differentiated by torch."""
    return torch.sign(x) * torch.relu(torch.abs(x) - threshold)


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
        signal: X, `[..., n]`, with the leading dimensions of `codes`.
        dictionary: D, `[n, m]`.
        step: 1/c ≥ 0.
        threshold: θ ≥ 0; "relu" does not use it.
        nonlinearity: "soft_threshold", or "relu" for `max(v, 0)` in its place.

    Returns:
        The next codes, `[..., m]`, in the dtype of the arguments (under autocast: autocast's dtype).

    Raises:
        InputError: an argument has the wrong rank, shape, dtype, device or value. A second derivative raises torch's
            error for functions that are differentiable once.
    """
    check_lista_arguments(codes, signal, dictionary, nonlinearity)
    step = check_factor("step", step, non_negative=True)
    threshold = check_factor("threshold", threshold, non_negative=True)
    output: Tensor = _ListaStep.apply(codes, signal, dictionary, step, threshold, nonlinearity)  # type: ignore[assignment]
    return output


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


def shrink_reference(x: Tensor, threshold: float, nonlinearity: str) -> Tensor:
    """The nonlinearity of a layer: `S_θ`, or ReLU in its place."""
    return soft_threshold_reference(x, threshold) if nonlinearity == "soft_threshold" else torch.relu(x)


def shrink_(x: Tensor, threshold: float, nonlinearity: str) -> Tensor:
    """The nonlinearity of a layer, in place."""
    if nonlinearity == "relu":
        return x.relu_()
    return torch.ops.aten.softshrink.out(x, threshold, out=x)


def shrink_backward_(grad_output: Tensor, output: Tensor, threshold: float, nonlinearity: str) -> Tensor:
    """The gradient through `shrink_`, in place of `grad_output`, from the output alone: it passes where output ≠ 0."""
    if nonlinearity == "soft_threshold" and threshold == 0.0:
        return grad_output  # S_0 is the identity: an output of zero says nothing about the gradient
    return torch.ops.aten.softshrink_backward.grad_input(grad_output, output, 0.0, grad_input=grad_output)


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


class _ListaStep(torch.autograd.Function):
    """Saves the codes before and after and the residual; the gradient mask is `output ≠ 0`."""

    @staticmethod
    def forward(
        ctx: Any,
        codes: Tensor,
        signal: Tensor,
        dictionary: Tensor,
        step: float,
        threshold: float,
        nonlinearity: str,
    ) -> Tensor:
        dtype = compute_dtype(codes)
        with torch.autocast(codes.device.type, enabled=False):
            rows = _rows(codes).to(dtype)
            atoms = dictionary.to(dtype)
            residual = torch.addmm(_rows(signal).to(dtype), rows, atoms.mT, alpha=-1)
            output = shrink_(torch.addmm(rows, residual, atoms, alpha=step), threshold, nonlinearity)
        ctx.save_for_backward(rows, dictionary, residual, output)
        ctx.step, ctx.threshold, ctx.nonlinearity = step, threshold, nonlinearity
        ctx.shapes = codes.shape, signal.shape
        ctx.dtypes = codes.dtype, signal.dtype
        return output.view(codes.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, dictionary, residual, output = ctx.saved_tensors
        atoms = dictionary.to(output.dtype)
        grad_codes = grad_dictionary = None
        # A backward that is called inside autocast would have some of its products cast, and sums of two dtypes fail.
        with torch.autocast(output.device.type, enabled=False):
            grad_update = shrink_backward_(
                grad_output.reshape(output.shape).clone(), output, ctx.threshold, ctx.nonlinearity
            )
            grad_signal = ctx.step * (grad_update @ atoms.mT)
            if ctx.needs_input_grad[2]:
                grad_dictionary = torch.mm(residual.mT, grad_update).mul_(ctx.step)
                grad_dictionary = grad_dictionary.addmm_(grad_signal.mT, rows, alpha=-1).to(dictionary.dtype)
            if ctx.needs_input_grad[0]:
                grad_codes = grad_update.addmm_(grad_signal, atoms, alpha=-1).view(ctx.shapes[0]).to(ctx.dtypes[0])
        return grad_codes, grad_signal.view(ctx.shapes[1]).to(ctx.dtypes[1]), grad_dictionary, None, None, None


def _rows(tokens: Tensor) -> Tensor:
    """`[..., width]` → `[rows, width]`, also where the width is 0 (and `reshape(-1, 0)` is ambiguous)."""
    return tokens.reshape(tokens.shape[:-1].numel(), tokens.shape[-1])
