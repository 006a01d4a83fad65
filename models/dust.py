"""DUST: the deep unrolled sparse transformer for sequences of image patches (docs/ops.md §4)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.checks import InputError, check_choice, check_integer
from cdt_fast.models.dictionary import overcomplete_dct, squared_spectral_norm, tight_cosines
from cdt_fast.models.pretrained import PretrainedModel, check_depth
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
        sparsity: λ₁ ≥ 0, one number or one a layer; the threshold is θ = λ₁ · step, times the atoms' norm (root mean
            square), which is 1 but for a tight frame of m > n. A "relu" model has no threshold.
        step: 1/c, one number or one a layer; None: 1/‖D‖₂² of the initial dictionary, the largest that makes LISTA a
            descent method. It stays fixed while the dictionaries train; `spectral_ratio` says whether the bound holds.
        scale: β of the attention.
        nonlinearity: "soft_threshold", "hard_threshold" (`v [|v| > θ]`: what it keeps, it keeps as it is) or "relu".
        patch_frames: frames of a patch, whose pixels are `patch_frames` squares one after the other; only the initial
            dictionary depends on it.
        tight_frame: start from `dictionary.tight_cosines`, for which `D Dᵀ = I` and the step is 1, as
            `refinement` needs, and otherwise from the overcomplete DCT with atoms of norm 1; None: if patches have
            several frames.
        noise_adaptive: every method takes the noise's standard deviation σ, a number a sequence or one for all. The
            layers see each sequence less its mean μ (over tokens and pixels) in units of σ, `(X − μ) / σ`, and their
            output is scaled back. Step, threshold and scale are then in units of σ: one model serves every level.
        readout: the dictionary that turns the codes of depth l into a reconstruction: "own" (layer l's; depth 0 reads
            with layer 1's) or "next" (layer l+1's, the projection that the next layer needs anyway; depth L reads with
            layer L's). A tied model has one dictionary for both.

    Attributes:
        dictionary: parameter, `[n, m]` if tied, else `[layers, n, m]`. It starts as cosines.
        steps, thresholds: 1/c and θ of each layer.
        step, threshold, scale: 1/c and θ of the first, and β.

    Raises:
        InputError: an argument out of its range.
    """

    def __init__(
        self,
        patch_size: int = 256,
        code_size: int = 1024,
        layers: int = 5,
        *,
        tied: bool = False,
        sparsity: float | Sequence[float] = 0.2,
        step: float | Sequence[float] | None = None,
        scale: float = 1.0,
        nonlinearity: str = "soft_threshold",
        readout: str = "own",
        patch_frames: int = 1,
        noise_adaptive: bool = False,
        tight_frame: bool | None = None,
    ) -> None:
        super().__init__()
        sizes = {"patch_size": patch_size, "code_size": code_size, "layers": layers, "patch_frames": patch_frames}
        for name, value in sizes.items():
            check_integer(name, value, 1)
        self.tight_frame = patch_frames > 1 if tight_frame is None else bool(tight_frame)
        if self.tight_frame:
            initial = tight_cosines(patch_size, code_size, patch_frames)
        elif patch_frames == 1:
            initial = overcomplete_dct(patch_size, code_size)
        else:
            raise InputError(f"tight_frame must be true where patches have several frames, got {tight_frame!r}")
        self.patch_frames, self.noise_adaptive = patch_frames, bool(noise_adaptive)
        self.patch_size, self.code_size, self.layers, self.tied = patch_size, code_size, layers, bool(tied)
        largest = 1.0 / squared_spectral_norm(initial).item()
        self.steps = _of_each_layer("step", largest if step is None else step, layers)
        if min(self.steps) <= 0:
            raise InputError(f"step must be above 0, got {step!r}")
        self._sparsities = _of_each_layer("sparsity", sparsity, layers, non_negative=True)
        self.scale = common.check_factor("scale", scale)
        self.nonlinearity = check_choice("nonlinearity", nonlinearity, get_args(common.LayerNonlinearity))
        self.readout = check_choice("readout", readout, READOUTS)
        norm = 0.0 if nonlinearity == "relu" else initial.square().sum(0).mean().sqrt().item()
        products = map(operator.mul, self._sparsities, self.steps)
        self.thresholds = tuple(product * norm for product in products)
        self.sparsity, self.step, self.threshold = self._sparsities[0], self.steps[0], self.thresholds[0]
        initial = initial.to(torch.get_default_dtype())
        self.dictionary = nn.Parameter(initial.clone() if tied else initial.repeat(layers, 1, 1))

    @property
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the step as computed."""
        names = ("patch_size", "code_size", "layers", "tied", "sparsity", "step", "scale", "nonlinearity", "readout")
        config = {name: getattr(self, name) for name in (*names, "patch_frames", "tight_frame", "noise_adaptive")}
        for name, numbers in (("sparsity", self._sparsities), ("step", self.steps)):
            config[name] = numbers[0] if len(set(numbers)) == 1 else list(numbers)
        return config

    def forward(self, noisy: Tensor, depth: int | None = None, *, deviation: Tensor | float | None = None) -> Tensor:
        """Return the reconstruction `[..., T, n]` of `noisy` `[..., T, n]` after `depth` layers (None: all of them).

        Depth 0 reads the initial codes; later layers cost nothing.

        Args:
            noisy: the patches.
            depth: number of layers to run.
            deviation: σ > 0 of a noise-adaptive model, and of no other: a number, or `[...]`, one a sequence.

        Raises:
            InputError: `noisy` has the wrong shape, `depth` is not in 0..layers, or `deviation` does not fit the model.
        """
        depth = self.layers if depth is None else check_depth("depth", depth, 0, self.layers)
        units = self._units(noisy, deviation)
        *_, (reconstruction, _) = self._depths(_normalized(noisy, units), depth, read_all=False)
        return _restored(reconstruction, units)

    def reconstructions(self, noisy: Tensor, *, deviation: Tensor | float | None = None) -> list[Tensor]:
        """Return the reconstructions of all depths 0..L, L+1 tensors of the shape of `noisy` `[..., T, n]`."""
        units = self._units(noisy, deviation)
        depths = self._depths(_normalized(noisy, units), self.layers, read_all=True)
        return [_restored(reconstruction, units) for reconstruction, _ in depths]

    def refinement(self, noisy: Tensor, *, deviation: Tensor | float | None = None) -> Callable[[int, Tensor], Tensor]:
        """Return a function that runs one layer alone, from an estimate in place of codes.

            Z = E,  H = E D:    H⁺ = S_θ(A E D + (1/c)(X − A E) D) = S_θ(V D),    V = A E + (1/c)(X − A E),    x̂ = H⁺ Dᵀ

        It takes the layer l, from 1 to L, and the estimate E `[..., T, n]` (X itself before the first layer), and
        returns the reconstruction x̂ `[..., T, n]`. The codes H are E read backwards where `D Dᵀ = I`, as a tight frame
        starts. So the estimate may be changed between layers: overlapping patches are made to agree (docs/ops.md §4).

        Args:
            noisy: X, `[..., T, n]`.
            deviation: σ of a noise-adaptive model, as in `forward`.

        Raises:
            InputError: a shape is wrong, the layer is not in 1..layers, `deviation` does not fit the model, or it did
                not start from a tight frame: each layer would multiply the estimate by up to `‖D‖₂²`.
        """
        if not self.tight_frame:
            raise InputError("refinement needs codes that read as the estimate: build the model with tight_frame=True")
        units, dtype = self._units(noisy, deviation), common.compute_dtype(noisy)
        dictionaries = (self.dictionary,) * self.layers if self.tied else self.dictionary.unbind()
        signal = _normalized(noisy, units).to(dtype) if noisy.shape[-2] > 1 else None  # of one token A is 1

        def refine(level: int, estimate: Tensor) -> Tensor:
            check_depth("level", level, 1, self.layers)
            common.check_tensor("estimate", estimate, 2, "[..., T, n]")
            common.check_shape("estimate", estimate, tuple(noisy.shape), "as noisy")
            step = self.steps[level - 1]
            if signal is None:
                mixed = _normalized(torch.lerp(estimate, noisy, step), units).to(dtype)
            else:
                mixed = ops.symmetric_attention(_normalized(estimate, units).to(dtype), scale=self.scale)
                mixed = torch.lerp(mixed, signal, step)
            read = dictionaries[min(level, self.layers - 1)] if self.readout == "next" else None
            layer = ops.unrolled_layer(
                None,
                mixed,
                dictionaries[level - 1],
                step=1.0,
                threshold=self.thresholds[level - 1],
                nonlinearity=self.nonlinearity,
                projection=mixed,  # its own projection, of which attention changes nothing: the mixing is done
                next_dictionary=read,
            )
            return _restored(layer.projection, units)

        return refine

    def layer_losses(
        self,
        noisy: Tensor,
        clean: Tensor,
        depth_weights: Tensor | Sequence[float] | None = None,
        *,
        deviation: Tensor | float | None = None,
    ) -> common.LayerwiseLosses:
        """Return the losses of all depths against `clean` `[..., T, n]`, sums over a patch, and their weighted sum.

        See `ops.layerwise_reconstruction_loss` for what is differentiable. Used as
        `total, losses = model.layer_losses(noisy, clean, constraints.weights())`. Those of a noise-adaptive model are
        in units of σ², so that every noise level counts.

        Args:
            noisy, clean: `[..., T, n]`. While gradients are formed `clean` is read in the dtype of the products: under
                autocast it is rounded to 16 bits.
            depth_weights: L+1 numbers.
            deviation: σ of a noise-adaptive model.
        """
        units = self._units(noisy, deviation)
        common.check_tensor("clean", clean, 2, "[..., T, n]")
        common.check_shape("clean", clean, tuple(noisy.shape), "as noisy")
        noisy, clean = _normalized(noisy, units), _normalized(clean, units)
        if torch.is_grad_enabled():
            clean = clean.to(common.compute_dtype(clean))  # once: every layer reads it, forward and backward
        weights = common.weights_of_depths(depth_weights, self.layers + 1)
        depths = list(self._depths(noisy, self.layers, read_all=True, clean=clean))
        # Depth 0 has no layer of its own to form its error in.
        _, first = ops.layerwise_reconstruction_loss([depths[0][0]], clean, reduction="sum")
        tokens = clean.shape[:-1].numel()
        errors = [first.squeeze(0), *(error for _, error in depths[1:] if error is not None)]
        per_depth = torch.stack(errors) / tokens
        if weights is None:
            return common.LayerwiseLosses(per_depth.sum(), per_depth)
        if isinstance(depth_weights, Tensor):
            return common.LayerwiseLosses(torch.dot(weights.to(per_depth), per_depth), per_depth.detach())
        # Numbers of the host multiply where they are: no copy to the device, and no backward for a depth of weight 0.
        counted = [weight / tokens * error for weight, error in zip(weights.tolist(), errors, strict=True) if weight]
        return common.LayerwiseLosses(torch.stack(counted or [0 * errors[-1]]).sum(), per_depth.detach())

    def spectral_ratio(self) -> Tensor:
        """Return `‖D‖₂² / c` of each dictionary (`[]` if tied, else `[layers]`); above 1 LISTA may overshoot."""
        norm = squared_spectral_norm(self.dictionary)
        return norm * (max(self.steps) if self.tied else norm.new_tensor(self.steps))

    def _units(self, noisy: Tensor, deviation: Tensor | float | None) -> tuple[Tensor, Tensor | float] | None:
        """Return μ and σ of each sequence, to be broadcast over its tokens; None if the model is not noise-adaptive."""
        common.check_tensor("noisy", noisy, 2, "[..., T, n]")
        common.check_shape("noisy", noisy, (*noisy.shape[:-1], self.patch_size), "tokens by the model's patch_size")
        common.check_together(noisy=noisy, dictionary=self.dictionary)
        if not self.noise_adaptive:
            if deviation is not None:
                raise InputError("deviation requires noise_adaptive=True")
            return None
        if deviation is None:
            raise InputError("noise_adaptive=True requires deviation, the noise's standard deviation")
        mean = noisy.mean((-2, -1), keepdim=True)
        if isinstance(deviation, Tensor) and deviation.ndim:
            common.check_shape("deviation", deviation, tuple(noisy.shape[:-2]), "one a sequence")
            return mean, deviation.to(noisy)[..., None, None]
        number = common.check_factor("deviation", deviation)
        if number <= 0:
            raise InputError(f"deviation must be above 0, got {number!r}")
        return mean, number

    def _depths(
        self, noisy: Tensor, depth: int, read_all: bool, clean: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the projection of every depth, each a reconstruction if `read_all`, else only the last; with `clean`
        also its squared error, for the depths whose layer forms it."""
        noisy = noisy.to(common.compute_dtype(noisy))  # once, not in every layer
        # Each with its cast, which is made once for all layers; they form the gradient in the parameter's own dtype.
        if self.tied:
            # As rows of one tensor, so that their gradients are added up at once.
            rows = self.dictionary.expand(self.layers, -1, -1).unbind()
            tied = self.dictionary.to(noisy.dtype)
            casts = [tied.detach()] * self.layers
        else:
            rows, tied = self.dictionary.unbind(), None
            casts = self.dictionary.detach().to(noisy.dtype).unbind()
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
                step=self.steps[level - 1],
                threshold=self.thresholds[level - 1],
                scale=self.scale,
                nonlinearity=self.nonlinearity,
                projection=reconstruction if handed_on else None,
                next_dictionary=projected_on[level][0],
                target=clean,
                casts=(cast, projected_on[level][1]),
            )
            yield reconstruction, error


