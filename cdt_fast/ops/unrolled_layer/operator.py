"""The unrolled layer as a custom op: its two implementations and its gradient (docs/maths.md §7)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.ops.layerwise_reconstruction_loss.plain import errors_in_torch
from cdt_fast.ops.shared.attention_scores import (
    attention_matrix,
    grad_of_both_factors,
    softmax_backward_,
    softmax_dtype,
)
from cdt_fast.ops.shared.backend import runs_on_triton
from cdt_fast.ops.shared.checks import padding_mask, without_padding
from cdt_fast.ops.shared.products import product, product_over_rows, rows_of
from cdt_fast.ops.shared.registration import once_differentiable
from cdt_fast.ops.soft_threshold import shrink_, shrink_backward_


def fused_unsupported_reason(codes: Tensor, dictionary: Tensor, next_width: int) -> str | None:
    """Why no kernel holds the whole layer of `codes` `[B, T, m]` in its tiles, or None where one does."""
    from cdt_fast.kernels.unrolled_layer import LONGEST, WIDEST

    if codes.element_size() != 2:
        return "tiles of float32 leave no shared memory for the dictionary"
    if codes.shape[1] > LONGEST:
        return f"a tile holds sequences of up to {LONGEST} tokens, got {codes.shape[1]}"
    widest = max(dictionary.shape[0], next_width)
    return f"a tile holds patches of up to {WIDEST} pixels, got {widest}" if widest > WIDEST else None


def layer(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    projection: Tensor | None,
    next_dictionary: Tensor | None,
    target: Tensor | None,
    lengths: Tensor | None,
    step: float,
    threshold: float,
    scale: float,
    nonlinearity: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """H⁺ `[B, T, m]`, Z⁺ `[B, T, k]`, and the squared error (None without a target).

    The tokens' tensors are contiguous and of one dtype, the dictionaries may have another; `nonlinearity` is an
    effective one. The layer saves codes, signal, projection and next codes, all of which the network holds anyway.
    """
    next_codes, next_projection, _, error = _forward(
        codes, signal, dictionary, projection, next_dictionary, target, lengths, step, threshold, scale, nonlinearity
    )
    return next_codes, next_projection, None if target is None else error


@torch.library.custom_op("cdt_fast::unrolled_layer", mutates_args=())
def _forward(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    projection: Tensor | None,
    next_dictionary: Tensor | None,
    target: Tensor | None,
    lengths: Tensor | None,
    step: float,
    threshold: float,
    scale: float,
    nonlinearity: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Next codes, next projection, the projection if it was not given (else an empty tensor), squared error."""
    atoms = dictionary.to(codes.dtype)
    next_atoms = atoms if next_dictionary is None else next_dictionary.to(codes.dtype)
    error = codes.new_zeros((), dtype=torch.promote_types(codes.dtype, torch.float32))
    with torch.autocast(codes.device.type, enabled=False):
        padding = padding_mask(lengths, codes)
        if runs_on_triton(
            "unrolled_layer", codes, lambda: fused_unsupported_reason(codes, dictionary, next_atoms.shape[0])
        ):
            from cdt_fast.kernels.unrolled_layer import unrolled_forward

            projected = without_padding(codes, padding) @ atoms.mT if projection is None else projection
            next_codes, next_projection, errors = unrolled_forward(
                codes, signal, projected, *_in_rows(atoms, None if next_dictionary is None else next_atoms),
                target, lengths, step, threshold, scale, nonlinearity,
            )  # fmt: skip
            error = error if errors is None else errors.sum()
        else:
            codes, signal = without_padding(codes, padding), without_padding(signal, padding)
            projected = _product(codes, atoms.mT) if projection is None else without_padding(projection, padding)
            attention = attention_matrix(projected, scale, padding, softmax_dtype(projected)).to(codes.dtype)
            residual = torch.baddbmm(signal, attention, projected, alpha=-1)
            next_codes = _product(residual, atoms)
            next_codes = shrink_(next_codes.baddbmm_(attention, codes, beta=step), threshold, nonlinearity)
            next_projection = _product(next_codes, next_atoms.mT)
            if target is not None:
                error = errors_in_torch([next_projection], target, padding)[0]
    return next_codes, next_projection, projected if projection is None else codes.new_empty(0), error


