"""The unrolled layer: attention, LISTA residual, shrinkage and the next projection (docs/maths.md §7)."""

from __future__ import annotations

from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import UnrolledLayerArguments
from cdt_fast.ops.shared.backend import choose_backend
from cdt_fast.ops.shared.checks import (
    LayerNonlinearity,
    check_factor,
    check_lengths,
    check_lista_arguments,
    check_shape,
    check_tensor,
    check_together,
    compute_dtype,
    length_of_each,
    padding_mask,
    sequences,
    without_padding,
)
from cdt_fast.ops.soft_threshold.plain import effective_nonlinearity
from cdt_fast.ops.unrolled_layer.composed import layer_of_ops, runs_as_one
from cdt_fast.ops.unrolled_layer.operator import layer_as_one
from cdt_fast.ops.unrolled_layer.reference import unrolled_layer_reference

__all__ = ["unrolled_layer", "unrolled_layer_reference"]


def unrolled_layer(
    codes: Tensor | None,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float = 1.0,
    nonlinearity: LayerNonlinearity = "soft_threshold",
    projection: Tensor | None = None,
    lengths: Tensor | None = None,
    next_dictionary: Tensor | None = None,
    target: Tensor | None = None,
    casts: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, ...]:
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
        nonlinearity: "soft_threshold", or in its place "hard_threshold" for `v [|v| > θ]` or "relu" for `max(v, 0)`.
        projection: Z = `codes @ dictionary.T`, `[..., T, n]`, where the caller has it already; it is not checked. Its
            gradient flows to the tensor given.
        lengths: `[...]` integers, the number of tokens that count in each sequence; results are zero at padding.
        next_dictionary: D⁺, `[k, m]`, default `dictionary`.
        target: S, `[..., T, k]` in any dtype, what `Z⁺` is to reconstruct. It gets no gradient.
        casts: `dictionary` and `next_dictionary` in the dtype of the products, contiguous, where the caller has them
            already (a network casts each once, not in every layer); they are not checked, and get no gradient.

    Returns:
        The next codes `[..., T, m]` and their projection `[..., T, k]`, in the dtype of the arguments (under autocast:
        autocast's dtype). With a target also its squared error `Σ‖Z⁺ − S‖²` over all tokens that count, one number in
        at least float32, whose gradient joins that of `Z⁺` inside the layer's own backward.

    Raises:
        InputError: an argument has the wrong rank, shape, dtype, device or value, or a second derivative is asked for.
    """
    check_lista_arguments(codes, signal, dictionary, nonlinearity, rank=2)
    dtype = compute_dtype(signal)
    step = check_factor("step", step, non_negative=True, dtype=dtype)
    if projection is not None:
        check_tensor("projection", projection, 2, "[..., T, n]")
        check_shape("projection", projection, tuple(signal.shape), "as signal")
    if next_dictionary is dictionary:
        next_dictionary = None  # one gradient for the tied dictionary, not two to be added
    code_width = dictionary.shape[1]
    if next_dictionary is not None:
        check_tensor("next_dictionary", next_dictionary, 2, "[k, m]")
        check_shape("next_dictionary", next_dictionary, (next_dictionary.shape[0], code_width), "any by m")
    next_shape = (*signal.shape[:-1], (dictionary if next_dictionary is None else next_dictionary).shape[0])
    if target is not None:
        check_tensor("target", target, 2, "[..., T, k]")
        check_shape("target", target, next_shape, "the tokens of signal by the width of the next projection")
        if target.device != signal.device:
            raise InputError(f"target is on {target.device} but signal is on {signal.device}: move one of them")
    check_together(codes=codes, signal=signal, projection=projection, next_dictionary=next_dictionary)
    check_lengths(lengths, signal)
    if codes is None and projection is None:
        counted = without_padding(signal, padding_mask(lengths, signal))
        projection = counted @ (step * dictionary @ dictionary.mT)
    threshold = check_factor("threshold", threshold, non_negative=True, dtype=dtype)
    rows = sequences(signal, dtype)
    layer = UnrolledLayerArguments(
        codes=None if codes is None else sequences(codes, dtype),
        signal=rows,
        dictionary=dictionary,
        projection=None if projection is None else sequences(projection, dtype),
        next_dictionary=next_dictionary,
        narrow_dictionary=None if casts is None else casts[0],
        narrow_next_dictionary=None if casts is None or next_dictionary is None else casts[1],
        target=None if target is None else sequences(target.detach(), target.dtype),
        lengths=length_of_each(lengths),
        step=step,
        threshold=threshold,
        scale=check_factor("scale", scale, dtype=dtype),
        nonlinearity=effective_nonlinearity(nonlinearity, threshold),
        backend=choose_backend("unrolled_layer", rows, multiplies=True),
    )
    next_codes, next_projection, error = (layer_as_one if runs_as_one(layer) else layer_of_ops)(layer)
    outputs = next_codes.view(*signal.shape[:-1], code_width), next_projection.view(next_shape)
    return outputs if error is None else (*outputs, error)
