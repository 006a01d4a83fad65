"""The layer of a denoiser: energy attention over time, then shrinkage of the mean's codes (docs/ops.md §4)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdt_fast.ops import common, operators
from cdt_fast.ops.unrolled_layer import for_card, unfused_reason


class DenoisedTokens(NamedTuple):
    """The outputs of one layer."""

    tokens: Tensor  # Y, [..., T, n]
    variance: Tensor  # v, [..., T]


def denoising_layer(
    signal: Tensor,
    features: Tensor,
    dictionary: Tensor,
    thresholds: Tensor,
    *,
    scale: Tensor,
    self_bias: Tensor,
    sharpness: Tensor,
    factor: Tensor | None = None,
) -> DenoisedTokens:
    """Average each token with those that look alike, and shrink the codes of the mean by the noise that is left in it.

        A = softmax_rows(β (E Eᵀ − ½ 1 ‖e_j‖²) − δ I),   ρ_i = ‖A_i‖₂,   C = (A W) D,
        H = C ∘ G,   G_ij = sigmoid(κ (C_ij² / (ρ_i f t_j)² − 1)),   Y = H Dᵀ,   v_i = ρ_i² Σ_j G_ij²

    Up to a factor of the row A_ij is `exp(−½ β ‖e_i − e_j‖²)`: what is alike is averaged, what is not left alone. White
    noise of deviation 1 in W has the deviation ρ_i in the mean, and in the output the variance v_i.

    Args:
        signal: W, `[..., T, n]`, what is averaged, in units of the noise's deviation.
        features: E, `[..., T, n]`, an estimate of what is below the noise, whose distances say what is alike.
        dictionary: D, `[n, m]`, with `D Dᵀ = I` where a code that is kept is to keep the signal.
        thresholds: t > 0, `[m]`, one an atom.
        scale: β > 0, `[]`, or `[...]`, one a sequence.
        self_bias: δ, `[]`, taken from each token's score with itself: where the features are noisy, their distances
            to others are too great by twice the noise's variance, that to themselves is not.
        sharpness: κ > 0, `[]`; towards ∞ the shrinkage is a hard threshold.
        factor: f > 0, `[...]`, of the thresholds in each sequence; None: 1.

    Returns:
        A named tuple: the tokens and the variance of the noise that is left in each, in the dtype of the arguments
        (under autocast: autocast's dtype). The kernels compute the layer again in the backward, for which only the
        arguments are kept.

    InputError: an argument has the wrong rank, shape, dtype or device, or a second derivative is asked of the kernels.
    """
    common.check_tensor("signal", signal, 2, "[..., T, n]")
    common.check_tensor("features", features, 2, "[..., T, n]", signal.shape, "as signal")
    shape = signal.shape[-1], None
    common.check_tensor("dictionary", dictionary, 2, "[n, m]", shape, "width of signal by any width")
    common.check_tensor("thresholds", thresholds, 1, "[m]", dictionary.shape[1:], "one an atom")
    factor = torch.ones_like(scale) if factor is None and isinstance(scale, Tensor) else factor
    given = {"scale": scale, "factor": factor, "self_bias": self_bias, "sharpness": sharpness}
    for name, number in given.items():
        common.check_tensor(name, number, 0, "of one number")
        many = name in ("scale", "factor") and number.dim()
        expected = (tuple(signal.shape[:-2]), "one a sequence") if many else ((), "a number")
        common.check_shape(name, number, *expected)
    common.check_together(signal=signal, features=features, dictionary=dictionary, thresholds=thresholds, **given)
    common.refuse_transforms("denoising_layer", signal, features, dictionary, thresholds, *given.values())
    dtype = common.compute_dtype(signal)
    rows, alike = common.sequences(signal, dtype), common.sequences(features, dtype)
    widths = rows.shape[2], dictionary.shape[1], rows.shape[2]
    fits = unfused_reason(rows.shape[1], widths, dtype, rows.device) is None
    numbers = torch.stack([given[name].reshape(-1).expand(rows.shape[0]) for name in ("scale", "factor")], 1)
    tensors = rows, alike, dictionary, thresholds, numbers, torch.stack((self_bias, sharpness))
    if fits and common.choose_backend("denoising_layer", rows, multiplies=True) == "triton":
        tokens, variance = _layer(*tensors)
    else:
        with common.without_autocast(rows):
            recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            # A compiler fuses the formula, and in float16 codes by the unit of a small threshold may overflow.
            blocked = not recorded and dtype != torch.float16 and common.is_plain_eager(*tensors)
            tokens, variance = (_inference if blocked else _formula)(*tensors)
    return DenoisedTokens(tokens.view(signal.shape), variance.view(signal.shape[:-1]))


def denoising_layer_reference(
    signal: Tensor,
    features: Tensor,
    dictionary: Tensor,
    thresholds: Tensor,
    scale: Tensor,
    self_bias: Tensor,
    sharpness: Tensor,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the formula of `denoising_layer`, in any dtype, differentiated by torch."""
    wide = torch.promote_types(signal.dtype, torch.float32)
    scale, self_bias, sharpness = scale.to(wide), self_bias.to(wide), sharpness.to(wide)
    factor = scale.new_ones(1, 1) if factor is None else factor.to(wide)[..., None, None]
    attention = _attention(features, scale, self_bias)
    left = attention.square().sum(-1, keepdim=True)  # ρ²
    codes = (attention.to(signal.dtype) @ signal) @ dictionary
    gate = torch.sigmoid(sharpness * (codes.to(wide).square() / (left * (factor * thresholds.to(wide)).square()) - 1))
    tokens = (codes * gate.to(codes.dtype)) @ dictionary.mT
    return tokens, (left.squeeze(-1) * gate.square().sum(-1)).to(signal.dtype)


def _attention(features: Tensor, scale: Tensor, self_bias: Tensor) -> Tensor:
    features = features.to(scale.dtype)  # large numbers, of which 16 bits would round away the distances
    products = features @ features.mT
    scores = products - 0.5 * torch.diagonal(products, dim1=-2, dim2=-1).unsqueeze(-2)
    own = torch.eye(products.shape[-1], dtype=scale.dtype, device=products.device)
    return torch.softmax(scale[..., None, None] * scores - self_bias * own, -1)


# Numbers are β and f of each sequence, `[B, 2]`, parameters δ and κ, `[2]`

_CACHED = 2**17  # numbers that a CPU computes at once without gradients, as its caches hold; a GPU takes all


def _formula(
    signal: Tensor, features: Tensor, dictionary: Tensor, thresholds: Tensor, numbers: Tensor, parameters: Tensor
) -> tuple[Tensor, Tensor]:
    # Through rounded factors of the thresholds their gradient would lose digits.
    (scale, factor), (self_bias, sharpness) = numbers.unbind(1), parameters
    tensors = signal, features, dictionary.to(signal.dtype), thresholds
    return denoising_layer_reference(*tensors, scale, self_bias, sharpness, factor)


def _inference(
    signal: Tensor, features: Tensor, dictionary: Tensor, thresholds: Tensor, numbers: Tensor, parameters: Tensor
) -> tuple[Tensor, Tensor]:
    """Return as the formula, of codes in units of ρ f t / √κ: in half the passes over them."""
    wide = torch.promote_types(signal.dtype, torch.float32)
    (scale, factor), (self_bias, sharpness) = numbers.to(wide).unbind(1), parameters.to(wide)
    attention = _attention(features, scale, self_bias)
    left = attention.square().sum(-1, keepdim=True)
    unit, units = left.sqrt() * factor[:, None, None], thresholds.to(wide) / sharpness.sqrt()
    analysis, synthesis = ((dictionary.to(wide) * each).to(signal.dtype) for each in (1 / units, units))
    tokens, variance, highest = torch.empty_like(signal), torch.empty_like(left[..., 0]), -sharpness.to(signal)
    parts = signal, (attention / unit).to(signal.dtype), unit.to(signal.dtype), tokens, variance
    count = max(1, _CACHED * len(signal) // max(1, signal.numel())) if signal.device.type == "cpu" else len(signal)
    # The same memory for all, which is in the caches: products write into it a sixth faster.
    widths = (signal.shape[2], *2 * analysis.shape[1:])
    means, codes, gates = (signal.new_empty(count, signal.shape[1], width) for width in widths)
    for rows, shares, deviation, found, spread in zip(*(part.split(count) for part in parts), strict=True):
        mean, ratios, gate = (each[: len(rows)] for each in (means, codes, gates))
        torch.matmul(torch.matmul(shares, rows, out=mean), analysis, out=ratios)
        torch.addcmul(highest, ratios, ratios, out=gate).sigmoid_()
        torch.matmul(ratios.mul_(gate), synthesis.mT, out=found).mul_(deviation)
        torch.linalg.vector_norm(gate, dim=-1, dtype=wide, out=spread)
    return tokens, (left.squeeze(-1) * variance.square()).to(signal.dtype)


# On a GPU, in one kernel each way


@common.outside_autocast
def _forward(
    signal: Tensor,  # W, [B, T, n], contiguous
    features: Tensor,  # E, likewise
    dictionary: Tensor,  # D, [n, m], maybe of a wider dtype
    thresholds: Tensor,  # t, [m]
    numbers: Tensor,  # β, f, [B, 2]
    parameters: Tensor,  # δ, κ, [2]
) -> tuple[Tensor, Tensor]:
    """Return the tokens and their variance `[B, T]`."""
    with common.or_plain_torch("denoising_layer", signal) as kernels:
        matrices = for_card(signal, features, dictionary.to(signal.dtype).contiguous())
        blocks, processors = common.blocks_for(kernels.BLOCKS, signal), common.card_of(signal).processors
        small = thresholds.float().contiguous(), numbers.float(), parameters.float()
        tokens, variance = kernels.forward(*matrices, *small, processors, blocks)
        return tokens, variance.to(signal.dtype)
    return _formula(signal, features, dictionary, thresholds, numbers, parameters)


def _forward_fake(signal: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(signal), signal.new_empty(signal.shape[:2])


@operators.gradients_of("denoising_layer", lambda *arguments: arguments[:6])
@common.outside_autocast
def _gradients(
    signal: Tensor,
    features: Tensor,
    dictionary: Tensor,
    thresholds: Tensor,
    numbers: Tensor,
    parameters: Tensor,
    grad_tokens: Tensor | None,
    grad_variance: Tensor | None,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of the first six arguments."""
    tensors = signal, features, dictionary, thresholds, numbers, parameters
    with common.or_plain_torch("denoising_layer", signal) as kernels:
        low = dictionary.to(signal.dtype).contiguous()
        *matrices, grad_tokens = for_card(signal, features, low, grad_tokens)
        upstream = grad_tokens, None if grad_variance is None else grad_variance.float()
        blocks, processors = common.blocks_for(kernels.BACKWARD_BLOCKS, signal), common.card_of(signal).processors
        small = thresholds.float().contiguous(), numbers.float(), parameters.float()
        *firsts, grad_dictionary = kernels.backward(*matrices, *small, *upstream, needs[2], processors, blocks)
        found = *firsts[:2], grad_dictionary, *firsts[2:]
        return [None if each is None else each.to(of.dtype) for each, of in zip(found, tensors, strict=True)]
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        outputs = _formula(*leaves)
    kept = [grad is not None for grad in (grad_tokens, grad_variance)]
    grads = operators.compress((grad_tokens, grad_variance), kept)
    return list(torch.autograd.grad(operators.compress(outputs, kept), leaves, grads))


def _backward(ctx: Any, *grads: Tensor | None) -> list[Tensor | None]:
    upstream: Any = (None if grad is None else grad.contiguous() for grad in grads)
    return _gradients(*ctx.saved_tensors, *upstream, list(ctx.needs_input_grad))


_layer = operators.differentiable(
    *("denoising_layer", _forward, _forward_fake), lambda ctx, inputs, output: ctx.save_for_backward(*inputs), _backward
)
