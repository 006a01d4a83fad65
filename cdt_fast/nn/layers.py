"""Halves of layers and whole ones, with their parameters."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.checks import check_choice, check_integer, check_positive
from cdt_fast.kernels.arguments import Nonlinearity
from cdt_fast.models.dictionary import overcomplete_dct, squared_spectral_norm
from cdt_fast.ops.shared.checks import LayerNonlinearity, check_factor, check_shape, check_tensor


class SymmetricAttention(nn.Module):
    """Attention of tokens Y with one projection for queries and keys, `softmax_rows(β Z Zᵀ) Y` with `Z = Y Wᵀ`.

    Args:
        width: d, of the tokens.
        attention_width: k, of the projection; None: d.
        scale: β, the factor of the scores.
        energy: see `ops.symmetric_attention`.
        device, dtype: of the parameter.

    Attributes:
        weight: W, `[k, d]`; Xavier initialization.

    Raises:
        InputError: an argument is out of its range.
    """

    def __init__(
        self,
        width: int,
        attention_width: int | None = None,
        *,
        scale: float = 1.0,
        energy: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        attention_width = width if attention_width is None else attention_width
        sizes = check_integer("attention_width", attention_width, 1), check_integer("width", width, 1)
        self.scale, self.energy = check_factor("scale", scale), bool(energy)
        self.weight = nn.Parameter(torch.empty(*sizes, device=device, dtype=dtype))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The attended tokens, `[..., T, d]`.

        Args:
            tokens: Y, `[..., T, d]`.
            lengths: `[...]`, the number of tokens that count in each sequence.

        Raises:
            InputError: as `ops.symmetric_attention`.
        """
        check_tensor("tokens", tokens, 2, "[..., T, d]")
        check_shape("tokens", tokens, (*tokens.shape[:-1], self.weight.shape[1]), "tokens of the module's width")
        projected = nn.functional.linear(tokens, self.weight)
        return ops.symmetric_attention(projected, tokens, scale=self.scale, lengths=lengths, energy=self.energy)

    def extra_repr(self) -> str:
        k, d = self.weight.shape
        return f"{d}, {k}, scale={self.scale:g}, energy={self.energy}"


