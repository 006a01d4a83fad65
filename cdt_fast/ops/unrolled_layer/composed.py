"""The unrolled layer from other ops, where it is too large to run as one."""

from __future__ import annotations

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import UnrolledLayerArguments
from cdt_fast.kernels.blocks import LONGEST, WIDEST
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss
from cdt_fast.ops.residual_linear import residual_linear
from cdt_fast.ops.shared.checks import padding_mask, without_autocast, without_padding
from cdt_fast.ops.symmetric_attention import symmetric_attention

# Beyond this many bytes plain torch does not hold the scores of all sequences at once.
HELD_SCORE_BYTES = 64 * 2**20


def runs_as_one(layer: UnrolledLayerArguments) -> bool:
    """Whether one operator computes the layer: where a tile of its kernel holds it, or plain torch all its scores."""
    (batch, tokens, width), following = layer.signal.shape, layer.next_dictionary
    if layer.backend == "torch":
        return batch * tokens**2 * max(4, layer.signal.element_size()) <= HELD_SCORE_BYTES
    widest = width if following is None else max(width, following.shape[0])
    return fused_unsupported_reason(tokens, widest, layer.signal.dtype) is None


def fused_unsupported_reason(tokens: int, widest: int, dtype: torch.dtype) -> str | None:
    """Why no kernel holds the whole layer in its tiles, or None where one does.

    `tokens` are those of a sequence; `widest` is the greater width, of the signal or of the next projection.
    """
    if dtype.itemsize != 2:
        return "tiles of float32 leave no shared memory for the dictionary"
    if tokens > LONGEST:
        return f"a tile holds sequences of up to {LONGEST} tokens, got {tokens}"
    return f"a tile holds patches of up to {WIDEST} pixels, got {widest}" if widest > WIDEST else None


def layer_of_ops(layer: UnrolledLayerArguments) -> tuple[Tensor, Tensor, Tensor | None]:
    """H⁺ `[B, T, m]`, Z⁺ `[B, T, k]`, and the squared error (None without a target)."""
    codes, target, lengths, dtype = layer.codes, layer.target, layer.lengths, layer.signal.dtype
    padding = padding_mask(lengths, layer.signal)
    dictionary = layer.dictionary.to(dtype)
    next_dictionary = dictionary if layer.next_dictionary is None else layer.next_dictionary.to(dtype)
    with without_autocast(layer.signal):
        projection, residual = layer.projection, without_padding(layer.signal, padding)
        if projection is None:
            assert codes is not None  # without them there is a projection
            projection = without_padding(codes, padding) @ dictionary.mT
        alone = residual.shape[-2] == 1  # of one token A is 1
        if codes is None:
            mixed = residual.new_zeros(dictionary.shape[1])
            if alone:
                residual = torch.lerp(without_padding(projection, padding), residual, 2.0)
            else:
                values = residual - without_padding(projection, padding)
                residual = residual + symmetric_attention(projection, values, scale=layer.scale, lengths=lengths)
        elif alone:
            mixed, residual = without_padding(codes, padding), residual - without_padding(projection, padding)
        else:
            mixed = symmetric_attention(projection, codes, scale=layer.scale, lengths=lengths)
            residual = residual - symmetric_attention(projection, scale=layer.scale, lengths=lengths)
        next_codes = residual_linear(
            residual,
            dictionary,
            mixed,
            alpha=layer.step,
            nonlinearity=layer.nonlinearity,
            threshold=layer.threshold,
        )
        next_projection = next_codes @ next_dictionary.mT
    if target is None:
        return next_codes, next_projection, None
    tokens = next_codes.shape[:-1].numel()
    if not tokens:
        return next_codes, next_projection, next_projection.sum(dtype=torch.promote_types(dtype, torch.float32))
    target = without_padding(target, padding)
    if target.dtype == torch.float64 and dtype != torch.float64:
        target = target.float()  # no kernel reads float64, and the error is not summed in it
    _, per_token = layerwise_reconstruction_loss([next_projection], target)
    return next_codes, next_projection, per_token[0] * tokens