class VideoUT(DUST):
    """UT, the unrolled transformer of Yang et al., for video: `DUST` with ReLU in place of the shrinkage.

    Arguments, attributes and methods are those of `DUST`, less `sparsity` and `nonlinearity`.
    """

    def __init__(self, patch_size: int = 256, code_size: int = 1024, layers: int = 5, **options: Any) -> None:
        super().__init__(patch_size, code_size, layers, sparsity=0.0, nonlinearity="relu", **options)

    @property
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the step as computed."""
        return {name: value for name, value in super().config.items() if name not in ("sparsity", "nonlinearity")}


def _of_each_layer(name: str, given: Any, layers: int, non_negative: bool = False) -> tuple[float, ...]:
    """Return one number a layer, given one for all or as many as there are layers."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return (common.check_factor(name, given, non_negative=non_negative),) * layers
    if len(given) != layers:
        raise InputError(f"{name} must be one number, or one for each of {layers} layers, got {given!r}")
    return tuple(common.check_factor(f"{name}[{n}]", one, non_negative=non_negative) for n, one in enumerate(given))


def _normalized(tokens: Tensor, units: tuple[Tensor, Tensor | float] | None) -> Tensor:
    return tokens if units is None else (tokens - units[0]) / units[1]


def _restored(tokens: Tensor, units: tuple[Tensor, Tensor | float] | None) -> Tensor:
    return tokens if units is None else tokens * units[1] + units[0]
