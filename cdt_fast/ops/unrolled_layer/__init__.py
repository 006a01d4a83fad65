"""The unrolled layer: attention, LISTA residual, shrinkage and the next projection (docs/maths.md §7)."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss
from cdt_fast.ops.lista_step import check_lista_arguments
from cdt_fast.ops.residual_linear import residual_linear
from cdt_fast.ops.shared.backend import runs_on_triton
from cdt_fast.ops.shared.checks import (
    check_factor,
    check_lengths,
    check_shape,
    check_tensor,
    check_together,
    compute_dtype,
    length_of_each,
    padding_mask,
    sequences,
    without_padding,
)
from cdt_fast.ops.soft_threshold import effective_nonlinearity, shrink_reference
from cdt_fast.ops.symmetric_attention import symmetric_attention, symmetric_attention_reference
from cdt_fast.ops.unrolled_layer.operator import fused_unsupported_reason, layer

# Beyond this many bytes plain torch does not hold the scores of all sequences at once.
HELD_SCORE_BYTES = 64 * 2**20


def unrolled_layer(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float = 1.0,
    nonlinearity: str = "soft_threshold",
    projection: Tensor | None = None,
    lengths: Tensor | None = None,
    next_dictionary: Tensor | None = None,
    target: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """One layer of DUST (or of UT for video), and the projection of its codes that the next layer starts from.

        Z = H Dᵀ,   A = softmax_rows(β Z Zᵀ),   H⁺ = S_θ(A H + (1/c)(X − A Z) D),   Z⁺ = H⁺ D⁺ᵀ

    The identity `D (A H) = A Z` makes one projection serve as attention feature, as ingredient of the residual and,
    at the same time, as the reconstruction `x̂ = Z` that the loss reads. Hand `Z⁺` to the next layer as `projection`,
    and a layer costs two large products forward and four backward, where the written-out layer costs four and eight.

    Args:
        codes: H, `[..., T, m]`.
        signal: X, `[..., T, n]`.
        dictionary: D, `[n, m]`.
        step: 1/c ≥ 0; with `c ≥ ‖D‖₂²` the LISTA half-step never raises its objective.
        threshold: θ = λ₁/c ≥ 0; "relu" does not use it.
        scale: β, the factor of the attention scores.
        nonlinearity: "soft_threshold", or "relu" for `max(v, 0)` in its place.
        projection: Z = `codes @ dictionary.T`, `[..., T, n]`, where the caller has it already; it is not checked. Its
            gradient flows to the tensor given.
        lengths: `[...]` integers, the number of tokens that count in each sequence; results are zero at padding.
        next_dictionary: D⁺, `[k, m]`, default `dictionary`.
        target: S, `[..., T, k]` in any dtype, what `Z⁺` is to reconstruct. It gets no gradient.

    Returns:
        The next codes `[..., T, m]` and their projection `[..., T, k]`, in the dtype of the arguments (under autocast:
        autocast's dtype). With a target also its squared error `Σ‖Z⁺ − S‖²` over all tokens that count, one number in
        at least float32, whose gradient joins that of `Z⁺` inside the layer's own backward.

    Raises:
        InputError: an argument has the wrong rank, shape, dtype, device or value, or a second derivative is asked for.
    """
    check_lista_arguments(codes, signal, dictionary, nonlinearity, rank=2)
    if projection is not None:
        check_tensor("projection", projection, 2, "[..., T, n]")
        check_shape("projection", projection, tuple(signal.shape), "as signal")
    if next_dictionary is dictionary:
        next_dictionary = None  # one gradient for the tied dictionary, not two to be added
    if next_dictionary is not None:
        check_tensor("next_dictionary", next_dictionary, 2, "[k, m]")
        check_shape("next_dictionary", next_dictionary, (next_dictionary.shape[0], codes.shape[-1]), "any by m")
    next_shape = (*codes.shape[:-1], (dictionary if next_dictionary is None else next_dictionary).shape[0])
    if target is not None:
        check_tensor("target", target, 2, "[..., T, k]")
        check_shape("target", target, next_shape, "the tokens of codes by the width of the next projection")
        if target.device != codes.device:
            raise InputError(f"target is on {target.device} but codes is on {codes.device}: move one of them")
    check_together(codes=codes, projection=projection, next_dictionary=next_dictionary)
    check_lengths(lengths, codes)
    step = check_factor("step", step, non_negative=True)
    threshold = check_factor("threshold", threshold, non_negative=True)
    scale = check_factor("scale", scale)
    dtype = compute_dtype(codes)
    rows = sequences(codes, dtype)
    if runs_on_triton("unrolled_layer", rows, multiplies=True):
        in_one = fused_unsupported_reason(rows, dictionary, next_shape[-1]) is None
    else:
        in_one = rows.shape[0] * rows.shape[1] ** 2 * max(4, rows.element_size()) <= HELD_SCORE_BYTES
    run = layer if in_one else _layer_of_ops
    next_codes, next_projection, error = run(
        codes=rows,
        signal=sequences(signal, dtype),
        projection=None if projection is None else sequences(projection, dtype),
        target=None if target is None else sequences(target.detach(), target.dtype),
        dictionary=dictionary,
        next_dictionary=next_dictionary,
        lengths=length_of_each(lengths),
        step=step,
        threshold=threshold,
        scale=scale,
        nonlinearity=effective_nonlinearity(nonlinearity, threshold),
    )
    found = next_codes.view(codes.shape), next_projection.view(next_shape)
    return found if error is None else (*found, error)


def _layer_of_ops(
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
    """The layer from other ops: where no tile can hold it (long sequences, wide patches, float32), and in plain torch
    where the scores are too many to be held at once."""
    padding = padding_mask(lengths, codes)
    dictionary = dictionary.to(codes.dtype)
    next_dictionary = dictionary if next_dictionary is None else next_dictionary.to(codes.dtype)
    with torch.autocast(codes.device.type, enabled=False):
        projection = without_padding(codes, padding) @ dictionary.mT if projection is None else projection
        mixed = symmetric_attention(projection, codes, scale=scale, lengths=lengths)
        residual = without_padding(signal, padding) - symmetric_attention(projection, scale=scale, lengths=lengths)
        next_codes = residual_linear(
            residual, dictionary, mixed, alpha=step, nonlinearity=nonlinearity, threshold=threshold
        )
        next_projection = next_codes @ next_dictionary.mT
    if target is None:
        return next_codes, next_projection, None
    tokens = codes.shape[:-1].numel()
    if not tokens:
        return next_codes, next_projection, next_projection.sum(dtype=torch.promote_types(codes.dtype, torch.float32))
    target = without_padding(target, padding)
    if target.dtype == torch.float64 and codes.dtype != torch.float64:
        target = target.float()  # no kernel reads float64, and the error is not summed in it
    _, per_token = layerwise_reconstruction_loss([next_projection], target)
    return next_codes, next_projection, per_token[0] * tokens


def unrolled_layer_reference(
    codes: Tensor,
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
    """The layer written out, without the identity: four large products, in any dtype, differentiated by torch."""
    padding = padding_mask(lengths, codes)
    codes, signal = without_padding(codes, padding), without_padding(signal, padding)
    mixed = symmetric_attention_reference(codes @ dictionary.mT, codes, scale=scale, lengths=lengths)
    residual = signal - mixed @ dictionary.mT
    next_codes = shrink_reference(mixed + step * residual @ dictionary, threshold, nonlinearity)
    return next_codes, next_codes @ (dictionary if next_dictionary is None else next_dictionary).mT
