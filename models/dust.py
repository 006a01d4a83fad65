"""DUST: the deep unrolled sparse transformer for sequences of image patches (docs/ops.md §4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.checks import InputError, check_choice, check_integer
from cdt_fast.models.dictionary import overcomplete_dct, squared_spectral_norm
from cdt_fast.models.pretrained import PretrainedModel
from cdt_fast.ops import common

READOUTS = ("own", "next")


class DUST(PretrainedModel):
    """A denoiser whose every layer refines a sparse code of the patches, and can be read as a reconstruction.

        H_0 = (1/c) X D,   H_l = S_θ(A H_{l−1} + (1/c)(X − A Z) D),   Z = H_{l−1} Dᵀ,   A = softmax_rows(β Z Zᵀ)

    Args:
        patch_size: n, pixels of a patch (a square number where patches are square).
        code_size: m, atoms of a dictionary.
        layers: L ≥ 1.
        tied: one dictionary for all layers, else one a layer.
        sparsity: λ₁ ≥ 0; the threshold is θ = λ₁ · step.
        step: 1/c; None: 1/‖D‖₂² of the initial dictionary, the largest that makes LISTA a descent method. It stays
            fixed while the dictionaries train.
        scale: β of the attention.
        readout: the dictionary that turns the codes of depth l into a reconstruction: "own" (layer l's; depth 0 reads
            with layer 1's) or "next" (layer l+1's, the projection that the next layer needs anyway; depth L reads with
            layer L's). A tied model has one dictionary for both.

    Attributes:
        dictionary: parameter, `[n, m]` if tied, else `[layers, n, m]`. It starts as cosines.
        step, threshold, scale: 1/c, θ and β.

    InputError: an argument out of its range.
    """

    ARGUMENTS = ("patch_size", "code_size", "layers", "tied", "sparsity", "step", "scale", "readout")
    NONLINEARITY: ClassVar[common.LayerNonlinearity] = "soft_threshold"

    def __init__(
        self,
        patch_size: int = 256,
        code_size: int = 1024,
        layers: int = 5,
        *,
        tied: bool = False,
        sparsity: float = 0.2,
        step: float | None = None,
        scale: float = 1.0,
        readout: str = "own",
    ) -> None:
        super().__init__()
        sizes = {"patch_size": patch_size, "code_size": code_size, "layers": layers}
        self.patch_size, self.code_size, self.layers = (check_integer(name, sizes[name], 1) for name in sizes)
        self.tied = bool(tied)
        initial = overcomplete_dct(patch_size, code_size)
        largest = 1.0 / squared_spectral_norm(initial).item()
        self.step = common.check_factor("step", largest if step is None else step)
        if self.step <= 0:
            raise InputError(f"step must be above 0, got {step!r}")
        self.sparsity = common.check_factor("sparsity", sparsity, non_negative=True)
        self.scale = common.check_factor("scale", scale)
        self.readout = check_choice("readout", readout, READOUTS)
        self.threshold = self.sparsity * self.step
        initial = initial.to(torch.get_default_dtype())
        self.dictionary = nn.Parameter(initial.clone() if tied else initial.repeat(layers, 1, 1))

    def forward(self, noisy: Tensor, depth: int | None = None) -> Tensor:
        """Return the reconstruction `[..., T, n]` of `noisy` `[..., T, n]` after `depth` layers (None: all of them).

        Depth 0 reads the initial codes; later layers cost nothing. InputError: a wrong shape, or no depth in 0..layers.
        """
        depth = self.layers if depth is None else check_integer("depth", depth, 0, self.layers)
        self._check(noisy)
        *_, (reconstruction, _) = self._depths(noisy, depth, read_all=False)
        return reconstruction

    def reconstructions(self, noisy: Tensor) -> list[Tensor]:
        """Return the reconstructions of all depths 0..L, L+1 tensors of the shape of `noisy` `[..., T, n]`."""
        self._check(noisy)
        return [reconstruction for reconstruction, _ in self._depths(noisy, self.layers, read_all=True)]

    def layer_losses(
        self, noisy: Tensor, clean: Tensor, depth_weights: Tensor | Sequence[float] | None = None
    ) -> common.LayerwiseLosses:
        """Return the losses of all depths against `clean` `[..., T, n]`, sums over a patch, and their weighted sum.

        See `ops.layerwise_reconstruction_loss` for what is differentiable (less `clean`), and for `depth_weights`. Used
        as `total, losses = model.layer_losses(noisy, clean, constraints.weights())`. While gradients are formed `clean`
        is read in the dtype of the products: under autocast it is rounded to 16 bits. InputError: no token, a wrong
        shape, or `clean` requires a gradient.
        """
        self._check(noisy)
        common.check_tensor("clean", clean, 2, "[..., T, n]", noisy.shape, "as noisy")
        if not (tokens := math.prod(clean.shape[:-1])):
            raise InputError(f"clean must hold at least one token, got shape {tuple(clean.shape)}")
        if torch.is_grad_enabled():
            if clean.requires_grad:
                raise InputError(
                    "clean must not require a gradient here: detach it, or call the op with `reconstructions`"
                )
            clean = clean.to(common.compute_dtype(clean))  # once: every layer reads it, forward and backward
        weights = common.weights_of_depths(depth_weights, self.layers + 1)
        depths = list(self._depths(noisy, self.layers, read_all=True, clean=clean))
        # Depth 0 has no layer of its own to form its error in.
        _, first = ops.layerwise_reconstruction_loss([depths[0][0]], clean, reduction="sum")
        errors = [first.squeeze(0), *(error for _, error in depths[1:] if error is not None)]
        per_depth = torch.stack(errors) / tokens
        if weights is None or depth_weights is None:
            return common.LayerwiseLosses(per_depth.sum(), per_depth)
        if isinstance(depth_weights, Tensor):
            return common.LayerwiseLosses(torch.dot(weights.to(per_depth), per_depth), per_depth.detach())
        # Numbers of the host multiply where they are: no copy to the device, and no backward for a depth of weight 0.
        numbers = map(float, depth_weights)
        counted = [weight / tokens * error for weight, error in zip(numbers, errors, strict=True) if weight]
        return common.LayerwiseLosses(torch.stack(counted or [0 * errors[-1]]).sum(), per_depth.detach())

    def _check(self, noisy: Tensor) -> None:
        common.check_tensor("noisy", noisy, 2, "[..., T, n]")
        common.check_shape("noisy", noisy, (*noisy.shape[:-1], self.patch_size), "tokens by the model's patch_size")
        common.check_together(noisy=noisy, dictionary=self.dictionary)

    def _depths(
        self, noisy: Tensor, depth: int, read_all: bool, clean: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the projection of every depth, each a reconstruction if `read_all`, else only the last; with `clean`
        also its squared error, for the depths whose layer forms it."""
        noisy = noisy.to(common.compute_dtype(noisy))  # once, not in every layer
        own_dictionary = self.dictionary  # read once: a parametrization may draw it anew at every access
        # Each with its cast, which is made once for all layers; they form the gradient in the parameter's own dtype.
        if self.tied:
            # As rows of one tensor, so that their gradients are added up at once.
            rows = own_dictionary.expand(self.layers, -1, -1).unbind()
            tied = own_dictionary.to(noisy.dtype)
            casts = [tied.detach()] * self.layers
        else:
            rows, tied = own_dictionary.unbind(), None
            casts = own_dictionary.detach().to(noisy.dtype).unbind()
        dictionaries = [*zip(rows, casts, strict=True)]
        # The dictionary that each depth is projected on; the next layer takes the projection where it is its own.
        own = [dictionaries[0], *dictionaries]
        following = own if self.tied else [*dictionaries, dictionaries[-1]]
        readouts = own if self.readout == "own" else following
        projected_on = (readouts if read_all else [*following[:depth], readouts[depth]])[: depth + 1]
        codes: Tensor | None = None
        first = dictionaries[0][0].to(noisy.dtype) if tied is None else tied
        reconstruction = noisy @ (self.step * (first @ first.mT))  # H_0 = (1/c) X D is never formed
        yield reconstruction, None
        for level in range(1, depth + 1):
            dictionary, cast = dictionaries[level - 1]
            handed_on = projected_on[level - 1][1] is cast
            codes, reconstruction, error = ops.unrolled_layer(
                codes,
                noisy,
                dictionary,
                step=self.step,
                threshold=self.threshold,
                scale=self.scale,
                nonlinearity=self.NONLINEARITY,
                projection=reconstruction if handed_on else None,
                next_dictionary=projected_on[level][0],
                target=clean,
                casts=(cast, projected_on[level][1]),
            )
            yield reconstruction, error


class VideoUT(DUST):
    """UT, the unrolled transformer of Yang et al., for video: `DUST` with ReLU in place of the shrinkage.

    Arguments, attributes and methods are those of `DUST`, less `sparsity`.
    """

    ARGUMENTS = tuple(name for name in DUST.ARGUMENTS if name != "sparsity")
    NONLINEARITY = "relu"

    def __init__(self, patch_size: int = 256, code_size: int = 1024, layers: int = 5, **options: Any) -> None:
        super().__init__(patch_size, code_size, layers, sparsity=0.0, **options)