@_forward.register_fake
def _(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    projection: Tensor | None,
    next_dictionary: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    next_width = (dictionary if next_dictionary is None else next_dictionary).shape[0]
    return (
        torch.empty_like(codes),
        codes.new_empty((*codes.shape[:-1], next_width)),
        torch.empty_like(signal) if projection is None else codes.new_empty(0),
        codes.new_empty((), dtype=torch.promote_types(codes.dtype, torch.float32)),
    )


@torch.library.custom_op("cdt_fast::unrolled_layer_backward", mutates_args=())
def _backward(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    projected: Tensor,
    next_dictionary: Tensor | None,
    target: Tensor | None,
    lengths: Tensor | None,
    next_codes: Tensor,
    next_projection: Tensor | None,
    grad_next_codes: Tensor | None,
    grad_next_projection: Tensor | None,
    grad_error: Tensor | None,
    step: float,
    threshold: float,
    scale: float,
    nonlinearity: str,
    projection_given: bool,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients that are needed, in the order codes, signal, dictionary, projection, next dictionary."""
    needs_codes, _, needs_dictionary, needs_projection, needs_next_dictionary = needs
    tied = next_dictionary is None
    atoms = dictionary.to(codes.dtype)
    next_atoms = atoms if next_dictionary is None else next_dictionary.to(codes.dtype)
    differentiates_projection = needs_projection or (not projection_given and (needs_codes or needs_dictionary))
    # A backward that is called inside autocast would have some of its products cast, and sums of two dtypes fail.
    with torch.autocast(codes.device.type, enabled=False):
        padding = padding_mask(lengths, codes)
        if runs_on_triton(
            "unrolled_layer", codes, lambda: fused_unsupported_reason(codes, dictionary, next_atoms.shape[0])
        ):
            from cdt_fast.kernels.unrolled_layer import unrolled_backward

            parts = unrolled_backward(
                codes, signal, projected, *_in_rows(atoms, None if tied else next_atoms), target, lengths, next_codes,
                next_projection, grad_next_codes, grad_next_projection, grad_error, step, scale, nonlinearity,
                needs_dictionary, differentiates_projection, needs_codes,
            )  # fmt: skip
        else:
            parts = _parts_in_torch(
                codes, signal, projected, atoms, next_atoms, target, padding, next_codes,
                next_projection, grad_next_codes, grad_next_projection, grad_error, step, threshold, scale,
                nonlinearity, needs_dictionary, differentiates_projection, needs_codes,
            )  # fmt: skip
        grad_update, residual, grad_next_projection, grad_signal, grad_projection, grad_codes = parts
        grad_dictionary = grad_next_dictionary = None
        if grad_next_projection is not None and (needs_dictionary if tied else needs_next_dictionary):
            dtype = (dictionary if next_dictionary is None else next_dictionary).dtype
            grad_next_dictionary = product_over_rows(
                rows_of(without_padding(grad_next_projection, padding)), rows_of(next_codes), dtype
            )
        elif needs_next_dictionary and next_dictionary is not None:
            grad_next_dictionary = next_dictionary.new_zeros(next_dictionary.shape)  # a loss of known weight zero
        if needs_dictionary:
            assert residual is not None  # asked for above
            grad_dictionary = product_over_rows(rows_of(residual), rows_of(grad_update), dictionary.dtype)
            if tied and grad_next_dictionary is not None:
                grad_dictionary += grad_next_dictionary
        if not projection_given and grad_projection is not None:
            if grad_codes is not None:
                rows_of(grad_codes).addmm_(rows_of(grad_projection), atoms)
            if grad_dictionary is not None:
                grad_dictionary += product_over_rows(
                    rows_of(grad_projection), rows_of(without_padding(codes, padding)), dictionary.dtype
                )
    found = (grad_codes, grad_signal, grad_dictionary, grad_projection, grad_next_dictionary)
    return [gradient for gradient, needed in zip(found, needs, strict=True) if needed and gradient is not None]


@_backward.register_fake
def _(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    projected: Tensor,
    next_dictionary: Tensor | None,
    *others: Any,
) -> list[Tensor]:
    inputs = (codes, signal, dictionary, projected, next_dictionary)
    return [
        given.new_empty(given.shape)  # contiguous, whatever the strides of a dictionary
        for given, needed in zip(inputs, others[-1], strict=True)
        if needed and given is not None
    ]


def _in_rows(dictionary: Tensor, next_dictionary: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both contiguous, as the kernels read them: a dictionary may be the transpose of a parameter."""
    return dictionary.contiguous(), None if next_dictionary is None else next_dictionary.contiguous()


def _product(tokens: Tensor, matrix: Tensor, added: Tensor | None = None) -> Tensor:
    """`product` for `[B, T, width]`."""
    found = product(rows_of(tokens), matrix, None if added is None else rows_of(added))
    return found.view(*tokens.shape[:-1], matrix.shape[1])


def _parts_in_torch(
    codes: Tensor,
    signal: Tensor,
    projected: Tensor,
    atoms: Tensor,
    next_atoms: Tensor,
    target: Tensor | None,
    padding: Tensor | None,
    next_codes: Tensor,
    next_projection: Tensor | None,
    grad_next_codes: Tensor | None,
    grad_next_projection: Tensor | None,
    grad_error: Tensor | None,
    step: float,
    threshold: float,
    scale: float,
    nonlinearity: str,
    needs_dictionary: bool,
    needs_projection: bool,
    needs_codes: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """What the kernel's `Gradients` hold: dU, (1/c)(X − A Z), the whole dZ⁺, dX, dZ, Aᵀ dU.

    The attention matrix and the residual are computed again (products of width T and n, not m), and the gradient mask
    is `next codes ≠ 0`. Sums into `[tokens, m]` run in place, inside the products where possible: on a CPU a fresh
    tensor of that size can cost as much as a product.
    """
    codes, signal = without_padding(codes, padding), without_padding(signal, padding)
    projected = without_padding(projected, padding)
    if grad_next_projection is not None:
        grad_next_projection = without_padding(grad_next_projection, padding)
    # A loss that does not count gives no gradient, also where it is infinite: 0 · ∞ = NaN. On a GPU to look at its
    # weight would mean to wait for it.
    on_cpu = grad_error is not None and grad_error.device.type == "cpu"
    if grad_error is not None and on_cpu and grad_error == 0:
        grad_error = None
    if grad_error is not None and target is not None and next_projection is not None:
        error = next_projection.to(grad_error.dtype, copy=True)
        error.sub_(without_padding(target, padding)).mul_(2 * grad_error)
        if not on_cpu:
            error.masked_fill_(grad_error == 0, 0.0)
        if grad_next_projection is not None:
            error += grad_next_projection
        grad_next_projection = error.to(codes.dtype)
    if grad_next_projection is None and grad_next_codes is None:
        grad_next_projection = codes.new_zeros((*codes.shape[:-1], next_atoms.shape[0]))
    if grad_next_projection is None:
        assert grad_next_codes is not None  # with neither the zeros above stand for both
        # In memory of its own, which what follows writes over.
        grad_update = grad_next_codes.clone() if padding is None else without_padding(grad_next_codes, padding)
    elif grad_next_codes is None:
        grad_update = _product(grad_next_projection, next_atoms)
    else:
        grad_update = _product(grad_next_projection, next_atoms, without_padding(grad_next_codes, padding))
    grad_update = shrink_backward_(grad_update, next_codes, threshold, nonlinearity)

    attention = attention_matrix(projected, scale, padding, softmax_dtype(projected))
    attention_low = attention.to(codes.dtype)
    grad_signal = _product(grad_update, atoms.mT).mul_(step)
    residual = grad_projection = None
    if needs_dictionary:
        residual = torch.baddbmm(signal, attention_low, projected, alpha=-1).mul_(step)
    if needs_projection:
        grad_attention = torch.baddbmm(grad_update @ codes.mT, grad_signal, projected.mT, alpha=-1)
        grad_scores = softmax_backward_(grad_attention, attention)
        grad_projection = torch.empty_like(projected, memory_format=torch.contiguous_format)
        grad_of_both_factors(grad_scores, projected, scale, out=grad_projection)
        grad_projection.baddbmm_(attention_low.mT, grad_signal, alpha=-1)
    grad_codes = attention_low.mT @ grad_update if needs_codes else None
    return grad_update, residual, grad_next_projection, grad_signal, grad_projection, grad_codes


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    codes, signal, dictionary, projection, next_dictionary, target, lengths, *numbers = inputs
    next_codes, next_projection, projected, _ = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        *(codes, signal, dictionary, projected if projection is None else projection, next_dictionary, target),
        *(lengths, next_codes, None if target is None else next_projection),
    )
    ctx.projection_given, ctx.numbers = projection is not None, numbers


def _differentiate(
    ctx: Any, grad_codes: Tensor | None, grad_projection: Tensor | None, _: Tensor | None, grad_error: Tensor | None
) -> tuple[Tensor | None, ...]:
    given = [None if gradient is None else gradient.contiguous() for gradient in (grad_codes, grad_projection)]
    if ctx.saved_tensors[5] is None:
        grad_error = None
    if all(gradient is None for gradient in (*given, grad_error)):
        return (None,) * 11
    needs = list(ctx.needs_input_grad[:5])
    needs[4] = needs[4] and not (given[1] is None and grad_error is None)
    found = iter(_backward(*ctx.saved_tensors, *given, grad_error, *ctx.numbers, ctx.projection_given, needs))
    return *(next(found) if needed else None for needed in needs), *(None,) * 6


_forward.register_autograd(_differentiate, setup_context=_save)
once_differentiable(_backward, "unrolled_layer")
