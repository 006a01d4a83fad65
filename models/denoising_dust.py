"""DUST with energy attention over time, for video with noise of a known deviation (docs/ops.md §4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.checks import InputError, check_integer
from cdt_fast.models.dictionary import tight_cosines
from cdt_fast.models.pretrained import PretrainedModel
from cdt_fast.ops import common

# What training starts from. The first layer's features are the noisy tokens themselves, whose distances say little: it
# is a transform with thresholds, at the customary 2.7 deviations. The later ones add a part of the noise again to an
# almost clean estimate; 3.5 deviations of that part are what a transform gains most by there.
_SCALE, _FIRST_SELF_BIAS, _FIRST_THRESHOLD, _THRESHOLD = 64.0, 32.0, 2.7, 3.5
_STEP, _SHARPNESS, _EXPONENT = 0.3, 30.0, 0.5
# Variance of a token of which nothing is kept: its mean is not exact either.
_LEAST_VARIANCE = 0.1
_DICTIONARY_RATE = 0.03


class DenoisingDUST(PretrainedModel):
    """A denoiser whose layers average what is alike over time, and shrink the codes of the mean by the noise in it.

        W = E + s (X − E),   A = softmax_rows(β (E Eᵀ − ½ 1 ‖e_j‖²) − δ I),   H = gate((A W) D),   E⁺ = H Dᵀ

    in units of the noise's deviation and less each sequence's mean: one model serves every level. With `E = H Dᵀ`
    and `D Dᵀ = I` the first line is DUST's `A H + s (X − A Z) D`, but for the residual, which is averaged too. The
    estimate E may be changed between layers: overlapping patches are made to agree.

    Args:
        patch: side in pixels of the square patches.
        patch_frames: frames of a token, of n = patch_frames · patch² numbers, one square after the other.
        code_size: m ≥ n, atoms of a dictionary; None: n.
        layers: L ≥ 1.

    Attributes:
        dictionary: parameter `[L, n, m]`, a tight frame of cosines before training.
        log_thresholds: parameter `[L, m]`, in units of the noise that is left in a token of W.
        step_logits: parameter `[L − 1]`; s = sigmoid of it is the part of the input in W, from layer 2 on.
        log_scales, self_biases, log_sharpnesses: parameters `[L]`: β n, δ and κ, as in `ops.denoising_layer`.
        exponents: parameter `[L]`, with which the variance left in a token makes its weight in a mean over patches.
        adaptations: parameter `[L, 3, 2]`, 0 before training: what the two measures of a sequence, log₁₀(1 + p) of its
            mean square p and of its variance over time, less the noise's, add to log t, log β and the logit of s.

    InputError: an argument out of its range.
    """

    ARGUMENTS = ("patch", "patch_frames", "code_size", "layers")

    def __init__(self, patch: int = 8, patch_frames: int = 4, code_size: int | None = None, layers: int = 3) -> None:
        super().__init__()
        self.patch, self.layers = check_integer("patch", patch, 1), check_integer("layers", layers, 1)
        self.patch_frames = check_integer("patch_frames", patch_frames, 1)
        self.patch_size = patch_frames * patch * patch
        self.code_size = code_size = self.patch_size if code_size is None else check_integer("code_size", code_size, 1)
        if code_size < self.patch_size:
            raise InputError(f"code_size must be at least the {self.patch_size} pixels of a patch, got {code_size}")
        initial = tight_cosines(self.patch_size, code_size, patch_frames).to(torch.get_default_dtype())
        # Of a tight frame of unit operator norm the atoms are shorter than 1, and so is the noise in their codes.
        deviation = initial.square().sum(0).mean().sqrt()
        thresholds = deviation * initial.new_tensor([_FIRST_THRESHOLD] + [_THRESHOLD] * (layers - 1))
        biases = initial.new_tensor([_FIRST_SELF_BIAS] + [0.0] * (layers - 1))
        self.dictionary = nn.Parameter(initial.repeat(layers, 1, 1))
        self.log_thresholds = nn.Parameter(thresholds.log().unsqueeze(1).repeat(1, code_size))
        self.step_logits = nn.Parameter(initial.new_full((layers - 1,), _STEP).logit())
        self.log_scales = nn.Parameter(initial.new_full((layers,), _SCALE).log())
        self.self_biases = nn.Parameter(biases)
        self.log_sharpnesses = nn.Parameter(initial.new_full((layers,), _SHARPNESS).log())
        self.exponents = nn.Parameter(initial.new_full((layers,), _EXPONENT))
        self.adaptations = nn.Parameter(initial.new_zeros(layers, 3, 2))

    @torch.no_grad()
    def noise_in_codes(self, blur: tuple[float, float]) -> Tensor:
        """Return the deviation `[L, m]` of the noise in each code, in units of that of white noise as strong, where the
        noise is white noise after the filters `[a, 1 − 2a, a]`; `blur` is the a along rows and that along columns."""
        places = torch.eye(self.patch + 2).to(self.dictionary)
        across, down = (a * places[:-2] + (1 - 2 * a) * places[1:-1] + a * places[2:] for a in blur)
        atoms = self.dictionary.unflatten(1, (-1, self.patch, self.patch))
        blurred = torch.einsum("lfrcm,ri,cj->lfijm", atoms, down, across).flatten(1, 3)
        return blurred.norm(dim=1) / (self.dictionary.norm(dim=1) * across[0].norm() * down[0].norm())

    def refinement(
        self, noisy: Tensor, noise_in_codes: Tensor | None = None
    ) -> Callable[[int, Tensor], tuple[Tensor, Tensor]]:
        """Return a function that runs one layer, from 1 to L, on an estimate E `[B, T, n]` (at first `noisy`, X), in
        units of the noise's deviation, and returns the next one and a weight `[B, T]` of each token in a mean.
        `noise_in_codes` `[L, m]` are factors of the thresholds; None: 1, for white noise."""
        common.check_tensor("noisy", noisy, 3, "[B, T, n]", (None, None, self.patch_size), "as the model's patch")
        mean, dtype = noisy.mean((1, 2), keepdim=True), common.compute_dtype(noisy)
        signal = (noisy - mean).to(dtype)

        def refine(level: int, estimate: Tensor) -> tuple[Tensor, Tensor]:
            check_integer("level", level, 1, self.layers)
            common.check_shape("estimate", estimate, tuple(noisy.shape), "as noisy")
            layer, features = level - 1, estimate - mean
            changes = self.adaptations[layer].unsqueeze(2) * _measures(features, 1.0 if level == 1 else 0.0)
            factor, scale, step = changes.sum(1).unbind()
            mixed, factor, features = signal, factor.exp(), features.to(dtype)
            if level > 1:
                step = (self.step_logits[layer - 1] + step).sigmoid()
                mixed, factor = torch.lerp(features, signal, step.to(dtype)[:, None, None]), step * factor
            thresholds = self.log_thresholds[layer].exp()
            found = ops.denoising_layer(
                mixed,
                features,
                self.dictionary[layer],
                thresholds if noise_in_codes is None else thresholds * noise_in_codes[layer],
                scale=(self.log_scales[layer] + scale).exp() / self.patch_size,
                self_bias=self.self_biases[layer],
                sharpness=self.log_sharpnesses[layer].exp(),
                factor=factor,
            )
            weight = (found.variance.to(mean) + _LEAST_VARIANCE) ** -self.exponents[layer]
            return found.tokens.to(mean).add_(mean), weight

        return refine

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameters as an optimizer takes them, with factors of their learning rates: those of a dictionary
        move less."""
        others = [parameter for name, parameter in self.named_parameters() if name != "dictionary"]
        return [{"params": others, "factor": 1.0}, {"params": [self.dictionary], "factor": _DICTIONARY_RATE}]


@torch.no_grad()
def _measures(tokens: Tensor, noise: float) -> Tensor:
    """Return the two measures `[2, B]` of sequences `[B, T, n]` with so much noise, constants in the backward."""
    (count, size), wide = tokens.shape[1:], torch.promote_types(tokens.dtype, torch.float32)  # float16 holds no square
    both = tokens, tokens.sum(1, keepdim=True, dtype=wide)
    squares = (torch.linalg.vector_norm(each, dim=(1, 2), dtype=wide).square() for each in both)
    power, lasting = (square / (count * size) for square in squares)
    found = torch.stack([power, (power - lasting / count) * (count / max(1, count - 1))])
    return (1 + (found - noise).clamp(min=0)).log10().to(tokens.dtype)
