"""The unrolled layer: attention, LISTA residual, shrinkage and the next projection (docs/ops.md §4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.ops import common, operators, products
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss, squared_errors
from cdt_fast.ops.residual_linear import residual_linear
from cdt_fast.ops.symmetric_attention import (
    attention_matrix,
    grad_of_both_factors,
    softmax_backward_,
    symmetric_attention,
    symmetric_attention_reference,
)

# Beyond this many bytes plain torch does not hold the scores of all sequences at once.
HELD_SCORE_BYTES = 64 * 2**20


class UnrolledLayer(NamedTuple):
    """The outputs of one layer."""

    codes: Tensor  # H⁺, [..., T, m]
    projection: Tensor  # Z⁺, [..., T, k]
    error: Any  # a Tensor [], the squared error of Z⁺; None without a target


class _Layer(NamedTuple):
    """Resolved arguments: tokens `[B, T, …]` contiguous, and the dictionaries in their dtype."""

    codes: Tensor | None  # H; None: step · X D
    signal: Tensor  # X
    dictionary: Tensor  # D
    projection: Tensor  # Z
    next_dictionary: Tensor | None  # D⁺; None: D
    target: Tensor | None  # S
    lengths: Tensor | None  # [B]
    step: float
    threshold: float
    scale: float
    nonlinearity: common.Nonlinearity


def unrolled_layer(
    codes: Tensor | None,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float = 1.0,
    nonlinearity: common.LayerNonlinearity = "soft_threshold",
    projection: Tensor | None = None,
    lengths: Tensor | None = None,
    next_dictionary: Tensor | None = None,
    target: Tensor | None = None,
    casts: tuple[Tensor, Tensor | None] | None = None,
) -> UnrolledLayer:
    """One layer of DUST (or of UT for video), and the projection of its codes that the next layer starts from.

        Z = H Dᵀ,   A = softmax_rows(β Z Zᵀ),   H⁺ = S_θ(A H + (1/c)(X − A Z) D),   Z⁺ = H⁺ D⁺ᵀ

    The identity `D (A H) = A Z` makes one projection serve as attention feature, as ingredient of the residual and,
    at the same time, as the reconstruction `x̂ = Z` that the loss reads. Hand `Z⁺` to the next layer as `projection`,
    and a layer costs two large products forward and four backward, where the written-out layer costs four and eight.

    Args:
        codes: H, `[..., T, m]`; None: `(1/c) X D`, the first codes of a network, which are then never formed: that
            saves two large products forward and three backward.
        signal: X, `[..., T, n]`.
        dictionary: D, `[n, m]`.
        step: 1/c ≥ 0; with `c ≥ ‖D‖₂²` the LISTA half-step never raises its objective.
        threshold: θ = λ₁/c ≥ 0; "relu" does not use it.
        scale: β, the factor of the attention scores.
        nonlinearity: "soft_threshold", or in its place "relu" for `max(v, 0)`.
        projection: Z = `codes @ dictionary.T`, `[..., T, n]`, where the caller has it already; it is not checked. Its
            gradient flows to the tensor given.
        lengths: `[...]` integers, the number of tokens that count in each sequence; results are zero at padding.
        next_dictionary: D⁺, `[k, m]`, default `dictionary`.
        target: S, `[..., T, k]` in any dtype, what `Z⁺` is to reconstruct. It gets no gradient.
        casts: `dictionary` and `next_dictionary` in the dtype of the products, contiguous, where the caller has them
            already (a network casts each once, not in every layer); they are not checked, and get no gradient.

    Returns:
        A named tuple: the next codes `[..., T, m]` and their projection `[..., T, k]`, in the dtype of the arguments
        (under autocast: autocast's dtype), and the squared error `Σ‖Z⁺ − S‖²` over all tokens that count, one number in
        at least float32, whose gradient joins that of `Z⁺` inside the layer's own backward; None without a target.

    InputError: an argument has the wrong rank, shape, dtype, device or value, or a second derivative is asked for.
    """
    common.check_lista(codes, signal, dictionary, nonlinearity, rank=2)
    dtype = common.compute_dtype(signal)
    step = common.check_factor("step", step, non_negative=True, dtype=dtype)
    if projection is not None:
        common.check_tensor("projection", projection, 2, "[..., T, n]", signal.shape, "as signal")
    if next_dictionary is dictionary:
        next_dictionary = None  # one gradient for the tied dictionary, not two to be added
    code_width = dictionary.shape[1]
    if next_dictionary is not None:
        common.check_tensor("next_dictionary", next_dictionary, 2, "[k, m]", (None, code_width), "any by m")
    next_shape = (*signal.shape[:-1], (dictionary if next_dictionary is None else next_dictionary).shape[0])
    if target is not None:
        meaning = "the tokens of signal by the width of the next projection"
        common.check_tensor("target", target, 2, "[..., T, k]", next_shape, meaning)
        if target.device != signal.device:
            raise InputError(f"target is on {target.device} but signal is on {signal.device}: move one of them")
    common.check_together(codes=codes, signal=signal, projection=projection, next_dictionary=next_dictionary)
    common.check_lengths(lengths, signal)
    common.refuse_transforms("unrolled_layer", codes, signal, dictionary, projection, next_dictionary)
    if codes is None and projection is None:
        counted = common.without_padding(signal, common.padding_mask(lengths, signal))
        projection = counted @ (step * dictionary @ dictionary.mT)
    threshold = common.check_factor("threshold", threshold, non_negative=True, dtype=dtype)
    rows = common.sequences(signal, dtype)
    scale = common.check_factor("scale", scale, dtype=dtype)
    codes_given = None if codes is None else common.sequences(codes, dtype)
    projection = None if projection is None else common.sequences(projection, dtype)
    target = None if target is None else common.sequences(target.detach(), target.dtype)
    lengths = common.length_of_each(lengths)
    backend = common.choose_backend("unrolled_layer", rows, multiplies=True)
    backend = "torch" if common.underflows(dtype, step, scale) else backend
    tensors = rows, codes_given, dictionary, projection, next_dictionary
    numbers = step, threshold, scale, common.effective_nonlinearity(nonlinearity, threshold)
    if _runs_as_one(rows, dictionary, next_dictionary, backend):
        first, second = (dictionary, next_dictionary) if casts is None else casts
        second = None if next_dictionary is None or second is None else _cast(second, dtype)
        lows = _cast(first, dtype), second  # for both directions
        next_codes, next_projection, _, error = _whole_layer(*tensors, target, lengths, *lows, *numbers, backend)
    else:
        low, next_low = dictionary.to(dtype), None if next_dictionary is None else next_dictionary.to(dtype)
        if projection is None:
            assert codes_given is not None
            counted = common.without_padding(codes_given, common.padding_mask(lengths, rows))
            with common.without_autocast(rows):
                projection = counted @ low.mT
        layer = _Layer(codes_given, rows, low, projection, next_low, target, lengths, *numbers)
        next_codes, next_projection, error = _layer_of_ops(layer)
    next_codes, next_projection = next_codes.view(*signal.shape[:-1], code_width), next_projection.view(next_shape)
    return UnrolledLayer(next_codes, next_projection, None if target is None else error)


def unrolled_layer_reference(
    codes: Tensor | None,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float = 1.0,
    nonlinearity: str = "soft_threshold",
    lengths: Tensor | None = None,
    next_dictionary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write the layer out, without the identity: four large products, in any dtype, differentiated by torch."""
    if codes is None:
        codes = step * signal @ dictionary
    padding = common.padding_mask(lengths, codes)
    codes, signal = common.without_padding(codes, padding), common.without_padding(signal, padding)
    mixed = symmetric_attention_reference(codes @ dictionary.mT, codes, scale=scale, lengths=lengths)
    residual = signal - mixed @ dictionary.mT
    next_codes = common.shrink_reference(mixed + step * residual @ dictionary, threshold, nonlinearity)
    return next_codes, next_codes @ (dictionary if next_dictionary is None else next_dictionary).mT


def _cast(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix.detach().to(dtype).contiguous()  # `to` alone leaves a matrix of that dtype as it lies


def _runs_as_one(signal: Tensor, dictionary: Tensor, next_dictionary: Tensor | None, backend: str) -> bool:
    """Return whether a tile of the kernel holds the layer, or plain torch holds all its scores."""
    batch, tokens, width = signal.shape
    if backend == "torch":
        return batch * tokens**2 * max(4, signal.element_size()) <= HELD_SCORE_BYTES
    next_width = width if next_dictionary is None else next_dictionary.shape[0]
    return not unfused_reason(tokens, (width, dictionary.shape[1], next_width), signal.dtype, signal.device)


def unfused_reason(tokens: int, widths: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why no kernel holds the whole layer in its tiles, or None if one does; `tokens` are those of a sequence,
    `widths` those of the signal, the codes and the next projection."""
    width, code_width, next_width = widths
    if dtype.itemsize != 2:
        return "tiles of float32 leave no shared memory for the dictionary"
    if tokens > common.LONGEST:
        return f"a tile holds sequences of up to {common.LONGEST} tokens, got {tokens}"
    if (widest := max(width, next_width)) > common.WIDEST:
        return f"a tile holds patches of up to {common.WIDEST} pixels, got {widest}"
    # Of narrow tiles ptxas 12.8 makes code that reads wrong shared memory (docs/gpus.md).
    if common.is_hopper(device) and any(each <= 32 or each % 8 for each in widths):
        return f"on Hopper patches and codes must be of multiples of 8, from 40 on, got {width} and {code_width}"
    return None


def _layer_of_ops(layer: _Layer) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make the layer of other ops, for sizes that do not run as one; H⁺, Z⁺ and the squared error, if any."""
    codes, signal, dictionary, projection, next_dictionary, target, lengths, step, threshold, scale, name = layer
    dtype, padding = signal.dtype, common.padding_mask(lengths, signal)
    with common.without_autocast(signal):
        residual = common.without_padding(signal, padding)
        if codes is None:
            mixed = residual.new_zeros(dictionary.shape[1])
            values = residual - common.without_padding(projection, padding)
            residual = residual + symmetric_attention(projection, values, scale=scale, lengths=lengths)
        else:
            mixed = symmetric_attention(projection, codes, scale=scale, lengths=lengths)
            residual = residual - symmetric_attention(projection, scale=scale, lengths=lengths)
        next_codes = residual_linear(residual, dictionary, mixed, alpha=step, nonlinearity=name, threshold=threshold)
        next_projection = next_codes @ (dictionary if next_dictionary is None else next_dictionary).mT
    if target is None:
        return next_codes, next_projection, None
    target = common.without_padding(target, padding)
    if target.dtype == torch.float64 and dtype != torch.float64:
        target = target.float()  # no kernel reads float64, and the error is not summed in it
    return next_codes, next_projection, layerwise_reconstruction_loss([next_projection], target, reduction="sum").total


# The layer as one operator


@common.outside_autocast
def _forward(
    signal: Tensor,  # X, [B, T, n], contiguous
    codes: Tensor | None,  # H, [B, T, m], contiguous; None: step · X D
    dictionary: Tensor,  # D, [n, m], maybe of a wider dtype
    projection: Tensor | None,  # Z = H Dᵀ, [B, T, n], contiguous; None: it is computed
    next_dictionary: Tensor | None,  # D⁺, [k, m]; None: D
    target: Tensor | None,  # S, [B, T, k], for the squared error of Z⁺
    lengths: Tensor | None,  # [B], the tokens that count
    low: Tensor,  # D in the dtype of the tokens, contiguous
    next_low: Tensor | None,  # D⁺ likewise
    step: float,
    threshold: float,
    scale: float,
    nonlinearity: common.Nonlinearity,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return next codes, next projection, the projection if it was not given (else an empty tensor), squared error."""
    given, found = projection is not None, None
    if projection is None:
        assert codes is not None  # without codes the caller has computed a projection
        tokens = common.without_padding(codes, common.padding_mask(lengths, signal))
        projection = _product_of_tokens(tokens, low.mT)
    tensors: tuple[Any, Any, Any, Any, Any] = for_card(codes, signal, low, projection, next_low)
    layer = _Layer(*tensors, target, lengths, step, threshold, scale, nonlinearity)
    if backend == "triton":
        with common.or_plain_torch("unrolled_layer", signal) as kernels:
            widest = max(signal.shape[2], (low if next_low is None else next_low).shape[0])
            blocks = common.blocks_for(kernels.LEAN_BLOCKS if _is_lean(layer) else kernels.BLOCKS, signal, widest)
            found = kernels.forward(layer, common.card_of(signal).processors, blocks)
    next_codes, next_projection, errors = found or _forward_in_torch(layer)
    wide = torch.promote_types(signal.dtype, torch.float32)
    error = signal.new_zeros((), dtype=wide) if errors is None else errors.sum()
    return next_codes, next_projection, signal.new_empty(0) if given else projection, error


def _forward_fake(
    signal: Tensor, codes: Any, dictionary: Tensor, projection: Any, next_dictionary: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    next_width = (dictionary if next_dictionary is None else next_dictionary).shape[0]
    return (
        signal.new_empty((*signal.shape[:-1], dictionary.shape[1])),
        signal.new_empty((*signal.shape[:-1], next_width)),
        torch.empty_like(signal) if projection is None else signal.new_empty(0),
        signal.new_empty((), dtype=torch.promote_types(signal.dtype, torch.float32)),
    )


@operators.gradients_of("unrolled_layer", lambda *arguments: arguments[:5])
@common.outside_autocast
def _gradients(
    signal: Tensor,
    codes: Tensor | None,
    dictionary: Tensor,
    projection: Tensor,
    next_dictionary: Tensor | None,
    target: Tensor | None,
    lengths: Tensor | None,
    low: Tensor,
    next_low: Tensor | None,
    next_codes: Tensor,  # H⁺
    next_projection: Tensor | None,  # Z⁺, read with a target
    grad_next_codes: Tensor | None,  # None for zeros, as the two that follow
    grad_next_projection: Tensor | None,
    grad_error: Tensor | None,  # []
    step: float,
    scale: float,
    nonlinearity: common.Nonlinearity,
    projection_given: bool,  # if it was not, its gradient goes on to codes and dictionary
    backend: str,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of the first five arguments."""
    _, needs_codes, needs_dictionary, needs_projection, needs_next_dictionary = needs
    tied = next_dictionary is None
    tensors: tuple[Any, Any, Any, Any, Any] = for_card(codes, signal, low, projection, next_low)
    # No gradient depends on the threshold.
    layer = _Layer(*tensors, target, lengths, step, 0.0, scale, nonlinearity)
    projects = needs_projection if projection_given else needs_codes or needs_dictionary
    read: tuple[Any, Any, Any, Any] = for_card(next_codes, next_projection, grad_next_codes, grad_next_projection)
    given = *read, grad_error, [*needs[:3], projects]
    found = None
    if backend == "triton":
        with common.or_plain_torch("unrolled_layer", signal) as kernels:
            lean = _is_lean(layer)
            blocks = common.blocks_for(kernels.LEAN_BACKWARD_BLOCKS if lean else kernels.BACKWARD_BLOCKS, signal)
            found = kernels.backward(layer, *given, common.card_of(signal).processors, blocks)
    found = found or _backward_in_torch(layer, *given)
    update, residual, grad_next, grad_signal, grad_projection, grad_codes = found
    padding = common.padding_mask(lengths, signal)
    grad_dictionary = grad_next_dictionary = None
    if residual is not None:
        grad_dictionary = products.product_over_rows(common.rows_of(residual), common.rows_of(update), dictionary.dtype)
    if grad_next is not None and (needs_dictionary if tied else needs_next_dictionary):
        rows = common.rows_of(common.without_padding(grad_next, padding)), common.rows_of(next_codes)
        if next_dictionary is not None:
            grad_next_dictionary = products.product_over_rows(*rows, next_dictionary.dtype)
        elif grad_dictionary is not None:
            products.add_product(grad_dictionary, *rows)
    elif next_dictionary is not None and needs_next_dictionary:
        grad_next_dictionary = next_dictionary.new_zeros(next_dictionary.shape)  # a loss of known weight zero
    if not projection_given and grad_projection is not None:
        rows = common.rows_of(grad_projection)
        if grad_codes is not None:
            common.rows_of(grad_codes).addmm_(rows, low)
        if grad_dictionary is not None and codes is not None:
            products.add_product(grad_dictionary, rows, common.rows_of(common.without_padding(codes, padding)))
    return [grad_signal, grad_codes, grad_dictionary, grad_projection, grad_next_dictionary]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.step, _, ctx.scale, ctx.nonlinearity, ctx.backend = inputs
    signal, codes, dictionary, given, next_dictionary, target, *others = tensors
    next_codes, next_projection, computed, error = output
    ctx.mark_non_differentiable(computed, *([error] if target is None else []))
    ctx.projection_given = given is not None
    ctx.save_for_backward(
        *(signal, codes, dictionary, computed if given is None else given, next_dictionary, target, *others),
        *(next_codes, None if target is None else next_projection),
    )


def _backward(
    ctx: Any, grad_codes: Tensor | None, grad_projection: Tensor | None, _: None, grad_error: Tensor | None
) -> list[Tensor | None]:
    *needs, needs_next = ctx.needs_input_grad[:5]
    # The codes alone do not depend on the next dictionary.
    needs.append(needs_next and (grad_projection is not None or grad_error is not None))
    upstream: Any = (None if each is None else each.contiguous() for each in (grad_codes, grad_projection, grad_error))
    options = ctx.step, ctx.scale, ctx.nonlinearity, ctx.projection_given, ctx.backend, needs
    return _gradients(*ctx.saved_tensors, *upstream, *options)


_whole_layer = operators.differentiable("unrolled_layer", _forward, _forward_fake, _setup_context, _backward)


def _is_lean(layer: _Layer) -> bool:
    """Return whether there is room for the larger of the kernels' blocks."""
    one = layer.next_dictionary is None and layer.lengths is None
    aligned = _is_aligned(layer.signal) and _is_aligned(layer.dictionary)
    return aligned and (one or common.is_hopper(layer.signal.device))


def _is_aligned(tensor: Tensor) -> bool:
    """Return whether rows of a contiguous tensor start on multiples of 16 bytes: else loads are narrow, and take more
    shared memory."""
    return not any(count * tensor.element_size() % 16 for count in (tensor.storage_offset(), tensor.shape[-1]))


def for_card(*tensors: Any) -> Any:
    """Return the tensors; on Hopper aligned copies of those that are not, which ptxas 12.8 would compile wrong."""
    if not common.is_hopper(next(each.device for each in tensors if each is not None)):
        return tensors
    return [each if each is None or _is_aligned(each) else each.clone() for each in tensors]


# Plain torch, with the scores of all sequences at once


def _forward_in_torch(layer: _Layer) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return H⁺ `[B, T, m]`, Z⁺ `[B, T, k]` and, with a target, its squared error `[1]`."""
    _, _, dictionary, _, next_dictionary, target, _, step, threshold, scale, name = layer
    padding, codes, signal, projection, values = _without_padding(layer)
    attention = attention_matrix(projection, scale, padding).to(signal.dtype)
    residual = torch.baddbmm(signal, attention, values, alpha=-1)
    if codes is None:
        next_codes = _product_of_tokens(residual.mul_(step), dictionary)
    else:
        next_codes = _product_of_tokens(residual, dictionary).baddbmm_(attention, codes, beta=step)
    common.shrink_(next_codes, threshold, name)
    next_projection = _product_of_tokens(next_codes, (dictionary if next_dictionary is None else next_dictionary).mT)
    errors = None if target is None else squared_errors([next_projection], target, padding)
    return next_codes, next_projection, errors


def _backward_in_torch(
    layer: _Layer,
    next_codes: Tensor,
    next_projection: Tensor | None,
    grad_next_codes: Tensor | None,
    grad_next_projection: Tensor | None,
    grad_error: Tensor | None,
    needs: Sequence[bool],  # of signal, codes, dictionary and projection
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Return dU, (1/c)(X − A Z), the whole dZ⁺, dX, dZ and dH; those that are not needed may be None."""
    # The attention and the residual are computed again: products of width T and n, not m. Sums into `[tokens, m]` run
    # in place: on a CPU a fresh tensor of that size can cost as much as a product.
    _, _, dictionary, _, next_dictionary, target, _, step, _, scale, nonlinearity = layer
    needs_signal, needs_codes, needs_dictionary, needs_projection = needs
    padding, codes, signal, projection, values = _without_padding(layer)
    grad_next = None if grad_next_projection is None else common.without_padding(grad_next_projection, padding)
    # A loss that does not count gives no gradient, also where it is infinite: 0 · ∞ = NaN. On a GPU the host would have
    # to wait to look at its weight.
    on_cpu = grad_error is not None and grad_error.device.type == "cpu"
    if grad_error is not None and target is not None and not (on_cpu and grad_error == 0):
        assert next_projection is not None
        error = next_projection.to(grad_error.dtype, copy=True)
        error.sub_(common.without_padding(target, padding)).mul_(2 * grad_error)
        if not on_cpu:
            error.masked_fill_(grad_error == 0, 0.0)
        grad_next = (error if grad_next is None else error.add_(grad_next)).to(next_projection.dtype)
    if grad_next_codes is not None:
        grad_next_codes = common.without_padding(grad_next_codes, padding)
    if grad_next is not None:
        following = dictionary if next_dictionary is None else next_dictionary
        grad_update = _product_of_tokens(grad_next, following, grad_next_codes)
    elif grad_next_codes is None:
        grad_update = torch.zeros_like(next_codes)
    else:  # in memory of its own, which what follows writes over
        grad_update = grad_next_codes.clone() if padding is None else grad_next_codes
    common.shrink_backward(grad_update, next_codes, nonlinearity, out=grad_update)

    grad_residual = _product_of_tokens(grad_update, dictionary.mT).mul_(step)
    attention = attention_matrix(projection, scale, padding)
    attention_low = attention.to(signal.dtype)
    residual = grad_projection = None
    if needs_dictionary:
        residual = torch.baddbmm(signal, attention_low, values, alpha=-1).mul_(step)
    if needs_projection:
        grad_projection = torch.zeros_like(projection, memory_format=torch.contiguous_format)
        if scale:  # else nothing comes from the scores, whose gradient may overflow float16: 0 · ∞ = NaN
            if codes is None:
                grad_attention = (grad_residual @ values.mT).neg_()
            else:
                grad_attention = torch.baddbmm(grad_update @ codes.mT, grad_residual, values.mT, alpha=-1)
            grad_scores = softmax_backward_(grad_attention, attention)
            grad_of_both_factors(grad_scores, projection, scale, out=grad_projection)
        common.clear_padding_(grad_projection.baddbmm_(attention_low.mT, grad_residual, alpha=-1), padding)
    grad_codes = common.clear_padding_(attention_low.mT @ grad_update, padding) if needs_codes else None
    grad_signal = grad_residual
    if codes is None and needs_signal:
        grad_signal = common.clear_padding_(torch.baddbmm(grad_residual, attention_low.mT, grad_residual), padding)
    return grad_update, residual, grad_next, grad_signal, grad_projection, grad_codes


def _without_padding(layer: _Layer) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor]:
    """Return the padding, H, X, Z and what the attention weighs in the residual: Z, or without codes Z − X."""
    padding = common.padding_mask(layer.lengths, layer.signal)
    codes = None if layer.codes is None else common.without_padding(layer.codes, padding)
    signal, projection = (common.without_padding(tokens, padding) for tokens in (layer.signal, layer.projection))
    return padding, codes, signal, projection, projection - signal if codes is None else projection


def _product_of_tokens(tokens: Tensor, matrix: Tensor, added: Tensor | None = None) -> Tensor:
    """Return `tokens matrix`, or `tokens matrix + added`, for tokens `[B, T, width]`."""
    rows = products.product_of_rows(common.rows_of(tokens), matrix, None if added is None else common.rows_of(added))
    # No view, which an operator could not return to be changed in place.
    return torch.ops.aten._unsafe_view(rows, [*tokens.shape[:-1], matrix.shape[1]])
