"""What travels from an op's public function through its operator to the launcher of its kernel: one record an op.

Rows are tokens of all sequences, one below the other; B sequences of T tokens. `backend` is what the public function
has chosen: operator, gradient and the shapes that torch.compile is told follow it, whatever is set meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Backend = Literal["torch", "triton"]
# "identity" is what S_0 is: an output of zero says nothing about its gradient.
Reduction = Literal["mean", "sum"]
Nonlinearity = Literal["soft_threshold", "hard_threshold", "relu", "identity"]


@dataclass(frozen=True, kw_only=True)
class ResidualLinearArguments:
    """`φ(residual + α x W)`."""

    x: Tensor  # [rows, n]
    weight: Tensor  # [n, m]
    residual: Tensor  # [rows, m] or [m]
    alpha: float = 1.0
    threshold: float = 0.0
    nonlinearity: Nonlinearity = "relu"
    backend: Backend = "triton"


@dataclass(frozen=True, kw_only=True)
class ResidualLinearBackwardArguments:
    """What its gradient is computed from; what no wanted gradient reads is None."""

    grad_output: Tensor  # [rows, m]
    output: Tensor | None  # [rows, m], contiguous; None for "identity"
    x: Tensor | None  # [rows, n], for the gradient of the weight
    weight: Tensor | None  # [n, m], for the gradient of x
    weight_dtype: torch.dtype
    alpha: float
    nonlinearity: Nonlinearity
    needs_residual: bool


@dataclass(frozen=True, kw_only=True)
class ListaStepArguments:
    """`φ(H + step · (X − H Dᵀ) D)`."""

    codes: Tensor  # H, [rows, m]
    signal: Tensor  # X, [rows, n]
    dictionary: Tensor  # D, [n, m]
    step: float
    threshold: float
    nonlinearity: Nonlinearity = "soft_threshold"
    keep_residual: bool = True  # for the gradient of the dictionary
    backend: Backend = "triton"


@dataclass(frozen=True, kw_only=True)
class ListaStepBackwardArguments:
    """What its gradient is computed from."""

    grad_output: Tensor  # dH⁺, [rows, m]
    output: Tensor  # H⁺, [rows, m], contiguous
    dictionary: Tensor  # D, [n, m]
    codes: Tensor | None = None  # H, [rows, m], for the gradient of the dictionary
    residual: Tensor | None = None  # X − H Dᵀ, [rows, n], as well
    step: float
    nonlinearity: Nonlinearity = "soft_threshold"
    needs_codes: bool = True
    needs_signal: bool = True
    needs_dictionary: bool = True
    backend: Backend = "triton"


@dataclass(frozen=True, kw_only=True)
class SymmetricAttentionArguments:
    """`softmax_rows(β S) V` with `S = z zᵀ`, or with `energy` `S_ij = z_iᵀ z_j − ½‖z_j‖²`."""

    z: Tensor  # [B, T, d], contiguous
    values: Tensor | None = None  # V, [B, T, k], contiguous; None: z
    lengths: Tensor | None = None  # [B], the tokens that count
    scale: float = 1.0  # β
    energy: bool = False
    keeps: bool = False  # what the gradient can use
    backend: Backend = "triton"


@dataclass(frozen=True, kw_only=True)
class SymmetricAttentionBackwardArguments(SymmetricAttentionArguments):
    """What its gradient is computed from; without values all of it is in that of z."""

    output: Tensor  # [B, T, k]
    log_sum_exp: Tensor  # [B, T]; of plain torch empty
    kept: Tensor  # of plain torch the attention, of a kernel what rounding took from the output, or empty
    grad_output: Tensor  # [B, T, k], contiguous
    needs_z: bool = True
    needs_values: bool = True


@dataclass(frozen=True, kw_only=True)
class ReconstructionLossArguments:
    """`mean over tokens of ‖s − x̂_l‖²` of every depth l, or the sum."""

    reconstructions: list[Tensor]  # x̂_l, [..., n]
    target: Tensor  # s, [..., n]
    padding: Tensor | None = None  # [...], true at the tokens that do not count
    reduction: Reduction = "mean"  # over the tokens that count
    backend: Backend = "triton"


@dataclass(frozen=True, kw_only=True)
class ReconstructionLossBackwardArguments(ReconstructionLossArguments):
    """What its gradient is computed from."""

    grad: Tensor  # [depths], of the losses
    needs_reconstructions: list[bool]
    needs_target: bool = False


@dataclass(frozen=True, kw_only=True)
class UnrolledLayerArguments:
    """`H⁺ = φ(A H + step · (X − A Z) D)` with `A = softmax_rows(β Z Zᵀ)`, and `Z⁺ = H⁺ D⁺ᵀ`."""

    codes: Tensor | None  # H, [B, T, m], contiguous; None: step · X D
    signal: Tensor  # X, [B, T, n], contiguous
    dictionary: Tensor  # D, [n, m]
    projection: Tensor | None  # Z = H Dᵀ, [B, T, n], contiguous; None: it is computed
    next_dictionary: Tensor | None = None  # D⁺, [k, m]; None: D
    target: Tensor | None = None  # S, [B, T, k], for the squared error of Z⁺
    lengths: Tensor | None = None  # [B], the tokens that count
    narrow_dictionary: Tensor | None = None  # D as it is multiplied, in the dtype of the tokens and contiguous
    narrow_next_dictionary: Tensor | None = None  # D⁺ likewise
    step: float
    threshold: float
    scale: float = 1.0  # β
    nonlinearity: Nonlinearity = "soft_threshold"
    backend: Backend = "triton"


@dataclass(frozen=True, kw_only=True)
class UnrolledLayerBackwardArguments(UnrolledLayerArguments):
    """What its gradient is computed from. Of the upstream gradients those that are None are zero."""

    next_codes: Tensor  # H⁺, [B, T, m]
    next_projection: Tensor | None  # Z⁺, [B, T, k], read with a target
    grad_next_codes: Tensor | None = None  # like H⁺
    grad_next_projection: Tensor | None = None  # like Z⁺
    grad_error: Tensor | None = None  # [], float32, of the squared error
    projection_given: bool = True  # whether the caller did; else its gradient goes on to codes and dictionary
    needs_codes: bool = True
    needs_signal: bool = True
    needs_dictionary: bool = True
    needs_projection: bool = True
    needs_next_dictionary: bool = False


class UnrolledLayerGradients(NamedTuple):
    """What the kernels and plain torch compute of the gradient, before the dictionaries'; None where not needed."""

    update: Tensor  # dU, like the codes, for the dictionary's gradient
    residual: Tensor | None  # (1/c)(X − A Z), like the signal, for the dictionary's gradient
    next_projection: Tensor | None  # the whole dZ⁺, with the loss's part in it
    signal: Tensor
    projection: Tensor | None
    codes: Tensor | None


class SweepArguments(NamedTuple):
    """Rows of the logits of a chunk of the layerwise cross-entropy, and what a sweep over them reads and writes."""

    logits: Tensor  # [rows, V], overwritten
    targets: Tensor  # [rows] int64
    log_sums: Tensor  # [rows], written with the losses, else read
    losses: Tensor | None = None  # [rows], written
    scales: Tensor | None = None  # [rows], what the gradients are multiplied by; None: by one
    out: Tensor | None = None  # [rows, V], where the gradient goes, which may be `logits`; None: nowhere
