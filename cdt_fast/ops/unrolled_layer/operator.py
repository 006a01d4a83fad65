"""`unrolled_layer` as an operator with a gradient (docs/maths.md §7)."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import UnrolledLayerArguments, UnrolledLayerBackwardArguments
from cdt_fast.ops.shared.checks import padding_mask, without_padding
from cdt_fast.ops.shared.products import add_product, product_over_rows, rows_of
from cdt_fast.ops.shared.registration import Operator, changed, save, saved
from cdt_fast.ops.soft_threshold.reference import shrink_reference
from cdt_fast.ops.symmetric_attention.reference import symmetric_attention_reference
from cdt_fast.ops.unrolled_layer.plain import backward_in_torch, forward_in_torch, product_of_tokens

Layer = TypeVar("Layer", bound=UnrolledLayerArguments)

# The arguments that have a gradient.
DIFFERENTIABLE = ("codes", "signal", "dictionary", "projection", "next_dictionary")


def layer_as_one(layer: UnrolledLayerArguments) -> tuple[Tensor, Tensor, Tensor | None]:
    """H⁺ `[B, T, m]`, Z⁺ `[B, T, k]`, and the squared error (None without a target).

    The layer keeps codes, signal, projection and next codes, all of which the network holds anyway.
    """
    dtype = layer.signal.dtype
    if layer.narrow_dictionary is None and layer.dictionary.dtype != dtype:  # once, for both directions
        casts = [
            None if matrix is None else matrix.detach().to(dtype, memory_format=torch.contiguous_format)
            for matrix in (layer.dictionary, layer.next_dictionary)
        ]
        layer = changed(layer, narrow_dictionary=casts[0], narrow_next_dictionary=casts[1])
    next_codes, next_projection, _, error = unrolled_layer_forward(layer)
    return next_codes, next_projection, None if layer.target is None else error


def _forward(layer: UnrolledLayerArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Next codes, next projection, the projection if it was not given (else an empty tensor), squared error."""
    signal, given = layer.signal, layer.projection is not None
    layer = _with_dictionaries_of_the_tokens(layer)
    if layer.projection is None:
        assert layer.codes is not None  # without them there is a projection
        tokens = without_padding(layer.codes, padding_mask(layer.lengths, signal))
        layer = changed(layer, projection=product_of_tokens(tokens, layer.dictionary.mT))
    if layer.backend == "triton":
        from cdt_fast.kernels.unrolled_layer import unrolled_forward

        next_codes, next_projection, errors = unrolled_forward(layer)
    else:
        next_codes, next_projection, errors = forward_in_torch(layer)
    projection = signal.new_empty(0) if given or layer.projection is None else layer.projection
    if errors is None:
        error = signal.new_zeros((), dtype=torch.promote_types(signal.dtype, torch.float32))
    else:
        error = errors.sum()
    return next_codes, next_projection, projection, error


