"""The formula of `unrolled_layer`."""

from __future__ import annotations

from torch import Tensor

from cdt_fast.ops.shared.checks import padding_mask, without_padding
from cdt_fast.ops.soft_threshold.reference import shrink_reference
from cdt_fast.ops.symmetric_attention.reference import symmetric_attention_reference


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
    """The layer written out, without the identity: four large products, in any dtype, differentiated by torch."""
    if codes is None:
        codes = step * signal @ dictionary
    padding = padding_mask(lengths, codes)
    codes, signal = without_padding(codes, padding), without_padding(signal, padding)
    mixed = symmetric_attention_reference(codes @ dictionary.mT, codes, scale=scale, lengths=lengths)
    residual = signal - mixed @ dictionary.mT
    next_codes = shrink_reference(mixed + step * residual @ dictionary, threshold, nonlinearity)
    return next_codes, next_codes @ (dictionary if next_dictionary is None else next_dictionary).mT