class ResidualLinear(nn.Module):
    """The second half of a UT layer, `φ(R + α x W)`.

    Args:
        in_features: n, the width of x.
        out_features: m, the width of the residual and of the result.
        alpha: α, the factor of the product.
        nonlinearity: φ: "relu", "soft_threshold", "hard_threshold" or "identity".
        threshold: θ of the thresholds.
        device, dtype: of the parameter.

    Attributes:
        weight: W, `[n, m]`; Xavier initialization.

    Raises:
        InputError: an argument is out of its range.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        alpha: float = 1.0,
        nonlinearity: Nonlinearity = "relu",
        threshold: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = check_integer("in_features", in_features, 1), check_integer("out_features", out_features, 1)
        self.alpha = check_factor("alpha", alpha)
        self.nonlinearity = check_choice("nonlinearity", nonlinearity, get_args(Nonlinearity))
        self.threshold = check_factor("threshold", threshold, non_negative=True)
        self.weight = nn.Parameter(torch.empty(*sizes, device=device, dtype=dtype))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """`[..., m]` of x `[..., n]` and a residual `[..., m]` or `[m]`.

        Raises:
            InputError: as `ops.residual_linear`.
        """
        return ops.residual_linear(
            x, self.weight, residual, alpha=self.alpha, nonlinearity=self.nonlinearity, threshold=self.threshold
        )

    def extra_repr(self) -> str:
        n, m = self.weight.shape
        return f"{n}, {m}, alpha={self.alpha:g}, nonlinearity={self.nonlinearity!r}, threshold={self.threshold:g}"


class SoftThreshold(nn.Module):
    """Shrinkage `S_θ(x) = sign(x) max(|x| − θ, 0)` with a fixed or a learned threshold.

    Args:
        threshold: θ ≥ 0, where a learned one starts.
        features: None: θ is fixed. An integer m: learned, one θ for each entry of the last dimension, or with m = 1 one
            for all. A learned θ below zero acts as zero.
        device, dtype: of a learned threshold.

    Raises:
        InputError: an argument is out of its range.
    """

    def __init__(
        self,
        threshold: float,
        features: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        value = check_factor("threshold", threshold, non_negative=True)
        self.threshold: float | nn.Parameter = value
        if features is not None:
            size = (check_integer("features", features, 1),)
            self.threshold = nn.Parameter(torch.full(size, value, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """`S_θ(x)`, of the shape and dtype of x.

        Raises:
            InputError: as `ops.soft_threshold`.
        """
        threshold = self.threshold
        return ops.soft_threshold(x, threshold.clamp(min=0) if isinstance(threshold, Tensor) else threshold)

    def extra_repr(self) -> str:
        return "" if isinstance(self.threshold, Tensor) else f"{self.threshold:g}"


class _Dictionary(nn.Module):
    """The dictionary of a LISTA step, with step and threshold, which stay fixed while it trains."""

    def __init__(
        self,
        patch_size: int,
        code_size: int,
        *,
        sparsity: float = 0.2,
        step: float | None = None,
        nonlinearity: LayerNonlinearity = "soft_threshold",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integer("patch_size", patch_size, 1)
        check_integer("code_size", code_size, 1)
        initial = overcomplete_dct(patch_size, code_size)
        largest = 1.0 / squared_spectral_norm(initial).item()
        self.step = largest if step is None else check_positive("step", step)
        self.nonlinearity = check_choice("nonlinearity", nonlinearity, get_args(LayerNonlinearity))
        sparsity = check_factor("sparsity", sparsity, non_negative=True)
        self.threshold = 0.0 if nonlinearity == "relu" else sparsity * self.step
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self.dictionary = nn.Parameter(initial.to(device=device, dtype=dtype))

    def extra_repr(self) -> str:
        n, m = self.dictionary.shape
        return f"{n}, {m}, step={self.step:.4g}, threshold={self.threshold:.4g}, nonlinearity={self.nonlinearity!r}"


class LISTAStep(_Dictionary):
    """A step of LISTA with a learned dictionary, `H⁺ = S_θ(H + (1/c)(X − H Dᵀ) D)`.

    Args:
        patch_size: n, the width of the signal.
        code_size: m, atoms of the dictionary.
        sparsity: λ₁ ≥ 0; θ = λ₁/c. With "relu" there is no threshold.
        step: 1/c > 0; None: 1/‖D‖₂² of the initial dictionary, the largest with which no step raises the objective.
        nonlinearity: "soft_threshold", "hard_threshold" or "relu".
        device, dtype: of the parameter.

    Attributes:
        dictionary: D, `[n, m]`; starts as the overcomplete DCT.
        step, threshold: 1/c and θ.

    Raises:
        InputError: an argument is out of its range.
    """

    def forward(self, codes: Tensor, signal: Tensor) -> Tensor:
        """The next codes `[..., m]` of codes H `[..., m]` and a signal X `[..., n]`.

        Raises:
            InputError: as `ops.lista_step`.
        """
        return ops.lista_step(
            codes,
            signal,
            self.dictionary,
            step=self.step,
            threshold=self.threshold,
            nonlinearity=self.nonlinearity,
        )


class UnrolledLayer(_Dictionary):
    """A layer of DUST (or, with "relu", of UT for video): attention, a LISTA step, and the next projection.

    Args:
        patch_size, code_size, sparsity, step, nonlinearity, device, dtype: as of `LISTAStep`.
        scale: β, the factor of the attention scores.

    Attributes:
        dictionary, step, threshold: D, 1/c and θ, as of `LISTAStep`.
        scale: β.

    Raises:
        InputError: an argument is out of its range.
    """

    def __init__(
        self,
        patch_size: int,
        code_size: int,
        *,
        sparsity: float = 0.2,
        step: float | None = None,
        nonlinearity: LayerNonlinearity = "soft_threshold",
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            patch_size,
            code_size,
            sparsity=sparsity,
            step=step,
            nonlinearity=nonlinearity,
            device=device,
            dtype=dtype,
        )
        self.scale = check_factor("scale", scale)

    def forward(
        self,
        codes: Tensor,
        signal: Tensor,
        projection: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        next_dictionary: Tensor | None = None,
        target: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """What `ops.unrolled_layer` returns for these arguments: the next codes, their projection, maybe their error.

        Raises:
            InputError: as `ops.unrolled_layer`.
        """
        return ops.unrolled_layer(
            codes,
            signal,
            self.dictionary,
            step=self.step,
            threshold=self.threshold,
            scale=self.scale,
            nonlinearity=self.nonlinearity,
            projection=projection,
            lengths=lengths,
            next_dictionary=next_dictionary,
            target=target,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale:g}"