def _forward_fake(layer: UnrolledLayerArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    signal = layer.signal
    next_width = (layer.dictionary if layer.next_dictionary is None else layer.next_dictionary).shape[0]
    return (
        signal.new_empty((*signal.shape[:-1], layer.dictionary.shape[1])),
        signal.new_empty((*signal.shape[:-1], next_width)),
        torch.empty_like(signal) if layer.projection is None else signal.new_empty(0),
        signal.new_empty((), dtype=torch.promote_types(signal.dtype, torch.float32)),
    )


def _backward(layer: UnrolledLayerBackwardArguments) -> list[Tensor]:
    """The gradients that are needed, in the order of `DIFFERENTIABLE`."""
    dictionary = layer.dictionary
    tied = layer.next_dictionary is None
    next_dictionary = dictionary if layer.next_dictionary is None else layer.next_dictionary
    narrow = _with_dictionaries_of_the_tokens(layer)
    if not layer.projection_given:
        narrow = changed(narrow, needs_projection=layer.needs_codes or layer.needs_dictionary)
    if layer.backend == "triton":
        from cdt_fast.kernels.unrolled_layer import unrolled_backward

        parts = unrolled_backward(narrow)
    else:
        parts = backward_in_torch(narrow)
    padding = padding_mask(layer.lengths, layer.signal)
    grad_dictionary = grad_next_dictionary = None
    if layer.needs_dictionary:
        assert parts.residual is not None
        grad_dictionary = product_over_rows(rows_of(parts.residual), rows_of(parts.update), dictionary.dtype)
    if layer.needs_dictionary if tied else layer.needs_next_dictionary:
        if parts.next_projection is not None:
            rows = rows_of(without_padding(parts.next_projection, padding))
            if tied and grad_dictionary is not None:
                _add_product(grad_dictionary, rows, rows_of(layer.next_codes))
            else:
                grad_next_dictionary = product_over_rows(rows, rows_of(layer.next_codes), next_dictionary.dtype)
        elif not tied:
            grad_next_dictionary = next_dictionary.new_zeros(next_dictionary.shape)  # a loss of known weight zero
    if not layer.projection_given and parts.projection is not None:
        rows = rows_of(parts.projection)
        if parts.codes is not None:
            rows_of(parts.codes).addmm_(rows, narrow.dictionary)
        if grad_dictionary is not None:
            assert layer.codes is not None
            _add_product(grad_dictionary, rows, rows_of(without_padding(layer.codes, padding)))
    gradients = (parts.codes, parts.signal, grad_dictionary, parts.projection, grad_next_dictionary)
    needs = (getattr(layer, f"needs_{name}") for name in DIFFERENTIABLE)
    return [gradient for gradient, need in zip(gradients, needs, strict=True) if need and gradient is not None]


def _backward_fake(layer: UnrolledLayerBackwardArguments) -> list[Tensor]:
    tensors = [getattr(layer, name) for name in DIFFERENTIABLE if getattr(layer, f"needs_{name}")]
    return [tensor.new_empty(tensor.shape) for tensor in tensors]  # contiguous, whatever the strides of a dictionary


def _setup_context(ctx: Any, layer: UnrolledLayerArguments, outputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    next_codes, next_projection, projection, error = outputs
    ctx.mark_non_differentiable(projection, *([error] if layer.target is None else []))
    kept = vars(layer) | {"projection": projection if layer.projection is None else layer.projection}
    save(
        ctx,
        **kept,
        next_codes=next_codes,
        next_projection=None if layer.target is None else next_projection,
        projection_given=layer.projection is not None,
    )


def _autograd(
    ctx: Any, grad_codes: Tensor | None, grad_projection: Tensor | None, _: None, grad_error: Tensor | None
) -> list[Tensor | None]:
    needs: dict[str, Any] = {f"needs_{name}": bool(ctx.needs[name]) for name in DIFFERENTIABLE}
    codes_alone = grad_projection is None and grad_error is None  # which do not depend on the next dictionary
    nothing = [None] * (codes_alone and needs["needs_next_dictionary"])
    needs["needs_next_dictionary"] &= not codes_alone
    layer = UnrolledLayerBackwardArguments(
        **saved(ctx),
        **needs,
        grad_next_codes=None if grad_codes is None else grad_codes.contiguous(),
        grad_next_projection=None if grad_projection is None else grad_projection.contiguous(),
        grad_error=grad_error,
    )
    return [*unrolled_layer_backward(layer), *nothing]


def _formula(layer: UnrolledLayerArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, padding = layer.signal.dtype, padding_mask(layer.lengths, layer.signal)
    wide = torch.promote_types(dtype, torch.float32)
    following = layer.dictionary if layer.next_dictionary is None else layer.next_dictionary
    dictionary, following = (matrix.to(dtype).to(wide) for matrix in (layer.dictionary, following))
    signal = without_padding(layer.signal.to(wide), padding)
    given = None if layer.codes is None else without_padding(layer.codes.to(wide), padding)
    codes = layer.step * signal @ dictionary if given is None else given
    projection = codes @ dictionary.mT if layer.projection is None else layer.projection.to(wide)
    mixed = symmetric_attention_reference(projection, codes, scale=layer.scale, lengths=layer.lengths)
    of_signal = symmetric_attention_reference(projection, scale=layer.scale, lengths=layer.lengths)
    update = mixed + layer.step * (signal - of_signal) @ dictionary
    next_codes = shrink_reference(update, layer.threshold, layer.nonlinearity)
    next_projection = next_codes @ following.mT
    error = next_projection.new_zeros(())
    if layer.target is not None:
        error = without_padding(next_projection - layer.target.to(wide), padding).square().sum()
    return next_codes.to(dtype), next_projection.to(dtype), layer.signal.new_empty(0), error


unrolled_layer_forward = Operator(
    "unrolled_layer",
    UnrolledLayerArguments,
    "(Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _setup_context,
    _autograd,
    _formula,
)
unrolled_layer_backward = Operator(
    "unrolled_layer_backward", UnrolledLayerBackwardArguments, "Tensor[]", _backward, _backward_fake
)


def _with_dictionaries_of_the_tokens(layer: Layer) -> Layer:
    """Both in the dtype of the tokens and contiguous, as the kernel reads them: one may be the transpose of another
    parameter."""
    if layer.narrow_dictionary is not None:
        return changed(layer, dictionary=layer.narrow_dictionary, next_dictionary=layer.narrow_next_dictionary)
    dtype, on_triton = layer.signal.dtype, layer.backend == "triton"
    dictionary, following = layer.dictionary.to(dtype), layer.next_dictionary
    following = None if following is None else following.to(dtype)
    if on_triton:
        dictionary, following = dictionary.contiguous(), None if following is None else following.contiguous()
    return changed(layer, dictionary=dictionary, next_dictionary=following)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += leftᵀ right`, in one launch where the total is wide enough to be summed in."""
    if total.element_size() < 4:
        total += product_over_rows(left, right, total.dtype)
    else:
        add_product(total, left, right)
